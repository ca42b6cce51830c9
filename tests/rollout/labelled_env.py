"""Envs whose every row can be recognised, collectors of them, and the same rows as a loop by hand gets them."""

from __future__ import annotations

import functools
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import Tensor

from muster import Collector, MultiCollector

N, T = 3, 20
KINDS = ["Collector", "MultiCollector"]


class Labelled(gym.Env):
    """Observes [number of the env, episode, step]; rewards, lengths (4 to 8) and ends of episodes follow from these.

    Episodes end terminated, truncated, or both at once. Actions do nothing.
    """

    def __init__(self, number: int) -> None:
        self.observation_space, self.action_space = spaces.Box(-1.0, 1e6, (3,), np.float32), spaces.Discrete(2)
        self.number, self.episode, self.count = number, -1, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.count = self.episode + 1, 0
        return self._obs(), {}

    def step(self, action):
        self.count += 1
        over = self.count >= 4 + (self.number + 2 * self.episode) % 5
        how = (self.number + self.episode) % 3
        reward = (3 * self.number + 5 * self.episode + 7 * self.count) % 11
        return self._obs(), float(reward), over and how != 1, over and how != 0, {}

    def _obs(self):
        return np.array([self.number, self.episode, self.count], np.float32)


ENVS = [functools.partial(Labelled, number) for number in range(N)]


def collector_of(kind: str, policy: Any = None, **options: Any) -> Collector | MultiCollector:
    """A collector of N such envs, T steps a batch; two processes of it where `kind` is "MultiCollector"."""
    options = {"frames_per_batch": N * T, "seed": 0, **options}
    if kind == "Collector":
        return Collector(ENVS, policy, make_vec_options={"backend": "serial"}, **options)
    return MultiCollector(ENVS, policy, num_collectors=2, context="fork", **options)


def batches_of(kind: str, policy: Any = None, **options: Any) -> list[TensorDict]:
    """The first two batches; the second begins within episodes."""
    with collector_of(kind, policy, **options) as collector:
        return [collector.rollout(), collector.rollout()]


def loop_by_hand(batches: slice = slice(0, 2)) -> dict[str, Tensor]:
    """The rows of `batches`: observations and what follows them ``[N, steps, 3]``, the rest ``[N, steps]``."""
    rows = []
    for make in ENVS:
        env = make()
        obs, _ = env.reset()
        for _ in range(2 * T):
            after, reward, terminated, truncated, _ = env.step(0)
            rows.append((obs, after, np.float32(reward), terminated, truncated))
            obs = env.reset()[0] if terminated or truncated else after
    names = ("observation", "next_observation", "reward", "terminated", "truncated")
    found = {name: torch.from_numpy(np.stack(part)) for name, part in zip(names, zip(*rows, strict=True), strict=True)}
    found["done"] = found["terminated"] | found["truncated"]
    steps = slice(batches.start * T, batches.stop * T)
    return {name: rows.unflatten(0, (N, 2 * T))[:, steps] for name, rows in found.items()}


FIRST, SECOND = slice(0, 1), slice(1, 2)
