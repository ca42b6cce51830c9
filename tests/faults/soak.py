"""A long run under fire: workers are killed and stopped at random, envs raise and crash, Ctrl-C comes in the middle of
calls, the caller forks, the layouts of infos change, and every row is checked.

    python tests/faults/soak.py --seconds 300

Each row holds its env, episode and step, and a checksum of these, so that a wrong, stale, doubled or lost row is
noticed. At the end memory, fds and processes have to be where they were after the first tenth of the time.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

import muster
from muster.errors import ClosedError
from muster.vector.results import Batch

NUM_ENVS, NUM_WORKERS, NUM_LENT = 16, 4, 2
KILL_EVERY_S = 0.2
INTERRUPT_EVERY_S = 0.5
FORK_EVERY_S = 1.0
LAYOUTS = 200  # of infos; more than a worker keeps
STEP_TIMEOUT_S = 0.5
RAISES, CRASHES = 1 / 20_000, 1 / 50_000  # for each env step
EPISODE_STEPS = 60
MEMORY_GROWTH_BYTES = 32 << 20
_WORDS = 12


def row_of(env: int, episode: int, step: int) -> Any:
    """int64 ``[12]``: the three numbers, and a checksum of them in each other place."""
    row = np.full(_WORDS, hash((env, episode, step)) & 0x7FFFFFFF, np.int64)
    row[:3] = env, episode, step
    return row + np.arange(_WORDS) * (np.arange(_WORDS) > 2)


class UnderFire(gym.Env[Any, Any]):
    """Counts its steps; raises or crashes at random. Episodes have numbers that no other process uses."""

    observation_space = gym.spaces.Box(np.iinfo(np.int64).min, np.iinfo(np.int64).max, (_WORDS,), np.int64)
    action_space = gym.spaces.Discrete(2)

    def __init__(self) -> None:
        info = muster.get_worker_info()
        assert info is not None
        self.index = info.env_index
        self.random = random.Random(os.urandom(8))
        self.episode = self.random.getrandbits(40)
        self.steps = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.episode, self.steps = self.episode + 1, 0
        return row_of(self.index, self.episode, 0), {}

    def step(self, action: Any) -> Any:
        luck = self.random.random()
        if luck < CRASHES:
            ctypes.string_at(0)
        elif luck < CRASHES + RAISES:
            raise RuntimeError("bad luck")
        self.steps += 1
        row = row_of(self.index, self.episode, self.steps)
        info: dict[str, Any] = {"step": self.steps}
        if self.random.random() < 0.1:
            info[f"layout {self.random.randrange(LAYOUTS)}"] = {"step": self.steps, "word": str(self.steps)}
        return row, float(self.steps), self.steps == EPISODE_STEPS, False, info


class Big(gym.Env[Any, Any]):
    """Counts its steps in every number of a big observation."""

    observation_space = gym.spaces.Box(0, np.inf, (1 << 14,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.steps = 0
        return np.zeros(1 << 14, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return np.full(1 << 14, self.steps, np.float32), 0.0, False, False, {}


@dataclass
class Report:
    """The results of a soak. problems: empty if all was well."""

    rows: int = 0
    kills: int = 0
    interrupts: int = 0
    forks: int = 0
    restarts: int = 0
    truncations: int = 0
    episodes: int = 0
    problems: list[str] = field(default_factory=list)


class Checker:
    """Follows each env's episode, row by row."""

    def __init__(self, obs: Any) -> None:
        self.report = Report()
        self.start(obs)

    def start(self, obs: Any) -> None:
        """Begins anew with the result of a reset of all envs, which is of new episodes."""
        for env, row in enumerate(obs):
            fresh = self.report.rows == 0 or row[1] != self.last[env][1]
            if not np.array_equal(row, row_of(env, int(row[1]), 0)) or not fresh:
                self.report.problems.append(f"row {self.report.rows} of env {env} is not of a reset: {row[:3]}")
        self.last = obs.copy()
        self.over = np.zeros(NUM_ENVS, bool)

    def check(self, batch: Any) -> None:
        restarted = batch.infos.get("_restarted", np.zeros(len(batch.env_ids), bool))
        steps = batch.infos.get("step", np.zeros(len(batch.env_ids)))
        for row, env in enumerate(batch.env_ids.tolist()):
            obs, step = batch.obs[row], int(batch.obs[row][2])
            ended = bool(batch.terminated[row]), bool(batch.truncated[row])
            reward, info_step = batch.rewards[row], steps[row]
            layouts = [key for key in batch.infos if key.startswith("layout") and batch.infos[f"_{key}"][row]]
            if not np.array_equal(obs, row_of(env, int(obs[1]), step)):
                wrong = "its checksum is wrong"
            elif any(batch.infos[key]["step"][row] != step for key in layouts) or any(
                batch.infos[key]["word"][row] != str(step) for key in layouts
            ):
                wrong = "its info is another's"
            elif self.over[env]:
                fresh = obs[1] != self.last[env][1] and step == 0
                wrong = "" if fresh and ended == (False, False) and reward == 0 else "not the start of an episode"
            elif restarted[row]:
                kept = np.array_equal(obs, self.last[env])
                wrong = "" if kept and ended == (False, True) and reward == 0 else "not a truncated last row"
            else:
                goes_on = obs[1] == self.last[env][1] and step == self.last[env][2] + 1
                as_told = ended == (step == EPISODE_STEPS, False) and reward == step == info_step
                wrong = "" if goes_on and as_told else "not the next step"
            if wrong and len(self.report.problems) < 20:
                told = f"after {self.last[env][:3]}, over={self.over[env]}: {obs[:3]}, {ended}, reward {reward}"
                self.report.problems.append(f"row {self.report.rows} of env {env} is {wrong}: {told}")
            self.report.rows += 1
            self.report.episodes += ended[0]
            self.report.truncations += ended[1]
            self.last[env], self.over[env] = obs, any(ended)


