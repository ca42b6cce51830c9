"""Small envs whose rows can all be predicted, for tests of vector envs."""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import os
import random
import sys
import threading
import time
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

LETTERS = "abcdefghijklmnopqrstuvwxyz"

# Before Gymnasium 1.3 Discrete has no dtype.
INT32 = {"dtype": np.int32} if "dtype" in inspect.signature(spaces.Discrete).parameters else {}


class Counter(gym.Env[Any, Any]):
    """Observes ``[seed, episode, step]``; ends after `length` steps; reuses its observation buffer on purpose."""

    metadata = {"render_modes": ["ansi"], "speed": 7}  # noqa: RUF012  # Gymnasium's own form
    action_space = spaces.Discrete(3)

    def __init__(self, length: int = 4, step_s: float = 0.0, render_mode: str | None = None) -> None:
        self.observation_space = spaces.Box(-1e9, 1e9, (3,), np.float64)
        self.length = length
        self.step_s = step_s
        self.render_mode = render_mode
        self.seed = -1
        self.episode = 0
        self.actions: list[Any] = []
        self._buffer = np.zeros(3)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.seed = seed
        self.episode += 1
        self.count = 0
        return self._obs(), {"options": options} if options else {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self.step_s:
            time.sleep(self.step_s)
        self.actions.append(action)
        self.count += 1
        return self._obs(), float(self.count), self.count >= self.length, False, {}

    def render(self) -> str:
        return f"{self.seed}/{self.count}"

    def _obs(self) -> Any:
        self._buffer[:] = (self.seed, self.episode, self.count)
        return self._buffer


class Everything(gym.Env[Any, Any]):
    """Samples from a space that nests every kind of space, in observations and in actions.

    The texts name their letters: older Gymnasiums sample the default ones in an order that differs between processes.
    """

    def __init__(self, length: int = 7) -> None:
        self.observation_space = spaces.Dict(
            {
                "float16": spaces.Box(-1, 1, (2, 3), np.float16),
                "bool": spaces.Box(0, 1, (4,), np.bool_),
                "bytes": spaces.Box(0, 255, (5,), np.uint8),
                "scalar": spaces.Box(-1, 1, (), np.float32),
                "discrete": spaces.Discrete(5, start=-2),
                "small": spaces.Discrete(5, **INT32),
                "multi": spaces.MultiDiscrete([3, 4]),
                "binary": spaces.MultiBinary((2, 2)),
                "text": spaces.Text(6, charset=LETTERS),
                "either": spaces.OneOf([spaces.Discrete(3), spaces.Box(0, 1, (2,))]),
                "graph": spaces.Graph(spaces.Box(0, 1, (2,)), spaces.Discrete(3)),
                "sequence": spaces.Sequence(spaces.Discrete(4)),
                "nested": spaces.Tuple((spaces.Dict({"x": spaces.Box(-1, 1, (1,))}), spaces.Discrete(2))),
            }
        )
        self.action_space = spaces.Dict(
            {
                "move": spaces.Discrete(4),
                "push": spaces.Box(-1, 1, (2,), np.float32),
                "say": spaces.Text(3, charset=LETTERS),
                "pick": spaces.Tuple((spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(2))),
            }
        )
        self.length = length
        self.count = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.count = 0
        return self.observation_space.sample(), {"word": "start"}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        self.count += 1
        info = {"said": action["say"], "count": self.count, "nested": {"twice": 2.0 * self.count}}
        return self.observation_space.sample(), float(action["move"]), False, self.count >= self.length, info


class Infos(gym.Env[Any, Any]):
    """Returns the infos of a script, one per step: ``script[step % len]``."""

    observation_space = spaces.Discrete(100)
    action_space = spaces.Discrete(2)

    def __init__(self, script: list[dict[str, Any]], length: int = 100) -> None:
        self.script = script
        self.length = length
        self.count = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.count = 0
        return np.int64(0), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        info = self.script[self.count % len(self.script)]
        self.count += 1
        return np.int64(self.count), 0.0, self.count >= self.length, False, info


class Returning(gym.Env[Any, Any]):
    """Returns a chosen result, right or wrong, from step number `at`."""

    observation_space = spaces.Box(-1, 1, (3,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, obs: Any = None, reward: Any = 0.0, terminated: Any = False, at: int = 2) -> None:
        self.good = np.zeros(3, np.float32)
        self.wrong = (self.good if obs is None else obs, reward, terminated, False, {})
        self.at = at

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.count = 0
        return self.good, {}

    def step(self, action: Any) -> Any:
        self.count += 1
        return self.wrong if self.count == self.at else (self.good, 0.0, False, False, {})


class Reporting(Counter):
    """Reports the state of its process."""

    def report(self) -> dict[str, Any]:
        return {
            "modules": sorted({name.partition(".")[0] for name in sys.modules}),
            "threads": threading.active_count(),
            "faulthandler": faulthandler.is_enabled(),
            "random": random.random(),
            "numpy": float(np.random.random()),  # noqa: NPY002  # the generator that envs share by mistake
            "omp": os.environ.get("OMP_NUM_THREADS"),
            "leads_group": os.getpgid(0) == os.getpid(),
            "session": os.getsid(0),
            "argv": sys.argv,
            "cwd": os.getcwd(),
            "stdin": os.readlink("/proc/self/fd/0"),
        }


class Awaited(gym.Wrapper[Any, Any, Any, Any]):
    """An env with coroutine functions, which waits now and then."""

    async def reset(self, **arguments: Any) -> Any:
        row = self.env.reset(**arguments)
        await asyncio.sleep(0)
        return row

    async def step(self, action: Any) -> Any:
        row = self.env.step(action)
        await asyncio.sleep(0)
        return row
