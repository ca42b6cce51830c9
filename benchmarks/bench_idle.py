"""What does an idle vector environment cost, and how long does it take to wake?

8 CartPole-v1 envs are stepped for a while, then left alone. The idle cost is the CPU time that the caller and all its
descendants spend during that pause, on all their threads, as a share of one core. The wake cost is the first step after
the pause less the median step before it. The serial backend wakes no worker: its cost is that of a core that has slept.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import psutil

from contenders import usable_cores
from envs import cartpole
from results import heading, machine, table, versions, write_section

_NUM_ENVS = 8
_BUSY_STEPS = 2_000
_SHARE_GOAL = 0.01
_WAKE_GOAL_MS = 1.0
_QUESTION = "Idle and wake"


def _muster_process(**options: Any) -> Any:
    import muster

    return muster.make_vec([cartpole] * _NUM_ENVS, **options)


def _muster_packed() -> Any:
    return _muster_process(num_workers=usable_cores())


def _muster_caller_steps() -> Any:
    return _muster_process(num_workers=max(1, usable_cores() - 1), caller_steps=True)


def _muster_serial() -> Any:
    import muster

    return muster.make_vec([cartpole] * _NUM_ENVS, backend="serial")


def _gymnasium_async() -> Any:
    return gymnasium.vector.AsyncVectorEnv([cartpole] * _NUM_ENVS)


_CONTENDERS: dict[str, Callable[[], Any]] = {
    "muster process": _muster_packed,
    "muster, one each": _muster_process,
    "muster caller_steps": _muster_caller_steps,
    "muster serial": _muster_serial,
    "gymnasium async": _gymnasium_async,
}


def family_cpu_ns() -> int:
    """CPU time of this process and all its descendants, on all their threads, in nanoseconds."""
    me = psutil.Process()
    total = 0
    for process in [me, *me.children(recursive=True)]:
        for thread in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
            with suppress(FileNotFoundError, ProcessLookupError):  # a thread may end between the two calls
                total += int(thread.read_text(encoding="ascii").split()[0])
    return total


def measure(make: Callable[[], Any], rounds: int, idle_s: float) -> tuple[list[float], list[float]]:
    """For each round the share of a core that was used while idle, and the milliseconds that the wake cost."""
    envs = make()
    envs.reset(seed=0)
    actions = np.zeros(_NUM_ENVS, np.int64)

    def step_ms() -> float:
        start = time.perf_counter()
        envs.step(actions)
        return (time.perf_counter() - start) * 1e3

    shares, wakes_ms = [], []
    for _ in range(rounds):
        usual_ms = statistics.median(step_ms() for _ in range(_BUSY_STEPS))
        start, cpu_ns = time.perf_counter(), family_cpu_ns()
        time.sleep(idle_s)
        shares.append((family_cpu_ns() - cpu_ns) / 1e9 / (time.perf_counter() - start))
        wakes_ms.append(step_ms() - usual_ms)
    envs.close()
    return shares, wakes_ms


def report(rounds: int, idle_s: float) -> str:
    """The table, with one line per contender."""
    rows = []
    for name, make in _CONTENDERS.items():
        shares, wakes_ms = measure(make, rounds, idle_s)
        cost = f"{statistics.median(shares):.2%} ({min(shares):.2%} - {max(shares):.2%})"
        wake = f"{statistics.median(wakes_ms):.2f} ms ({min(wakes_ms):.2f} - {max(wakes_ms):.2f})"
        goal = f"{_SHARE_GOAL:.0%}, {_WAKE_GOAL_MS:.0f} ms" if name.startswith("muster") else ""
        rows.append([name, cost, wake, goal])
    return table(["contender", "of a core while idle", f"wake after {idle_s:g} s", "goal"], rows) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--idle-seconds", type=float, default=10.0)
    parser.add_argument("--write", action="store_true", help="write the table to benchmarks/RESULTS.md")
    arguments = parser.parse_args()
    if arguments.rounds < 1 or arguments.idle_seconds <= 0:
        parser.error("--rounds must be at least 1 and --idle-seconds above 0")
    print(f"{machine()}\n{versions()}\n")
    text = report(arguments.rounds, arguments.idle_seconds)
    print(text)
    if arguments.write:
        write_section("idle", f"{heading(_QUESTION)}\n{text}")


if __name__ == "__main__":
    main()
