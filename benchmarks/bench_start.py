"""How long until a vector environment is ready, and how much memory does each of its workers hold?

Ready means that the first observations of 8 CartPole-v1 envs on 2 workers have arrived, counted from before the call
that makes the vector env, in a fresh caller that has torch imported. Memory is what a worker shares with no process
(private clean and dirty pages, /proc/<pid>/smaps_rollup) after 100 steps. The peers start one worker per env, with
their own default start method. Import time is that of `import muster` in a fresh interpreter.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

from envs import cartpole
from results import heading, machine, table, versions, write_section

_NUM_ENVS = 8
_NUM_WORKERS = 2
_STEPS = 100
_TIMEOUT_S = 120.0
_QUESTION = "Start and memory"
_IMPORT_GOAL_S = 0.5
_MEMORY_GOAL_MB = 60.0
_READY_GOALS_S = {"muster fork": 0.2, "muster forkserver": 1.5, "muster spawn": 1.5}
_TIME_IMPORT = "import time; start = time.perf_counter(); import muster; print(time.perf_counter() - start)"


def cartpole_with_pid() -> gymnasium.Env[Any, Any]:
    """A CartPole-v1 that knows which process built it."""
    env = cartpole()
    env.unwrapped.worker_pid = os.getpid()  # type: ignore[attr-defined]
    return env


def _muster(context: str) -> Any:
    import muster

    factories = [cartpole_with_pid] * _NUM_ENVS
    return muster.make_vec(factories, backend="process", num_workers=_NUM_WORKERS, context=context)


def _gymnasium_async() -> Any:
    return gymnasium.vector.AsyncVectorEnv([cartpole_with_pid] * _NUM_ENVS)


def _sb3_subproc() -> Any:
    from stable_baselines3.common.vec_env import SubprocVecEnv

    return SubprocVecEnv([cartpole_with_pid] * _NUM_ENVS)


# For each contender, the module that its caller has imported already, and the call that is timed.
_CONTENDERS: dict[str, tuple[str, Callable[[], Any]]] = {
    "muster fork": ("muster", functools.partial(_muster, "fork")),
    "muster forkserver": ("muster", functools.partial(_muster, "forkserver")),
    "muster spawn": ("muster", functools.partial(_muster, "spawn")),
    "gymnasium async": ("gymnasium", _gymnasium_async),
    "sb3 subproc": ("stable_baselines3.common.vec_env", _sb3_subproc),
}


def private_mb(pid: int) -> float:
    """The memory, in MB, that process ``pid`` shares with no other."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Clean", "Private_Dirty"))) / 1e3


def measure_here(contender: str) -> dict[str, float]:
    """Starts ``contender`` in this process, which is fresh: seconds until ready, and MB of its largest worker."""
    module, make = _CONTENDERS[contender]
    importlib.import_module("torch")
    importlib.import_module(module)
    start = time.perf_counter()
    envs = make()
    envs.reset()
    ready_s = time.perf_counter() - start
    actions = np.zeros(_NUM_ENVS, np.int64)
    for _ in range(_STEPS):
        envs.step(actions)
    workers = set(envs.get_attr("worker_pid"))
    largest_mb = max(private_mb(pid) for pid in workers)
    envs.close()
    return {"ready_s": ready_s, "worker_mb": largest_mb, "workers": len(workers)}


def measure(contender: str) -> dict[str, float] | None:
    """Runs `measure_here` in a fresh interpreter. Returns None where that fails; its traceback is printed."""
    command = [sys.executable, __file__, "--here", contender]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=_TIMEOUT_S, check=False)
    return json.loads(done.stdout) if done.returncode == 0 else None


def import_s() -> float:
    """Seconds that `import muster` takes in a fresh interpreter."""
    done = subprocess.run([sys.executable, "-c", _TIME_IMPORT], stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout)


def _median_and_spread(values: list[float], unit: str, digits: int) -> str:
    middle, low, high = (f"{value:.{digits}f}" for value in (statistics.median(values), min(values), max(values)))
    return f"{middle} {unit} ({low} - {high})"


def report(rounds: int) -> str:
    """The table, with one line per contender, and the import time."""
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in _CONTENDERS}
    imports = []
    for _ in range(rounds):
        imports.append(import_s())
        for name, results in measured.items():
            if (result := measure(name)) is not None:
                results.append(result)
    rows = []
    for name, results in measured.items():
        if not results:
            rows.append([name, "failed", "", "", ""])
            continue
        ready = _median_and_spread([result["ready_s"] for result in results], "s", 2)
        memory = _median_and_spread([result["worker_mb"] for result in results], "MB", 0)
        goal = f"{_READY_GOALS_S[name]} s, {_MEMORY_GOAL_MB:.0f} MB" if name in _READY_GOALS_S else ""
        rows.append([name, ready, memory, f"{results[0]['workers']}", goal])
    lines = table(["contender", "ready after", "largest worker's own memory", "workers", "goal"], rows)
    return f"{lines}\n\n- `import muster`: {_median_and_spread(imports, 's', 2)}, goal {_IMPORT_GOAL_S} s\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="write the table to benchmarks/RESULTS.md")
    parser.add_argument("--here", choices=_CONTENDERS, metavar="NAME", help="measure NAME once, in this process")
    arguments = parser.parse_args()
    if arguments.here:
        print(json.dumps(measure_here(arguments.here)))
        return
    if arguments.rounds < 1:
        parser.error("--rounds must be at least 1")
    print(f"{machine()}\n{versions()}\n")
    text = report(arguments.rounds)
    print(text)
    if arguments.write:
        write_section("start", f"{heading(_QUESTION)}\n{text}")


if __name__ == "__main__":
    main()
