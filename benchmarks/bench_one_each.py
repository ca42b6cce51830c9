"""What does a step cost with one env per process, on few cores, beside the least that any such design pays?

The ring does the least: on each core a token goes round the processes; each hop wakes one, which steps its
CartPole-v1 once. No batch is gathered, and nobody waits for all. Muster's and Gymnasium's vector envs step as many
CartPole-v1 in as many processes. All are started first, and then take turns; a ratio is the median over the rounds of
the ratio within the round.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium
import numpy as np

from envs import cartpole
from results import heading, table, write_section

_QUESTION = "One env per process"
_MUSTER, _RING, _GYMNASIUM = "Muster", "ring", "Gymnasium's AsyncVectorEnv"
_FEWEST_STEPS = 20
# Runs about so many env steps, and returns microseconds per env step.
Run = Callable[[int], float]


@contextlib.contextmanager
def ring(count: int) -> Iterator[Run]:
    """`count` processes, evenly on the usable cores, each with one env, that wake each other in turn."""
    cores = sorted(os.sched_getaffinity(0))
    rings, pids = [], []
    for core, share in zip(cores, np.array_split(range(count), len(cores)), strict=True):
        bells = [os.eventfd(0) for _ in range(len(share) + 1)]
        rings.append(bells)
        for i in range(len(share)):
            pids.append(os.fork())
            if not pids[-1]:
                _step_when_woken(core, bells[i], bells[i + 1])

    def run(env_steps: int) -> float:
        laps = max(_FEWEST_STEPS, env_steps // count)
        start = time.perf_counter()
        for _ in range(laps):
            for bells in rings:
                os.eventfd_write(bells[0], 1)
            for bells in rings:
                os.eventfd_read(bells[-1])
        return (time.perf_counter() - start) / laps / count * 1e6

    try:
        yield run
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for bell in (bell for bells in rings for bell in bells):
            os.close(bell)


def _step_when_woken(core: int, bell: int, next_bell: int) -> None:
    try:
        os.sched_setaffinity(0, {core})
        env = cartpole()
        env.reset(seed=0)
        gc.freeze()
        while True:
            os.eventfd_read(bell)
            _, _, terminated, truncated, _ = env.step(0)
            if terminated or truncated:
                env.reset()
            os.eventfd_write(next_bell, 1)
    finally:
        os._exit(0)


@contextlib.contextmanager
def vector_env(make: Callable[[], Any]) -> Iterator[Run]:
    """A vector env that is stepped by random actions."""
    envs = make()
    envs.action_space.seed(0)
    actions = [envs.action_space.sample() for _ in range(16)]
    envs.reset(seed=0)

    def run(env_steps: int) -> float:
        steps = max(_FEWEST_STEPS, env_steps // envs.num_envs)
        start = time.perf_counter()
        for step in range(steps):
            envs.step(actions[step % len(actions)])
        return (time.perf_counter() - start) / steps / envs.num_envs * 1e6

    try:
        yield run
    finally:
        envs.close()


def _muster(count: int) -> Any:
    import muster

    return muster.make_vec(cartpole, count, num_workers=count)


def _gymnasium(count: int) -> Any:
    return gymnasium.vector.AsyncVectorEnv([cartpole] * count)


def measure(count: int, rounds: int, env_steps: int, peers: bool) -> dict[str, list[float]]:
    """Microseconds per env step of each contender, one figure a round."""
    with contextlib.ExitStack() as opened:
        # The ring first: its processes are forked from this one, which has no workers yet.
        runs = {_RING: opened.enter_context(ring(count))}
        runs[_MUSTER] = opened.enter_context(vector_env(functools.partial(_muster, count)))
        if peers:
            runs[_GYMNASIUM] = opened.enter_context(vector_env(functools.partial(_gymnasium, count)))
        costs: dict[str, list[float]] = {name: [] for name in runs}
        for run in runs.values():
            run(env_steps // 4)
        for turn in range(rounds):
            names = list(runs)[turn % len(runs) :] + list(runs)[: turn % len(runs)]
            for name in names:
                costs[name].append(runs[name](env_steps))
    return costs


def rows_of(count: int, costs: dict[str, list[float]]) -> list[list[str]]:
    """A row of the table for each contender."""
    rows = []
    for name, own in costs.items():
        ratios = sorted(mine / theirs for mine, theirs in zip(own, costs[_RING], strict=True))
        low, _, high = statistics.quantiles(ratios, n=4)
        ratio = "" if name == _RING else f"{statistics.median(ratios):.2f} ({low:.2f} - {high:.2f})"
        cost = f"{statistics.median(own):.1f} ({min(own):.1f} - {max(own):.1f})"
        rows.append([str(count), name, cost, ratio])
    return rows


def main() -> None:
    """Measures and prints; with ``--write`` also into RESULTS.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[16, 32, 64, 96, 128])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--env-steps", type=int, default=6400, help="of each contender in each round")
    parser.add_argument("--peers-up-to", type=int, default=32, help="leave Gymnasium out with more processes")
    parser.add_argument("--write", action="store_true", help="write the table to benchmarks/RESULTS.md")
    arguments = parser.parse_args()
    rows = []
    for count in arguments.processes:
        costs = measure(count, arguments.rounds, arguments.env_steps, count <= arguments.peers_up_to)
        rows += rows_of(count, costs)
        print(
            f"{count} processes: " + ", ".join(f"{row[1]} {row[2]} {row[3]}" for row in rows[-len(costs) :]), flush=True
        )
    columns = ["processes", "contender", "us per env step", "ratio to the ring (quartiles)"]
    text = f"{heading(_QUESTION)}\n{table(columns, rows)}\n"
    print(text)
    if arguments.write:
        write_section("one each", text)


if __name__ == "__main__":
    main()
