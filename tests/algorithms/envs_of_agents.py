"""Small envs with agents. In a file of their own, as workers import it, and it imports no PyTorch."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces


class Parallel:
    """The parts of PettingZoo's parallel API that are alike in the envs below: agents w_0 and w_1."""

    metadata: ClassVar[dict[str, Any]] = {"name": "test"}
    render_mode = None
    possible_agents: ClassVar[list[Any]] = ["w_0", "w_1"]

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Box(0, 100, (1,), np.float32)

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(2)

    def close(self) -> None:
        pass


class Comings(Parallel):
    """Six steps; w_1 is not there from obs 2 (as its end, ``how``) or 3 on to obs 3, and is there again from obs 4 on.

    Agent i observes the number of steps and 10 * i; a step's reward is its number. The last step truncates all.
    """

    def __init__(self, how: str) -> None:
        self.how = how

    def _obs(self) -> dict[str, Any]:
        return {agent: np.full(1, self.t + 10 * int(agent[-1]), np.float32) for agent in self.agents}

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.t, self.agents = 0, list(self.possible_agents)
        return self._obs(), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> Any:
        self.t += 1
        ends = self.t == 2 and self.how != "pauses"
        there = [agent for agent in self.possible_agents if agent == "w_0" or self.t not in (2, 3) or (ends)]
        self.agents = there
        obs, over = self._obs(), self.t == 6
        flags = {
            name: {agent: ends and agent == "w_1" and self.how == name for agent in there}
            for name in ("terminated", "truncated")
        }
        if over:
            flags["truncated"] = dict.fromkeys(there, True)
        self.agents = [] if over else [agent for agent in there if not flags["terminated"][agent]]
        self.agents = [agent for agent in self.agents if not flags["truncated"][agent]]
        rewards = dict.fromkeys(there, float(self.t))
        return obs, rewards, flags["terminated"], flags["truncated"], {agent: {} for agent in there}


class Broken(Comings):
    """w_1 observes nan after three steps."""

    def _obs(self) -> dict[str, Any]:
        obs = super()._obs()
        if self.t == 3:
            obs["w_0"][:] = np.nan
        return obs


class Lots(Parallel):
    """Each agent is to do what the other one observes: no value is known from an agent's own observation alone."""

    possible_agents: ClassVar[list[Any]] = ["left_0", "right_0"]

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.agents, self.t = list(self.possible_agents), 0
        return self._draw(), {agent: {} for agent in self.agents}

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(2 if agent == "left_0" else 3)

    def _draw(self) -> dict[str, Any]:
        self.drawn = {agent: int(self.rng.integers(2)) for agent in self.agents}
        return {agent: np.full(1, number, np.float32) for agent, number in self.drawn.items()}

    def step(self, actions: dict[str, Any]) -> Any:
        self.t += 1
        rewards = {agent: float(actions[agent] == self.drawn[agent]) for agent in self.agents}
        over = dict.fromkeys(self.agents, self.t == 8)
        obs, infos = self._draw(), {agent: {} for agent in self.agents}
        self.agents = [] if self.t == 8 else self.agents
        return obs, rewards, over, dict.fromkeys(over, False), infos
