"""An env and a policy that draw from generators that are not their own."""

from __future__ import annotations

import os
import random

import gymnasium as gym
import numpy as np
import torch
from torch import nn


class Chance(gym.Env):
    """Observes what it draws from generators that are not its own."""

    observation_space, action_space = gym.spaces.Box(-9, 9, (4,)), gym.spaces.Discrete(2)

    def __init__(self, born: float = 0.0, dies_at: int = -1):
        self.born, self.dies_at, self.steps = born, dies_at, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._obs(), {}

    def step(self, action):
        self.steps += 1
        if self.steps == self.dies_at:
            os._exit(3)
        return self._obs(), float(action), random.random() < 0.1, False, {}

    def _obs(self):
        drawn = random.random(), np.random.normal(), torch.rand(()).item(), self.born  # noqa: NPY002
        return np.array(drawn, np.float32).clip(-9, 9)


class Built(Chance):
    """Draws when it is built, too."""

    def __init__(self):
        super().__init__(np.random.uniform())  # noqa: NPY002


class Policy(nn.Module):
    """Has weights that are drawn, and draws from NumPy's generator."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 2)

    def forward(self, obs):
        chance = torch.from_numpy(np.random.uniform(size=len(obs)) < 0.3)  # noqa: NPY002
        return torch.where(chance, torch.randint(0, 2, (len(obs),)), self.net(obs).argmax(-1))


def ones(obs):
    return torch.ones(len(obs), dtype=torch.int64)
