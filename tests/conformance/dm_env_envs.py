"""A dm_env env that follows its API and that a careless adapter gets wrong, for `EnvApiContract`."""

from __future__ import annotations

from typing import Any

import dm_env
import numpy as np
from dm_env import specs


class Task:
    """A task that holds the random generator, as dm_control's tasks do."""

    def __init__(self) -> None:
        self.random = np.random.RandomState(0)


class Physics:
    """Renders the walk's position."""

    def __init__(self) -> None:
        self.t = 0

    def render(self) -> Any:
        return np.full((2, 2, 3), self.t, np.uint8)


class Walk(dm_env.Environment):
    """A walk that ends after four steps, with one of three discounts in turn. Its nested observations reuse one array.

    The first rewards are None.
    """

    def __init__(self) -> None:
        self.task, self.physics = Task(), Physics()
        self.level, self.episode = 1, 0
        self._drawn = np.zeros(2, np.float32)

    def observation_spec(self) -> Any:
        return {
            "z": specs.Array((), np.float64),
            "a": [specs.DiscreteArray(9), specs.BoundedArray((2,), np.float32, 0, [99, 50])],
        }

    def action_spec(self) -> Any:
        return specs.BoundedArray((2,), np.float64, minimum=-1.0, maximum=1.0)

    def reset(self) -> Any:
        self.physics.t = 0
        self.episode += 1
        return dm_env.restart(self._obs(0.0))

    def step(self, action: Any) -> Any:
        self.physics.t += 1
        last = self.physics.t == 4
        discount = (0.0, 1.0, 0.5)[self.episode % 3] if last else 1.0
        kind = dm_env.StepType.LAST if last else dm_env.StepType.MID
        reward = None if self.physics.t == 1 else float(action.sum())
        return dm_env.TimeStep(kind, reward, discount, self._obs(float(action[0])))

    def _obs(self, z: float) -> Any:
        self._drawn[:] = self.physics.t, self.task.random.randint(50)
        return {"z": z, "a": [self.physics.t, self._drawn]}
