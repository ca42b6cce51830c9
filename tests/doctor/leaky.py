"""Envs that leak something, and envs that only seem to."""

from __future__ import annotations

import os
import resource
import subprocess
import time
from typing import Any

import gymnasium as gym
import numpy as np
from pettingzoo.utils.env import ParallelEnv

CACHE = 400


class Leaky(gym.Env[Any, Any]):
    """Does what `traits` names: words of the methods below, with "and" between them.

    length: of its episodes, 0 for endless ones.  step_s: the least time of a step.  fill_s: time to fill its cache.
    """

    observation_space = gym.spaces.Box(0, 1, (3,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, traits: str = "", length: int = 20, step_s: float = 2e-4, fill_s: float = 0.0) -> None:
        self.traits = set(traits.split(" and "))
        self.length, self.step_s, self.fill_s = length, step_s, fill_s
        self.kept: list[Any] = []
        self.episodes = self.steps = 0
        if "few handles" in self.traits:
            resource.setrlimit(resource.RLIMIT_NOFILE, (200, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.episodes += 1
        self.count = 0
        for trait in sorted(self.traits):
            self._each_episode(trait)
        return self.np_random.random(3), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if not self.steps:
            self.began = time.perf_counter()
        self.count += 1
        self.steps += 1
        for trait in sorted(self.traits):
            self._each_step(trait)
        if self.step_s:
            time.sleep(self.step_s)
        return self.np_random.random(3), 0.0, self.count == self.length, False, {}

    def _each_step(self, trait: str) -> None:
        if trait == "20 KB":
            self.kept.append(bytearray(20_000))
        if trait == "trajectory":  # kept until the episode is over
            self.kept.append(np.ones(20_000, np.uint8))
        if trait == "cache" and len(self.kept) < CACHE * min(1, (time.perf_counter() - self.began) / self.fill_s):
            self.kept.append(np.ones(100_000, np.uint8))
        if trait == "raise" and self.episodes == 50:
            raise RuntimeError("the simulator has lost its licence")

    def _each_episode(self, trait: str) -> None:
        if trait == "handle":
            self.kept.append(os.open("/dev/null", os.O_RDONLY))
        if trait == "process":
            self.kept.append(subprocess.Popen(["sleep", "1000"]))
        if trait == "trajectory":
            self.kept.clear()
        if trait == "cycle":  # with a buffer; garbage until Python's next collection
            cycle: list[Any] = [np.ones(1_000_000, np.uint8)]
            cycle.append(cycle)


class LeakyTeam(ParallelEnv[str, Any, int]):
    """Two agents; leaks a handle an episode."""

    metadata = {"name": "leaky_team"}  # noqa: RUF012  # PettingZoo's own form
    possible_agents = ["a", "b"]  # noqa: RUF012

    def __init__(self, length: int = 20) -> None:
        self.leaky = Leaky("handle", length)

    def observation_space(self, agent: str) -> Any:
        return Leaky.observation_space

    def action_space(self, agent: str) -> Any:
        return Leaky.action_space

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.agents = list(self.possible_agents)
        obs, _ = self.leaky.reset(seed=seed)
        return dict.fromkeys(self.agents, obs), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, int]) -> Any:
        obs, reward, terminated, truncated, _ = self.leaky.step(0)
        there = self.agents
        if terminated:
            self.agents = []
        each = (obs, reward, terminated, truncated)
        return *(dict.fromkeys(there, one) for one in each), {agent: {} for agent in there}
