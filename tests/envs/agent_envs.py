"""Small multi-agent envs after PettingZoo's APIs, without PettingZoo. They do often what real envs do rarely."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from gymnasium import spaces

import muster


class Script:
    """A parallel env in which agents come, die and return as its script says.

    Observation of agent k after t steps: ``[t, k]``, in one and the same array for all agents. Reward: t + k / 10.
    script: for each step the agents that are there afterwards; ends: {(step, agent): "terminated" or "truncated"}.
    """

    metadata: ClassVar[dict[str, Any]] = {"name": "script"}
    render_mode = "rgb_array"

    def __init__(self, script: list[str] | None = None, ends: dict[tuple[int, str], str] | None = None) -> None:
        self.possible_agents = ["a_0", "a_1", "b_0"]
        self.script = [one.split() for one in script or ["a_0 b_0", "a_0 a_1 b_0", "a_1 b_0", "a_0 a_1", ""]]
        self.ends = ends or {
            (2, "a_0"): "terminated",
            (3, "b_0"): "truncated",
            (4, "a_0"): "terminated",
            (4, "a_1"): "terminated",
        }
        self.agents: list[str] = []
        self.t = 0
        self.got: list[dict[str, Any]] = []
        self.closed = False

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Box(-100, 100, (2,), np.float32)

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(3, start=1)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.t, self.seed, self.options, self.agents = 0, seed, options, self.script[0]
        return {agent: self._obs(agent) for agent in self.agents}, {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> Any:
        assert list(actions) == self.agents
        self.got.append(actions)
        self.t += 1
        before, self.agents = self.agents, self.script[self.t]
        told = dict.fromkeys([*before, *self.agents])
        obs = {agent: self._obs(agent) for agent in told}
        rewards = {agent: self.t + self._k(agent) / 10 for agent in told}
        ended = {agent: self.ends.get((self.t, agent)) for agent in told}
        return (
            obs,
            rewards,
            {agent: end == "terminated" for agent, end in ended.items()},
            {agent: end == "truncated" for agent, end in ended.items()},
            {agent: {} for agent in told},
        )

    def render(self) -> Any:
        return np.full((2, 2, 3), self.t, np.uint8)

    def close(self) -> None:
        self.closed = True

    def _k(self, agent: str) -> int:
        return ["a_0", "a_1", "b_0", "b_1", "c_0"].index(agent)

    def _obs(self, agent: str) -> Any:
        return np.array([self.t, self._k(agent)], np.float32)


class Away(Script):
    """a_1 is away from step 1 to step 3, without having ended. rewarded: it has a reward of step 2 all the same.

    returns: whether it comes back before the others end, with step 4.
    """

    def __init__(self, rewarded: bool = False, returns: bool = True) -> None:
        ends = {(4, agent): "terminated" for agent in ("a_0", "a_1", "b_0")}
        super().__init__(["a_0 a_1 b_0", "a_0 b_0", "a_0 b_0", "a_0 a_1 b_0" if returns else "a_0 b_0", ""], ends)
        self.rewarded = rewarded

    def step(self, actions: dict[str, Any]) -> Any:
        obs, rewards, *rest = super().step(actions)
        if self.t == 2 and self.rewarded:
            rewards["a_1"] = 7.0
        return obs, rewards, *rest


class Failing(Script):
    """An env that raises in its second step if its seed is 1."""

    def step(self, actions: dict[str, Any]) -> Any:
        if self.t == 1 and muster.get_worker_info() is None:
            raise RuntimeError("never")
        if self.t == 1 and self.seed == 1:
            raise RuntimeError("b_0 fell over")
        return super().step(actions)


class Masked(Script):
    """An env with masks in infos; agent a_1's forbids every action. The state is ``[t / 10, 0.5]``."""

    state_space = spaces.Box(-1, 1, (2,), np.float64)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        obs, _ = super().reset(seed, options)
        return obs, {agent: self._info(agent) for agent in obs}

    def step(self, actions: dict[str, Any]) -> Any:
        *rest, infos = super().step(actions)
        return (*rest, {agent: self._info(agent) for agent in infos})

    def state(self) -> Any:
        return np.array([self.t / 10, 0.5])

    def _info(self, agent: str) -> dict[str, Any]:
        forbids_all = agent == "a_1"
        return {"action_mask": np.array([0, 0, 0] if forbids_all else [0, 1, 1], np.int8), "t": self.t, "who": agent}


class Structured(Script):
    """An env whose observations and actions are structures, with the keys in another order in every env."""

    def __init__(self, flip: bool = False) -> None:
        super().__init__(["a_0 a_1 b_0"] * 3 + [""], {(3, agent): "truncated" for agent in ("a_0", "a_1", "b_0")})
        self.flip = flip

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        parts = {
            "map": spaces.Box(0, 255, (2, 3), np.uint8),
            "pair": spaces.Tuple((spaces.Discrete(9), spaces.MultiBinary(2))),
            "action_mask": spaces.MultiBinary(4),
        }
        return spaces.Dict(sorted(parts.items(), reverse=self.flip))

    def action_space(self, agent: str) -> spaces.Space[Any]:
        parts = {"move": spaces.Box(-1, 1, (2,), np.float32), "pick": spaces.MultiDiscrete([2, 3])}
        return spaces.Dict(sorted(parts.items(), reverse=self.flip))

    def _obs(self, agent: str) -> Any:
        k = self._k(agent)
        parts = {
            "map": np.full((2, 3), 10 * self.t + k, np.uint8),
            "pair": (k, np.array([1, 0], np.int8)),
            "action_mask": np.array([1, 0, 0, k > 0], np.int8),
        }
        return dict(sorted(parts.items(), reverse=not self.flip))


class Turns:
    """A turn-based env of three agents that shows every agent the same array, and ends them one after the other.

    Every action is worth 1 to the others. Agent k ends after its k + 2 turns.
    """

    metadata: ClassVar[dict[str, Any]] = {"name": "turns"}
    render_mode = None

    def __init__(self) -> None:
        self.possible_agents = ["p_0", "p_1", "p_2"]
        self._shown = np.zeros(2, np.float32)

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Box(-100, 100, (2,), np.float32)

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        self.agents = list(self.possible_agents)
        self.turns = dict.fromkeys(self.agents, 0)
        self.owed = dict.fromkeys(self.agents, 0.0)
        self.t = 0
        self.agent_selection = self.agents[0]

    def observe(self, agent: str) -> Any:
        self._shown[:] = self.t, self.possible_agents.index(agent)
        return self._shown

    def last(self, observe: bool = True) -> Any:
        agent = self.agent_selection
        return self.observe(agent), self.owed[agent], self._over(agent), False, {}

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        after = (self.agents.index(agent) + 1) % len(self.agents)
        following = self.agents[after]
        if self._over(agent):
            assert action is None
            self.agents.remove(agent)
        else:
            assert action.shape == (1,)
            self.t += 1
            self.turns[agent] += 1
            self.owed = {one: 0.0 if one == agent else worth + 1 for one, worth in self.owed.items()}
        if self.agents:
            self.agent_selection = following

    def close(self) -> None:
        pass

    def _over(self, agent: str) -> bool:
        return self.turns[agent] >= self.possible_agents.index(agent) + 2


def ones(n: int) -> dict[str, Any]:
    """The action 1 for each agent of `n` of the envs above, `Turns` excepted."""
    return {"a": np.ones((n, 2), np.int64), "b": np.ones((n, 1), np.int64)}
