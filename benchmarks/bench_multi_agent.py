"""How close do multi-agent envs come to what the cores can do, and what does the layout of agents cost?

Env steps (all agents once) per second of: Muster's process backend, the same with ``caller_steps``, Muster's serial
backend, one bare loop, and two unconnected bare loops in two processes, which is the limit (100 %) on two cores. The
limit in step is the same two loops, which wait for each other, awake, after every round: the most that a vector env
that steps all envs at once can reach. Every contender has a process of its own, and the contenders run in turns. A turn
begins with a reset and a warm-up that are not counted. Medians of at least 3 rounds. ``layout`` is how much more CPU
time the serial backend takes for a step than the bare loop. The envs' ``state()`` is called for one contender only,
which shows what it costs. With ``--torchrl`` TorchRL's ParallelEnv runs on simple_spread, too.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import multiprocessing
import os
import statistics
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from results import heading, machine, table, versions, write_section

_QUESTION = "Multi-agent envs"
# Id, number of envs, and the longest turn in seconds. Melting Pot builds its substrates again for each episode, which
# takes as long as hundreds of steps, so a turn with its warm-up stays within the thousand steps of one episode.
_WORKLOADS = {
    "multiwalker_v9": ("pettingzoo/sisl/multiwalker_v9", 4, 10.0),
    "commons_harvest__open": ("meltingpot/commons_harvest__open", 4, 0.25),
    "simple_spread_v3": ("pettingzoo/mpe/simple_spread_v3", 8, 10.0),
}
_BATCHES = 64
_WARM_UP_S = 0.1  # the cores have idled, and each has run other things, since this contender's last turn
_DONE = 2**62
_spawn = multiprocessing.get_context("spawn")


def _nothing() -> None:
    pass


@dataclasses.dataclass
class Contender:
    some: Callable[[], int]  # makes some env steps and returns how many
    reset: Callable[[], object]  # before a turn
    leave: Callable[[], None] = _nothing  # after a turn

    def run(self, seconds: float) -> tuple[float, float]:
        """Env steps per second, and per second of the process's own CPU time."""
        self._steps(_WARM_UP_S)
        start, cpu = time.perf_counter(), time.process_time()
        count = self._steps(seconds)
        rates = count / (time.perf_counter() - start), count / (time.process_time() - cpu)
        self.leave()
        return rates

    def _steps(self, seconds: float) -> int:
        count, end = 0, time.perf_counter() + seconds
        while time.perf_counter() < end:
            count += self.some()
        return count


def bare(env_id: str, num_envs: int, progress: Any = None, index: int = 0) -> Contender:
    """A loop without Muster over the very objects that the id stands for.

    progress: shared by the loops that keep in step; for each loop the rounds that it has done.  index: of this loop.
    """
    from muster.envs import resolve_foreign_id

    factory = resolve_foreign_id(env_id)
    loop = _players if env_id.startswith("meltingpot/") else _parallel
    loops = [loop(factory()) for _ in range(num_envs)]

    def some() -> int:
        count = sum([step() for step, _ in loops])
        if progress is not None:
            progress[index] += 1
            while min(progress) < progress[index]:
                pass
        return count

    def reset() -> None:
        if progress is not None:
            progress[index] = 0
        for _, reset_env in loops:
            reset_env()

    def leave() -> None:
        if progress is not None:
            progress[index] = _DONE  # so that no loop waits for this one any more

    return Contender(some, reset, leave)


# The step of an env, which returns the number of steps that it made, and the env's reset.
Loop = tuple[Callable[[], int], Callable[[], object]]


def _parallel(env: Any) -> Loop:
    env.reset(seed=0)
    for i, agent in enumerate(env.possible_agents):
        env.action_space(agent).seed(i)
    batches = itertools.cycle(
        [{agent: env.action_space(agent).sample() for agent in env.possible_agents} for _ in range(_BATCHES)]
    )

    def step() -> int:
        if not env.agents:
            env.reset()
            return 0
        actions = next(batches)
        env.step({agent: actions[agent] for agent in env.agents})
        return 1

    return step, env.reset


def _players(env: Any) -> Loop:
    rng = np.random.default_rng(0)
    spec = env.action_spec()
    batches = itertools.cycle(rng.integers(0, spec[0].num_values, (_BATCHES, len(spec))).tolist())

    def step() -> int:
        env.step(next(batches))
        return 1

    return step, env.reset


def muster_envs(env_id: str, num_envs: int, **options: Any) -> Contender:
    import muster

    envs = muster.make_vec(env_id, num_envs, **options)
    envs.action_space.seed(0)
    batches = itertools.cycle([envs.action_space.sample() for _ in range(_BATCHES)])
    envs.reset(seed=0)
    ended = np.zeros(num_envs, np.bool_)

    def some() -> int:
        steps = num_envs - int(ended.sum())  # the row after an end is a reset
        _, _, terminated, truncated, _ = envs.step(next(batches))
        np.logical_or(terminated, truncated, out=ended)
        return steps

    def reset() -> None:
        envs.reset()
        ended[:] = False

    return Contender(some, reset)


