"""The vector environments that `bench_stepping.py` compares, each in a host process of its own.

A host opens its contender, warms it up and then sleeps on a pipe until a message has it run for a while. Nothing that
one contender imports, forks or allocates touches another, no start falls into a measurement, and an idle contender
costs nothing: the workers of all of them sleep too.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, Protocol

import gymnasium
import numpy as np

from workloads import (
    CALLER_STEPS,
    ENVPOOL,
    GYMNASIUM_ASYNC,
    GYMNASIUM_SYNC,
    LIMIT,
    LIMIT_IN_STEP,
    ONE_EACH,
    ONE_LOOP,
    PROCESS,
    SB3_DUMMY,
    SB3_SUBPROC,
    SERIAL,
    WORKLOADS,
    Workload,
)

_ACTION_BATCHES = 256
_WARM_UP_S = 0.3
_STOP_TIMEOUT_S = 20.0
_DONE = 1 << 62
# After each window so large a share of it is stepped again, to count how many of the rows are resets.
_COUNTING_SHARE = 0.15

# Hosts start afresh, so that they inherit nothing from each other.
_spawn = multiprocessing.get_context("spawn")


class NotHere(Exception):
    """Raised where a contender does not have the workload, or is not installed."""


class Contender(Protocol):
    def run(self, seconds: float) -> float:
        """Env steps per second over a window of ``seconds``."""

    def close(self) -> object: ...


def usable_cores() -> int:
    return len(os.sched_getaffinity(0))


def action_batches(single_action_space: gymnasium.Space[Any], num_envs: int) -> list[np.ndarray]:
    """256 batches of random actions, [N, ...] in the space's dtype, drawn before anything is timed."""
    single_action_space.seed(0)
    return [np.stack([single_action_space.sample() for _ in range(num_envs)]) for _ in range(_ACTION_BATCHES)]


class Stepper:
    """A vector env behind ``step(actions)``.

    resets: returns how many rows of a result make the next step of their env a reset (Gymnasium's next-step autoreset);
    such rows are no env steps. They are counted outside the measured window, since looking at every result inside the
    window would cost the fast contenders some per cent. None: every row is an env step.
    """

    def __init__(
        self,
        step: Callable[[Any], Any],
        single_action_space: gymnasium.Space[Any],
        num_envs: int,
        close: Callable[[], object],
        resets: Callable[[Any], int] | None = None,
    ) -> None:
        self._step = step
        self._num_envs = num_envs
        self._resets = resets
        self._actions = itertools.cycle(action_batches(single_action_space, num_envs))
        self._rows_seen = 0
        self._resets_seen = 0
        self.close = close

    def run(self, seconds: float) -> float:
        step, clock = self._step, time.perf_counter
        calls = 0
        now = start = clock()
        deadline = start + seconds
        for actions in self._actions:
            if now >= deadline:
                break
            step(actions)
            calls += 1
            now = clock()
        return calls * self._num_envs * (1.0 - self._reset_share(seconds * _COUNTING_SHARE)) / (now - start)

    def _reset_share(self, seconds: float) -> float:
        if self._resets is None:
            return 0.0
        deadline = time.perf_counter() + seconds
        while time.perf_counter() < deadline:
            self._resets_seen += self._resets(self._step(next(self._actions)))
            self._rows_seen += self._num_envs
        return self._resets_seen / self._rows_seen


def _ended(result: tuple[Any, ...]) -> int:
    return int(np.count_nonzero(result[2] | result[3]))


class BareLoop:
    """One process that only loops ``env.step`` over its envs and resets those that end.

    progress: shared by the loops that keep in step; for each loop the rounds that it has done.  index: of this loop.
    """

    def __init__(self, workload: Workload, first_env: int, num_envs: int, progress: Any = None, index: int = 0) -> None:
        self._progress, self._index = progress, index
        self._envs = [workload.factory() for _ in range(num_envs)]
        for index, env in enumerate(self._envs, start=first_env):
            env.reset(seed=index)
        batches = action_batches(self._envs[0].action_space, num_envs)
        self._actions = itertools.cycle([list(batch) for batch in batches])

    def run(self, seconds: float) -> float:
        clock = time.perf_counter
        steppers = [(env.step, env.reset) for env in self._envs]
        rows = 0
        progress, index = self._progress, self._index
        if progress is not None:
            progress[index] = 0
        now = start = clock()
        deadline = start + seconds
        for actions in self._actions:
            if now >= deadline:
                break
            for (step, reset), action in zip(steppers, actions, strict=True):
                _, _, terminated, truncated, _ = step(action)
                if terminated or truncated:
                    reset()
            rows += 1
            if progress is not None:
                progress[index] = rows
                while min(progress) < rows:
                    pass
            now = clock()
        if progress is not None:
            progress[index] = _DONE  # so that no loop waits for this one any more
        return rows * len(steppers) / (now - start)

    def close(self) -> None:
        for env in self._envs:
            env.close()


class Limit:
    """What the cores can do: a bare loop per core, unconnected, the envs split evenly among them.

    in_step: every loop waits, awake, until all have finished the round. That is what stepping all envs at once would
    reach if it cost nothing: a batch is there when its slowest env is, and cores are never equally fast.
    """

    def __init__(self, workload: Workload, in_step: bool = False) -> None:
        num_loops = min(usable_cores(), workload.num_envs)
        shares = np.array_split(np.arange(workload.num_envs), num_loops)
        progress = _spawn.RawArray("q", num_loops) if in_step else None
        self._loops = [
            start_host(BareLoop, workload, int(share[0]), len(share), progress, index)
            for index, share in enumerate(shares)
        ]
        for _, connection in self._loops:
            connection.recv()

    def run(self, seconds: float) -> float:
        return sum(run_together([connection for _, connection in self._loops], seconds))

    def close(self) -> None:
        for process, connection in self._loops:
            stop_host(process, connection)


