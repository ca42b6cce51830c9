"""The environments that the benchmarks step, and the factories that build them.

The synthetic ones burn CPU time of their own thread: a spin on the wall clock would go on "working" while it is
descheduled, and would flatter contenders that start more processes than there are cores.
"""

from __future__ import annotations

import functools
import statistics
import time
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

_EPISODE_STEPS = 500
_CALIBRATION_BURNS = 300


def cartpole() -> gymnasium.Env[Any, Any]:
    return gymnasium.make("CartPole-v1")


def half_cheetah() -> gymnasium.Env[Any, Any]:
    return gymnasium.make("HalfCheetah-v5")


def pong() -> gymnasium.Env[Any, Any]:
    import ale_py

    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    gymnasium.register_envs(ale_py)
    return gymnasium.make("ALE/Pong-v5")


def _burn_until(end_ns: int) -> None:
    while time.thread_time_ns() < end_ns:
        pass


@functools.cache
def _overshoot_ns() -> int:
    """Nanoseconds that a burn lasts too long: the clock is a system call and is read once too often."""
    asked_ns = 10_000
    costs = []
    for _ in range(_CALIBRATION_BURNS):
        start_ns = time.thread_time_ns()
        _burn_until(time.thread_time_ns() + asked_ns)
        costs.append(time.thread_time_ns() - start_ns - asked_ns)
    return int(statistics.median(costs))


class BusyEnv(gymnasium.Env[np.ndarray, np.int64]):
    """Burns ``burn_us`` microseconds of thread CPU time per step and observes float32 [64]; 500 steps per episode."""

    def __init__(self, burn_us: float) -> None:
        self.observation_space = spaces.Box(-1.0, 1.0, (64,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._burn_ns = max(0, int(burn_us * 1_000) - _overshoot_ns())
        self._obs = np.zeros(64, np.float32)
        self._step_count = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._step_count = 0
        return self._obs, {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict]:
        _burn_until(time.thread_time_ns() + self._burn_ns)
        self._step_count += 1
        return self._obs, 1.0, False, self._step_count >= _EPISODE_STEPS, {}


class FrameEnv(gymnasium.Env[np.ndarray, np.int64]):
    """Observes uint8 frames of ``shape``, made in advance: a step costs nothing, so only the transport is timed."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.observation_space = spaces.Box(0, 255, shape, np.uint8)
        self.action_space = spaces.Discrete(2)
        self._frames = [np.full(shape, value, np.uint8) for value in (0, 85, 170, 255)]
        self._step_count = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self._step_count = 0
        return self._frames[0], {}

    def step(self, action: np.int64) -> tuple[np.ndarray, float, bool, bool, dict]:
        self._step_count += 1
        frame = self._frames[self._step_count % len(self._frames)]
        return frame, 1.0, False, self._step_count >= _EPISODE_STEPS, {}
