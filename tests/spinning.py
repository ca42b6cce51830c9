"""A program with envs that keep a core for a known time: ``python spinning.py KIND``. It says "ready", and steps."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np

import muster


def spin(ms: float) -> None:
    until = time.thread_time() + ms / 1e3
    while time.thread_time() < until:
        pass


class Spinning(gym.Env[Any, Any]):
    """Computes for `ms` in a step and for `reset_ms` in a reset; env `slow` alone steps `times` as long."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self, ms: float = 1.0, reset_ms: float = 0.0, length: int = 10**9, side: int = 2) -> None:
        self.observation_space = gym.spaces.Box(0, 255, (side, side, 3), np.uint8)
        self._seen = np.zeros(self.observation_space.shape, np.uint8)
        self._ms, self._reset_ms, self._length, self._steps = ms, reset_ms, length, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        spin(self._reset_ms)
        self._steps = 0
        return self._seen, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        spin(self._ms)
        self._steps += 1
        return self._seen, 0.0, self._steps >= self._length, False, {}


class Hanging(Spinning):
    """Its tenth step lasts for ever."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._steps == 9:
            time.sleep(3600)
        return super().step(action)


OPTIONS: dict[str, dict[str, Any]] = {
    "envs": {"env_kwargs": {"ms": 5.0}},
    "straggler": {"num_workers": 4, "env_kwargs": [{"ms": 0.3}, {"ms": 0.3}, {"ms": 0.3}, {"ms": 6.0}]},
    "caller": {"env_kwargs": {"ms": 0.05}},
    "machine": {"env_kwargs": {"ms": 2.0}},
    "copying": {"env_kwargs": {"ms": 0.0, "side": 1000}},
    "resets": {"env_kwargs": {"ms": 0.2, "reset_ms": 50.0, "length": 50}},
    "hang": {},
    "between": {"env_kwargs": {"ms": 1.0}},
}
# Milliseconds of the caller between two steps: of the last kind as many as the two envs of a worker take.
BETWEEN_MS = {"caller": 5.0, "between": 2.0}


def main(kind: str) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    make: Callable[..., Any] = Hanging if kind == "hang" else Spinning
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (kind == "machine"))]
    try:
        with muster.make_vec(make, 4, **{"num_workers": 2, **OPTIONS[kind]}) as envs:
            envs.reset(seed=0)
            print("ready", flush=True)
            while True:
                envs.step(np.zeros(4, np.int64))
                time.sleep(BETWEEN_MS.get(kind, 0.0) / 1e3)
    finally:
        for one in busy:
            one.kill()


if __name__ == "__main__":
    main(sys.argv[1])