def _one_loop(workload: Workload) -> Contender:
    return BareLoop(workload, 0, workload.num_envs)


def _muster(workload: Workload, **options: Any) -> Contender:
    try:
        import muster
    except ImportError as error:
        raise NotHere(str(error)) from error
    envs = muster.make_vec([workload.factory] * workload.num_envs, copy=workload.copy, **options)
    envs.reset(seed=0)
    return Stepper(envs.step, envs.single_action_space, workload.num_envs, envs.close, _ended)


def _muster_serial(workload: Workload) -> Contender:
    return _muster(workload, backend="serial")


def _muster_process(workload: Workload) -> Contender:
    return _muster(workload, num_workers=min(usable_cores(), workload.num_envs))


def _muster_one_each(workload: Workload) -> Contender:
    return _muster(workload)


def _muster_caller_steps(workload: Workload) -> Contender:
    workers = min(usable_cores(), workload.num_envs) - 1
    if workers == 0:
        raise NotHere("on one core the caller would step all envs")
    return _muster(workload, num_workers=workers, caller_steps=True)


def _gymnasium(workload: Workload, kind: type[gymnasium.vector.VectorEnv[Any, Any, Any]]) -> Contender:
    envs: Any = kind([workload.factory] * workload.num_envs, copy=workload.copy)  # type: ignore[call-arg]
    envs.reset(seed=0)
    return Stepper(envs.step, envs.single_action_space, workload.num_envs, envs.close, _ended)


def _gymnasium_sync(workload: Workload) -> Contender:
    return _gymnasium(workload, gymnasium.vector.SyncVectorEnv)


def _gymnasium_async(workload: Workload) -> Contender:
    return _gymnasium(workload, gymnasium.vector.AsyncVectorEnv)


def _sb3(workload: Workload, name: str, **options: Any) -> Contender:
    try:
        from stable_baselines3.common import vec_env
    except ImportError as error:
        raise NotHere(str(error)) from error
    envs = getattr(vec_env, name)([workload.factory] * workload.num_envs, **options)
    envs.seed(0)
    envs.reset()
    return Stepper(envs.step, envs.action_space, workload.num_envs, envs.close)


def _sb3_dummy(workload: Workload) -> Contender:
    return _sb3(workload, "DummyVecEnv")


def _sb3_subproc(workload: Workload) -> Contender:
    # The start method does not change how fast it steps; its default would import torch once per env.
    return _sb3(workload, "SubprocVecEnv", start_method="fork")


def _envpool(workload: Workload) -> Contender:
    if workload.envpool_id is None:
        raise NotHere("EnvPool does not have this env")
    try:
        import envpool
    except ImportError as error:
        raise NotHere(str(error)) from error
    threads = min(usable_cores(), workload.num_envs)
    envs = envpool.make(
        workload.envpool_id, env_type="gymnasium", num_envs=workload.num_envs, num_threads=threads, seed=0
    )
    envs.reset()
    return Stepper(envs.step, envs.action_space, workload.num_envs, envs.close, _ended)


CONTENDERS: dict[str, Callable[[Workload], Contender]] = {
    LIMIT: Limit,
    LIMIT_IN_STEP: functools.partial(Limit, in_step=True),
    ONE_LOOP: _one_loop,
    SERIAL: _muster_serial,
    PROCESS: _muster_process,
    ONE_EACH: _muster_one_each,
    CALLER_STEPS: _muster_caller_steps,
    GYMNASIUM_SYNC: _gymnasium_sync,
    GYMNASIUM_ASYNC: _gymnasium_async,
    SB3_DUMMY: _sb3_dummy,
    SB3_SUBPROC: _sb3_subproc,
    ENVPOOL: _envpool,
}


def _host(connection: Connection, open_contender: Callable[..., Contender], arguments: tuple[Any, ...]) -> None:
    try:
        contender = open_contender(*arguments)
        contender.run(_WARM_UP_S)
    except NotHere as reason:
        connection.send(str(reason))
        return
    connection.send(None)
    try:
        while True:
            connection.send(contender.run(connection.recv()))
    except EOFError:  # the other end of the pipe is closed
        contender.close()


def open_by_name(contender: str, workload: str) -> Contender:
    return CONTENDERS[contender](WORKLOADS[workload])


def start_host(
    open_contender: Callable[..., Contender], *arguments: Any
) -> tuple[multiprocessing.process.BaseProcess, Connection]:
    """A process that holds a contender. Its first message is None once it is warm, or the reason not to take part."""
    ours, theirs = multiprocessing.Pipe()
    process = _spawn.Process(target=_host, args=(theirs, open_contender, arguments))
    process.start()
    theirs.close()  # so that a host that dies is an EOFError here, not an endless wait
    return process, ours


def stop_host(process: multiprocessing.process.BaseProcess, connection: Connection) -> None:
    """Closes the pipe, at which the host closes its contender and ends; kills a host that does not end."""
    connection.close()
    process.join(_STOP_TIMEOUT_S)
    if process.is_alive():
        process.kill()
        process.join()


def run_together(connections: Sequence[Connection], seconds: float) -> list[float]:
    """Env steps per second of each host, all running over the same window of ``seconds``."""
    for connection in connections:
        connection.send(seconds)
    return [connection.recv() for connection in connections]
