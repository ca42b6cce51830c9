"""What `on_failure="restart"` and `step_timeout` cost on the hot path: 8 CartPole-v1 with them and without.

    python benchmarks/bench_watching.py            # 20 paired runs on the process backend, and CPU time in one process
    python benchmarks/bench_watching.py --count    # instructions per step, by valgrind's callgrind

Paired runs alternate within a fraction of a second; the interval is a bootstrap over pairs. Instructions are counted on
the serial backend, whose process runs both the caller's code and the envs' (valgrind knows no pidfd, which workers
need), as the difference of a long and a short run, which leaves out imports and start. `step_timeout` and the watching
of workers execute nothing while a wait takes less than 20 ms, and neither option reaches the workers.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import muster

NUM_ENVS, PAIRS, RESAMPLES = 8, 20, 2000
SHORT, LONG = 200, 4200
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "process": [{}, {"on_failure": "restart", "step_timeout": 60.0}],
    "serial": [{}, {"on_failure": "restart"}],
}


def make(backend: str, watched: int) -> Any:
    envs = muster.make_vec("CartPole-v1", NUM_ENVS, backend=backend, **OPTIONS[backend][watched])
    envs.reset(seed=0)
    return envs


def step(envs: Any, steps: int) -> None:
    actions = np.arange(NUM_ENVS) % 2
    for _ in range(steps):
        envs.step(actions)


def compare(backend: str, steps: int, repeats: int, clock: Callable[[], float]) -> None:
    """Prints the cost, and its 95 % interval. A run is the median of `repeats` alternating runs of so many steps."""
    both = [make(backend, watched) for watched in (0, 1)]
    seconds = np.empty((PAIRS, repeats, 2))
    for run in np.ndindex(PAIRS, repeats):
        for watched in (0, 1) if sum(run) % 2 else (1, 0):
            start = clock()
            step(both[watched], steps)
            seconds[run][watched] = clock() - start
    logs = np.median(np.log(seconds[..., 1] / seconds[..., 0]), axis=1)
    rng = np.random.default_rng(0)
    means = [rng.choice(logs, PAIRS).mean() for _ in range(RESAMPLES)]
    low, high = np.exp(np.percentile(means, [2.5, 97.5])) - 1
    print(f"{backend}: {np.median(seconds[..., 0]) / steps * 1e6:.1f} us for a step of {NUM_ENVS} envs")
    print(f"    cost {np.exp(logs.mean()) - 1:+.2%} (95 % interval {low:+.2%} to {high:+.2%}, {PAIRS} pairs)")
    for envs in both:
        envs.close()


def count() -> None:
    """Prints the instructions per step with restarts and without, as callgrind counts them."""
    plain, watched = ((_instructions(one, LONG) - _instructions(one, SHORT)) / (LONG - SHORT) for one in (0, 1))
    print(f"serial: {plain:,.0f} instructions for a step of {NUM_ENVS} envs, {watched:,.0f} with restart")
    print(f"    cost {watched / plain - 1:+.2%}")


def _instructions(watched: int, steps: int) -> int:
    valgrind = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null"]
    own = [sys.executable, __file__, "--run", str(watched), str(steps)]
    # Without hash randomisation: with it, starts differ by some per cent of the instructions that are counted.
    fixed = {**os.environ, "PYTHONHASHSEED": "0"}
    done = subprocess.run([*valgrind, *own], capture_output=True, text=True, check=True, env=fixed)
    found = re.search(r"Collected : (\d+)", done.stderr)
    assert found, done.stderr
    return int(found[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", action="store_true", help="count instructions instead; needs valgrind")
    parser.add_argument("--run", nargs=2, type=int, metavar=("WATCHED", "STEPS"), help="what is counted")
    options = parser.parse_args()
    if options.run:
        watched, steps = options.run
        step(make("serial", watched), steps)
    elif options.count:
        count()
    else:
        compare("process", 100, 25, time.perf_counter)
        compare("serial", 100, 25, time.thread_time)


if __name__ == "__main__":
    main()
