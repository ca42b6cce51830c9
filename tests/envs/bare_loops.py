"""Bare loops of PettingZoo envs, written without Muster: what its rows have to equal, agent by agent."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import muster


@dataclass
class Agent:
    """What one agent is told in one step."""

    obs: Any
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    acting: bool = False


@dataclass
class BareParallel:
    env: Any
    truncated: bool = False
    over: bool = True
    told: dict[Any, Agent] = field(default_factory=dict)

    def reset(self, seed: int | None) -> None:
        obs, _ = self.env.reset(seed=seed)
        self.told = {agent: Agent(one, acting=True) for agent, one in obs.items()}
        self.over = self.truncated = False

    def step(self, actions: dict[Any, Any]) -> None:
        obs, rewards, terminations, truncations, _ = self.env.step({agent: actions[agent] for agent in self.env.agents})
        self.told = {
            agent: Agent(one, rewards[agent], terminations[agent], truncations[agent], agent in self.env.agents)
            for agent, one in obs.items()
        }
        self.truncated = self.truncated or any(truncations.values())
        self.over = not self.env.agents


@dataclass
class BareTurns:
    env: Any
    truncated: bool = False
    over: bool = True
    told: dict[Any, Agent] = field(default_factory=dict)

    def reset(self, seed: int | None) -> None:
        self.env.reset(seed=seed)
        self.over = self.truncated = False
        self._listen()

    def step(self, actions: dict[Any, Any]) -> None:
        self.env.step(actions[self.env.agent_selection])
        self._listen()

    def _listen(self) -> None:
        self.told = {}
        acting = None
        while self.env.agents and acting is None:
            agent = self.env.agent_selection
            obs, reward, terminated, truncated, _ = self.env.last()
            self.told[agent] = Agent(obs, reward, terminated, truncated, not (terminated or truncated))
            self.truncated = self.truncated or truncated
            if terminated or truncated:
                self.env.step(None)
            else:
                acting = agent
        for agent in self.env.agents:
            if agent != acting:
                self.told[agent] = Agent(self.env.observe(agent))
        self.over = not self.env.agents


def make(module: str, api: str, **kwargs: Any) -> Any:
    """The env of a PettingZoo or mpe2 module, by its api: "parallel_env" or "env"."""
    return getattr(importlib.import_module(module), api)(**kwargs)


def assert_rows_equal_a_bare_loop(
    module: str, api: str, steps: int, *, num_envs: int = 2, seed: int = 5, backend: str = "process", **kwargs: Any
) -> int:
    """Steps both side by side with random allowed actions, resets included; returns how many episodes ended."""
    rng = np.random.default_rng(seed)
    ended = 0
    loop = BareTurns if api == "env" else BareParallel
    bare = [loop(make(module, api, **kwargs)) for _ in range(num_envs)]
    with muster.make_vec(make, num_envs, backend=backend, env_kwargs={"module": module, "api": api, **kwargs}) as envs:
        obs, infos = envs.reset(seed=seed)
        for i, one in enumerate(bare):
            one.reset(seed + i)
            compare(envs, i, one, obs, None, infos)
        for _ in range(steps):
            actions = sample(envs, infos.get("action_mask"), rng)
            obs, rewards, terminated, truncated, infos = envs.step(actions)
            for i, one in enumerate(bare):
                if one.over:
                    one.reset(None)
                    assert not terminated[i]
                    assert not truncated[i]
                else:
                    one.step(by_agent(envs, actions, i))
                    assert terminated[i] == (one.over and not one.truncated)
                    assert truncated[i] == (one.over and one.truncated)
                    ended += one.over
                compare(envs, i, one, obs, rewards, infos)
    for one in bare:
        one.env.close()
    return ended


def sample(envs: Any, masks: Any, rng: np.random.Generator) -> dict[str, Any]:
    """Random actions by group, allowed by the masks where there are any."""
    actions = envs.action_space.sample()
    envs.action_space.seed(int(rng.integers(1 << 30)))
    for group, mask in (masks or {}).items():
        chances = rng.random(mask.shape) * mask
        actions[group] = chances.argmax(-1) + envs.single_action_space[group].start
    return actions


def by_agent(envs: Any, actions: dict[str, Any], i: int) -> dict[Any, Any]:
    return {agent: actions[g][i, a] for g, agents in envs.groups.items() for a, agent in enumerate(agents)}


def compare(envs: Any, i: int, bare: Any, obs: Any, rewards: Any, infos: Any) -> None:
    """The rows of env i against what a bare loop was told."""
    for group, agents in envs.groups.items():
        for a, agent in enumerate(agents):
            told = bare.told.get(agent)
            assert infos["alive"][group][i, a] == (told is not None), agent
            row = at(obs[group], i, a)
            if told is None:
                assert_all_zero(row)
                told = Agent(None)
            else:
                assert_obs_equal(row, told.obs, infos, group, i, a)
            assert infos["acting"][group][i, a] == told.acting
            assert infos["agent_terminated"][group][i, a] == told.terminated
            assert infos["agent_truncated"][group][i, a] == told.truncated
            if rewards is not None:
                assert rewards[group][i, a] == np.float32(told.reward)


def at(batch: Any, i: int, a: int) -> Any:
    if isinstance(batch, dict):
        return {key: at(one, i, a) for key, one in batch.items()}
    return batch[i, a]


def assert_all_zero(row: Any) -> None:
    for one in row.values() if isinstance(row, dict) else [row]:
        assert not np.any(one)


def assert_obs_equal(row: Any, obs: Any, infos: Any, group: str, i: int, a: int) -> None:
    if isinstance(obs, dict) and "action_mask" in obs:
        mask = np.asarray(obs["action_mask"]).astype(bool)
        np.testing.assert_array_equal(infos["action_mask"][group][i, a], mask if mask.any() else ~mask)
        rest = {key: one for key, one in obs.items() if key != "action_mask"}
        obs = rest["observation"] if list(rest) == ["observation"] else rest
    if isinstance(obs, dict):
        assert set(row) == set(obs)
        for key in obs:
            np.testing.assert_array_equal(row[key], obs[key])
    else:
        np.testing.assert_array_equal(row, np.asarray(obs).astype(row.dtype))