def torchrl_parallel(env_id: str, num_envs: int) -> Contender:
    from torchrl.envs import ParallelEnv, PettingZooWrapper

    from muster.envs import resolve_foreign_id

    def make() -> Any:
        return PettingZooWrapper(resolve_foreign_id(env_id)(), return_state=False)

    envs = ParallelEnv(num_envs, make)
    state: dict[str, Any] = {}

    def some() -> int:
        _, state["next"] = envs.step_and_maybe_reset(envs.rand_action(state["next"]))
        return num_envs

    def reset() -> None:
        state["next"] = envs.reset()

    return Contender(some, reset)


def _host(pipe: Connection, make: Callable[[], Contender]) -> None:
    warnings.simplefilter("ignore")
    os.environ["SDL_VIDEODRIVER"] = "dummy"
    contender = make()
    pipe.send("built")
    while (seconds := pipe.recv()) is not None:
        contender.reset()
        pipe.send("reset")
        pipe.recv()
        pipe.send(contender.run(seconds))


class Host:
    """A contender in a process of its own, or in several."""

    def __init__(self, *makers: Callable[[], Contender]) -> None:
        self._pipes, self._processes = [], []
        for make in makers:
            ours, theirs = _spawn.Pipe()
            process = _spawn.Process(target=_host, args=(theirs, make))
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            pipe.recv()

    def run(self, seconds: float) -> tuple[float, float]:
        self._ask(seconds)
        rates = self._ask("go")  # all are reset before one starts
        return sum(rate for rate, _ in rates), sum(rate for _, rate in rates)

    def _ask(self, what: object) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(what)
        return [pipe.recv() for pipe in self._pipes]

    def close(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.send(None)
            process.join(20)


def measure(name: str, rounds: int, seconds: float, with_torchrl: bool) -> list[list[str]]:
    """The rows of one workload: contender, env steps per second, spread, share of the limit, layout cost."""
    env_id, num_envs, longest_s = _WORKLOADS[name]
    progress = _spawn.RawArray("q", 2)
    muster_of = functools.partial(muster_envs, env_id, num_envs)
    hosts = {
        "two bare loops (limit)": Host(*[functools.partial(bare, env_id, num_envs // 2)] * 2),
        "limit, in step": Host(*[functools.partial(bare, env_id, num_envs // 2, progress, i) for i in range(2)]),
        "one bare loop": Host(functools.partial(bare, env_id, num_envs)),
        "muster serial": Host(functools.partial(muster_of, backend="serial")),
        "muster process": Host(functools.partial(muster_of, num_workers=2)),
        "muster caller_steps": Host(functools.partial(muster_of, num_workers=1, caller_steps=True)),
    }
    if not env_id.startswith("meltingpot/"):
        hosts["muster serial, with state()"] = Host(functools.partial(muster_of, backend="serial", state=True))
    if with_torchrl and name == "simple_spread_v3":
        hosts["torchrl ParallelEnv"] = Host(functools.partial(torchrl_parallel, env_id, num_envs))
    rates: dict[str, list[float]] = {contender: [] for contender in hosts}
    by_cpu: dict[str, list[float]] = {contender: [] for contender in hosts}
    for _ in range(rounds):
        for contender, running in hosts.items():
            rate, of_cpu = running.run(min(seconds, longest_s))
            rates[contender].append(rate)
            by_cpu[contender].append(of_cpu)
    for running in hosts.values():
        running.close()
    limit = rates["two bare loops (limit)"]
    rows = []
    for contender, own in rates.items():
        shares = [mine / most for mine, most in zip(own, limit, strict=True)]
        ratios = [bare / mine for bare, mine in zip(by_cpu["one bare loop"], by_cpu[contender], strict=True)]
        rows.append(
            [
                f"{name}, {num_envs} envs: {contender}",
                f"{statistics.median(own):,.0f}",
                f"{min(own):,.0f} to {max(own):,.0f}",
                f"{statistics.median(shares):.2f}",
                f"{statistics.median(ratios) - 1:.0%}" if contender.startswith("muster serial") else "",
            ]
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each contender's turn")
    parser.add_argument("--only", choices=_WORKLOADS, help="one workload")
    parser.add_argument("--torchrl", action="store_true")
    parser.add_argument("--write", action="store_true", help="into benchmarks/RESULTS.md")
    args = parser.parse_args()
    rows = []
    for name in [args.only] if args.only else _WORKLOADS:
        rows += measure(name, args.rounds, args.seconds, args.torchrl)
    text = table(["contender", "env steps/s", "spread", "of limit", "layout"], rows)
    print(machine(), versions(), "", text, sep="\n")
    if args.write:
        write_section(_QUESTION, f"{heading(_QUESTION)}\n{text}")


if __name__ == "__main__":
    main()
