"""Envs whose observations say which episode and step they come from, so that every row of a batch can be checked."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
from gymnasium import spaces


class CountingEnv(gym.Env):
    """Observes [episode, step], both from 0; rewards the step's number (from 1).

    Episodes last `length` steps, and end truncated where `truncates`, else terminated.
    """

    def __init__(self, length: int = 3, truncates: bool = False) -> None:
        self.observation_space = spaces.Box(-1.0, 1e6, (2,), np.float32)
        self.action_space = spaces.Discrete(100)
        self.length, self.truncates = length, truncates
        self.episode, self.count = -1, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.count = self.episode + 1, 0
        return self._obs(), {}

    def step(self, action):
        self.count += 1
        over = self.count >= self.length
        return self._obs(), float(self.count), over and not self.truncates, over and self.truncates, {}

    def _obs(self):
        return np.array([self.episode, self.count], np.float32)


class FailsWhenTold(CountingEnv):
    """Raises in its steps while `told`."""

    told = False

    def step(self, action):
        if self.told:
            raise RuntimeError("the motor is stuck")
        return super().step(action)


class NoisyEnv(CountingEnv):
    """Random first observations and rewards from the env's own generator; episodes of 3 to 7 steps."""

    def reset(self, *, seed=None, options=None):
        obs, info = super().reset(seed=seed)
        self.length = int(self.np_random.integers(3, 8))
        return obs + self.np_random.random(2, np.float32), info

    def step(self, action):
        obs, reward, terminated, truncated, info = super().step(action)
        return obs, reward + float(self.np_random.random()) + float(action), terminated, truncated, info


class DictEnv(gym.Env):
    """Dict observations with a nested Dict, Dict actions; the reward repeats the actions."""

    def __init__(self) -> None:
        inner = spaces.Dict({"left": spaces.Box(0, 255, (2, 2), np.uint8), "right": spaces.Discrete(5)})
        self.observation_space = spaces.Dict({"eyes": inner, "speed": spaces.Box(-1.0, 1.0, (), np.float64)})
        self.action_space = spaces.Dict(
            {
                "gear": spaces.Discrete(4),
                "steer": spaces.Box(-1.0, 1.0, (2,), np.float32),
                "lights": spaces.MultiBinary(3),
            }
        )

    def _obs(self):
        return {"eyes": {"left": np.full((2, 2), 7, np.uint8), "right": np.int64(3)}, "speed": np.array(0.5)}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._obs(), {}

    def step(self, action):
        return self._obs(), float(action["gear"]) + float(action["steer"].sum()), False, False, {}


class FailingEnv(CountingEnv):
    """Raises in the fifth step of the first episode, and never again."""

    failed = False

    def step(self, action):
        if self.count == 4 and not self.failed:
            self.failed = True
            raise RuntimeError("the motor is stuck")
        return super().step(action)
