"""How long until N envs are ready, each in a process of its own, and how near is that to what the machine can do?

Ready means that the first observations of N CartPole-v1 envs have arrived, counted from before the call that makes the
vector env, in a fresh caller. The bound does the least that such a start has to do: a process that has imported
Gymnasium and Muster's worker forks N times, and each fork makes its env and resets it. In "envs imported" it has
imported Gymnasium's classic control, too, as Muster's launcher has; the import of the launcher's own modules (0.2 s) is
part of Muster's time alone.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import gymnasium

from results import heading, machine, table, versions, write_section

_QUESTION = "Start of many processes"
_TIMEOUT_S = 300.0
# Not a function of a file here: each worker would import that file, and the bound would not.
cartpole = functools.partial(gymnasium.make, "CartPole-v1")


def muster_ready_s(count: int, context: str) -> float:
    """Seconds until `count` envs in as many workers have been reset."""
    import muster

    start = time.perf_counter()
    with muster.make_vec(cartpole, count, num_workers=count, context=context) as envs:
        envs.reset()
        return time.perf_counter() - start


def gymnasium_ready_s(count: int) -> float:
    """Seconds until `count` envs of Gymnasium's AsyncVectorEnv have been reset."""
    from gymnasium.vector import AsyncVectorEnv

    start = time.perf_counter()
    envs = AsyncVectorEnv([cartpole] * count)
    envs.reset()
    ready_s = time.perf_counter() - start
    envs.close()
    return ready_s


def forks_ready_s(count: int, *modules: str) -> float:
    """Seconds until `count` forks of this process, with these modules imported, have made and reset an env each."""
    for module in ("muster.pool.worker", *modules):
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    ready, reports = os.pipe()
    pids = []
    start = time.perf_counter()
    for _ in range(count):
        pid = os.fork()
        if pid == 0:
            env = cartpole()
            env.reset(seed=0)
            os.write(reports, b"x")
            signal.pause()
        pids.append(pid)
    left = count
    while left:
        left -= len(os.read(ready, left))
    ready_s = time.perf_counter() - start
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    return ready_s


_CONTENDERS: dict[str, Callable[[int], float]] = {
    "bound": forks_ready_s,
    "bound, envs imported": lambda count: forks_ready_s(count, "gymnasium.envs.classic_control"),
    "muster forkserver": lambda count: muster_ready_s(count, "forkserver"),
    "muster fork": lambda count: muster_ready_s(count, "fork"),
    "gymnasium async": gymnasium_ready_s,
}


def measure(contender: str, count: int) -> float:
    """Measures one contender in a fresh interpreter."""
    command = [sys.executable, __file__, "--here", contender, "--processes", str(count)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=_TIMEOUT_S, check=True)
    return float(json.loads(done.stdout))


def report(counts: list[int], rounds: int) -> str:
    """The table, with one line per contender and number of processes."""
    rows = []
    for count in counts:
        taken: dict[str, list[float]] = {name: [] for name in _CONTENDERS}
        for _ in range(rounds):
            for name, times in taken.items():
                times.append(measure(name, count))
        for name, times in taken.items():
            ratio = statistics.median(one / bound for one, bound in zip(times, taken["bound"], strict=True))
            middle, low, high = statistics.median(times), min(times), max(times)
            rows.append([name, f"{count}", f"{middle:.2f} s ({low:.2f} - {high:.2f})", f"{ratio:.2f}"])
    return table(["contender", "processes", "ready after", "to the bound"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[8, 128])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="write the table to benchmarks/RESULTS.md")
    parser.add_argument("--here", choices=_CONTENDERS, metavar="NAME", help="measure NAME once, in this process")
    arguments = parser.parse_args()
    if arguments.here:
        print(json.dumps(_CONTENDERS[arguments.here](arguments.processes[0])))
        return
    print(f"{machine()}\n{versions()}\n")
    text = report(arguments.processes, arguments.rounds)
    print(text)
    if arguments.write:
        write_section("many_processes", f"{heading(_QUESTION)}\n{text}")


if __name__ == "__main__":
    main()
