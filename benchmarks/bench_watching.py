"""What `on_failure="restart"` costs on the hot path: CPU time of 8 CartPole-v1 with and without, in pairs.

The serial backend steps all envs in this thread, so its CPU time holds the caller's part and the envs' own, by the same
code as in workers. `step_timeout` and the watching of workers execute nothing while a wait takes less than 20 ms.

    python benchmarks/bench_watching.py
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import muster

NUM_ENVS, STEPS, PAIRS, RESAMPLES = 8, 100, 250, 1000


def cpu_seconds(envs: Any, actions: Any) -> float:
    start = time.thread_time()
    for _ in range(STEPS):
        envs.step(actions)
    return time.thread_time() - start


def main() -> None:
    both = [
        muster.make_vec("CartPole-v1", NUM_ENVS, backend="serial", on_failure=on_failure)
        for on_failure in ("raise", "restart")
    ]
    actions = np.arange(NUM_ENVS) % 2
    for envs in both:
        envs.reset(seed=0)
        cpu_seconds(envs, actions)
    seconds = np.empty((PAIRS, 2))
    for pair in range(PAIRS):
        for which in (0, 1) if pair % 2 else (1, 0):
            seconds[pair, which] = cpu_seconds(both[which], actions)
    logs = np.log(seconds[:, 1] / seconds[:, 0])
    rng = np.random.default_rng(0)
    medians = [np.median(rng.choice(logs, PAIRS)) for _ in range(RESAMPLES)]
    low, high = np.exp(np.percentile(medians, [2.5, 97.5])) - 1
    print(f"{np.median(seconds[:, 0]) / STEPS * 1e6:.1f} us of CPU time for a step of {NUM_ENVS} envs")
    print(f"restart costs {np.exp(np.median(logs)) - 1:+.2%} (95 % interval {low:+.2%} to {high:+.2%}, {PAIRS} pairs)")


if __name__ == "__main__":
    main()
