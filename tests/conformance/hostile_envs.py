"""Envs that follow their APIs and that a careless adapter gets wrong, for `EnvApiContract`."""

from __future__ import annotations

from typing import Any

import numpy as np
from agent_envs import Masked

from sample_envs import Counter


class Telling(Counter):
    """A Gymnasium env that reuses its observation's array, and an array in its infos."""

    def __init__(self) -> None:
        super().__init__(length=5, render_mode="ansi")
        self.trace = np.zeros(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        obs, _ = super().reset(seed=seed, options=options)
        return obs, {"episode_of_env": self.episode}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        obs, reward, terminated, _, _ = super().step(action)
        self.trace[:] = self.count, action
        info = {"trace": self.trace, "deep": {"half": self.count / 2}, **({"odd": "yes"} if self.count % 2 else {})}
        return obs, reward, terminated and self.episode % 2 == 0, terminated and self.episode % 2 == 1, info


class ReusingAgents(Masked):
    """A parallel env whose agents come late, die and return. Each agent has one array, which is written again."""

    def __init__(self) -> None:
        super().__init__()
        self.buffers = {agent: np.zeros(2, np.float32) for agent in self.possible_agents}

    def _obs(self, agent: str) -> Any:
        self.buffers[agent][:] = super()._obs(agent)
        return self.buffers[agent]