class Killer(threading.Thread):
    """Kills or stops a random worker, none of the `spared`, every `KILL_EVERY_S` on average."""

    def __init__(self, spared: set[int], seed: int) -> None:
        super().__init__(name="killer")
        self.kills = 0
        self._spared, self._random, self._done = spared, random.Random(seed), threading.Event()

    def run(self) -> None:
        while not self._done.wait(self._random.expovariate(1 / KILL_EVERY_S)):
            pid = self._random.choice([*workers_of(os.getpid()) - self._spared] or [0])
            if pid:
                number = self._random.choice([signal.SIGKILL, signal.SIGSTOP])
                try:
                    os.kill(pid, number)
                    self.kills += 1
                except ProcessLookupError:
                    continue

    def stop(self) -> None:
        self._done.set()
        self.join()


class Interrupts:
    """Ctrl-C in the middle of calls: a handler that raises while what `call` calls runs, and at no other time."""

    def __init__(self, report: Report) -> None:
        self._report, self._calling = report, False
        self._before = signal.signal(signal.SIGALRM, self._raise)
        signal.setitimer(signal.ITIMER_REAL, INTERRUPT_EVERY_S, INTERRUPT_EVERY_S)

    def call(self, act: Callable[..., Any], *args: Any) -> Any:
        self._calling = True
        try:
            return act(*args)
        finally:
            self._calling = False

    def stop(self) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)

    def _raise(self, _: int, frame: Any) -> None:
        if self._calling and frame.f_code is not Interrupts.call.__code__:
            self._calling = False
            self._report.interrupts += 1
            raise KeyboardInterrupt


