"""Returns of turn-based envs: rewards stand in the rows in which other agents act, and none is lost."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from gymnasium import spaces

import muster
from muster.rollout.returns import gae, vtrace


class Movers:
    """Two players take three turns each in PettingZoo's turn-based API; a move is worth 1 to whoever makes it."""

    metadata: ClassVar[dict[str, Any]] = {"name": "movers"}
    render_mode = None
    possible_agents: ClassVar[list[str]] = ["p_0", "p_1"]

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Box(0, 10, (1,), np.float32)

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(2)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        self.agents, self.agent_selection, self.t = list(self.possible_agents), "p_0", 0
        self.owed = dict.fromkeys(self.agents, 0.0)

    def observe(self, agent: str) -> Any:
        return np.full(1, self.t, np.float32)

    def last(self, observe: bool = True) -> Any:
        agent = self.agent_selection
        return self.observe(agent), self.owed[agent], self.t == 6, False, {}

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        if action is None:
            self.agents.remove(agent)
        else:
            self.t += 1
            self.owed[agent] = 1.0
        self.agent_selection = "p_1" if agent == "p_0" else "p_0"

    def close(self) -> None:
        pass


@pytest.mark.parametrize("mode", ["same_step", "disabled"])
def test_returns_with_alive_and_the_loss_with_acting(mode: str) -> None:
    rows: dict[str, list[Any]] = {name: [] for name in ("rewards", "terminated", "truncated", "alive", "acting")}
    with muster.make_vec(Movers, 1, backend="serial", autoreset_mode=mode) as envs:
        _, infos = envs.reset(seed=0)
        for _ in range(6):
            rows["alive"].append(infos["alive"]["p"])
            rows["acting"].append(infos["acting"]["p"])
            _, rewards, *_, infos = envs.step({"p": np.zeros((1, 2), np.int64)})
            rows["rewards"].append(rewards["p"])
            rows["terminated"].append(infos["agent_terminated"]["p"])
            rows["truncated"].append(infos["agent_truncated"]["p"])
    told = {name: torch.from_numpy(np.stack(row)) for name, row in rows.items()}  # [T, N, A]
    alive, acting = told.pop("alive"), told.pop("acting")
    zeros = torch.zeros_like(told["rewards"])
    told |= {"values": zeros, "next_values": zeros}

    advantages, _ = gae(**told, gamma=1.0, gae_lambda=1.0, mask=alive)
    assert [advantages[..., player][acting[..., player]].tolist() for player in (0, 1)] == [[3, 2, 1]] * 2
    _, targets = vtrace(zeros, **told, gamma=1.0, mask=alive)
    assert [targets[..., player][acting[..., player]].tolist() for player in (0, 1)] == [[3, 2, 1]] * 2