def soak(seconds: float, seed: int = 0) -> Report:
    """Steps for `seconds`, by `step` and by `send` and `recv` in turn."""
    envs = muster.make_vec(
        UnderFire,
        NUM_ENVS,
        num_workers=NUM_WORKERS,
        on_failure="restart",
        max_restarts=1_000_000,
        step_timeout=STEP_TIMEOUT_S,
    )
    checker = Checker(envs.reset(seed=seed)[0])
    report = checker.report
    # Lends observations: they are big, and envs that are built again would need copies.
    lender = muster.make_vec(Big, NUM_LENT, num_workers=1)
    lender.reset()
    killer = Killer({worker["pid"] for worker in lender.stats()["workers"]}, seed)
    interrupts = Interrupts(report)
    start = time.monotonic()
    held: dict[str, int] | None = None
    killer.start()
    try:
        while (elapsed_s := time.monotonic() - start) < seconds and not report.problems:
            if held is None and elapsed_s > seconds / 10:
                held = holdings()
            try:
                some_steps(envs, checker, interrupts.call)
                some_halves(envs, checker, interrupts.call)
                if report.forks < elapsed_s / FORK_EVERY_S:
                    fork(lender, report)
            except KeyboardInterrupt:
                begin_again(envs, checker, interrupts.call)
    finally:
        interrupts.stop()
        killer.stop()
    some_steps(envs, checker)  # replaces the workers that the killer has left broken
    report.kills, report.restarts = killer.kills, envs.stats()["restarts"]
    if report.truncations > report.restarts:  # those of rows that a Ctrl-C has dropped are missing
        report.problems.append(f"{report.truncations} truncations, but only {report.restarts} envs were restarted")
    after = holdings()
    for kind, before in (held or after).items():
        limit = before + (MEMORY_GROWTH_BYTES if kind == "memory_bytes" else 0)
        if kind == "processes":  # a worker may just have been dead
            limit = NUM_WORKERS + 1
        if after[kind] > limit:
            report.problems.append(f"{kind} grew from {before} to {after[kind]}")
    envs.close()
    lender.close()
    if workers_of(os.getpid()):
        report.problems.append("workers are left after close")
    return report


def plainly(act: Callable[..., Any], *args: Any) -> Any:
    return act(*args)


def some_steps(envs: Any, checker: Checker, call: Any = plainly) -> None:
    actions, ids = np.zeros(NUM_ENVS, np.int64), np.arange(NUM_ENVS)
    for _ in range(20):
        checker.check(Batch(ids, *call(envs.step, actions)))


def some_halves(envs: Any, checker: Checker, call: Any) -> None:
    call(envs.send, np.zeros(NUM_ENVS, np.int64))
    for _ in range(40):
        batch = call(envs.recv, NUM_ENVS // 2)
        checker.check(batch)
        call(envs.send, np.zeros(len(batch.env_ids), np.int64), batch.env_ids)
    checker.check(call(envs.recv))


def begin_again(envs: Any, checker: Checker, call: Any) -> None:
    """Resets all envs after a Ctrl-C, until no other comes meanwhile."""
    while True:
        with contextlib.suppress(KeyboardInterrupt):
            return checker.start(call(envs.reset)[0])


def fork(lender: Any, report: Report) -> None:
    """Forks this process: the child can use no env, and neither process sees what the other does with observations."""
    actions = np.zeros(NUM_LENT, np.int64)
    obs = lender.step(actions)[0]
    kept, report.forks = obs.copy(), report.forks + 1
    go_on, may_go_on = os.pipe()
    if not (child := os.fork()):
        try:
            os.read(go_on, 1)  # until the parent has stepped
            with contextlib.suppress(ClosedError):
                lender.step(actions)
                os._exit(1)
            is_same = np.array_equal(obs, kept)
            obs[:] = -1
            os._exit(not is_same)
        finally:
            os._exit(2)
    for _ in range(10):  # into all blocks of the shared memory
        lender.step(actions)
    os.write(may_go_on, b"x")
    status = os.waitpid(child, 0)[1]
    os.close(go_on)
    os.close(may_go_on)
    if obs.nbytes < 1 << 16 or obs.base is None:
        report.problems.append("the observations were not lent")
    if status or not np.array_equal(obs, kept):
        report.problems.append(f"a fork has changed an observation, or could step: status {status}")


def workers_of(caller: int) -> set[int]:
    """The grandchildren of `caller`: workers are children of the launcher."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if state != "Z":
                parents[int(entry.name)] = int(parent)
    return {pid for pid, parent in parents.items() if parents.get(parent) == caller}


def holdings() -> dict[str, int]:
    """Memory, fds and threads of this process, and the processes that it has started."""
    memory = Path("/proc/self/statm").read_text().split()
    return {
        "memory_bytes": (int(memory[1]) - int(memory[2])) * os.sysconf("SC_PAGESIZE"),
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count() - sum(isinstance(one, Killer) for one in threading.enumerate()),
        "processes": len(workers_of(os.getpid())),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    result = soak(options.seconds, options.seed)
    print(result)
    raise SystemExit(bool(result.problems))
