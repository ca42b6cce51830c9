"""Envs stepped by their own APIs, without Muster. Muster's rows have to equal theirs, field by field."""

from __future__ import annotations

import copy
import functools
import importlib
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from row_checks import (
    assert_all_zero,
    assert_info,
    assert_obs_equal,
    assert_same,
    assert_spec,
    at,
    sample,
    without_mask,
)

import muster


class BareLoop(ABC):
    """One env, stepped by its own API. `over`: its episode has ended. `terminated`, `truncated`: how.

    repeats: whether an episode follows from its seed and actions alone.
    """

    env: Any
    repeats: bool = True
    over: bool = True
    terminated: bool = False
    truncated: bool = False

    @abstractmethod
    def reset(self, seed: int | None) -> None:
        """Starts an episode. seed: None to go on with the current state of the generators."""

    def start_alike(self, seed: int, assert_alike: Callable[[], None]) -> None:
        """Starts an episode of this seed that `assert_alike` accepts."""
        self.reset(seed)
        assert_alike()

    @abstractmethod
    def step(self, action: Any) -> None:
        """Makes one step with an `own_action`."""

    @abstractmethod
    def own_action(self, envs: Any, actions: Any, i: int) -> Any:
        """The action of env i, taken from a vector env's actions, in the form that this env takes."""

    @abstractmethod
    def assert_row(self, envs: Any, i: int, obs: Any, rewards: Any, infos: Any, *, has_ended: bool = True) -> None:
        """Asserts that the rows of env i equal the results of the last step or reset.

        rewards: None after a reset.  has_ended: whether infos describe a step and its ends, too, and not only a reset.
        """

    @abstractmethod
    def assert_spaces(self, envs: Any) -> None:
        """Asserts that the vector env's spaces for one env are this env's."""

    def render(self) -> Any:
        return self.env.render()


class BareSingle(BareLoop):
    """An env of one agent."""

    obs: Any = None
    reward: float = 0.0
    info: dict[str, Any]

    def own_action(self, envs: Any, actions: Any, i: int) -> Any:
        return at(actions, i)

    def assert_row(self, envs: Any, i: int, obs: Any, rewards: Any, infos: Any, *, has_ended: bool = True) -> None:
        assert_same(at(obs, i), self.obs)
        if rewards is not None:
            assert rewards[i] == float(self.reward)
        assert_info(infos, i, self.info)


class BareGymnasium(BareSingle):
    def __init__(self, env: Any) -> None:
        self.env = env

    def reset(self, seed: int | None) -> None:
        self.obs, self.info = copy.deepcopy(self.env.reset(seed=seed))
        self.reward = 0.0
        self.over = self.terminated = self.truncated = False

    def step(self, action: Any) -> None:
        told = copy.deepcopy(self.env.step(action))
        self.obs, self.reward, self.terminated, self.truncated, self.info = told
        self.over = self.terminated or self.truncated

    def assert_spaces(self, envs: Any) -> None:
        assert envs.single_observation_space == self.env.observation_space
        assert envs.single_action_space == self.env.action_space


class BareDmEnv(BareSingle):
    """An env of dm_env's API, which has no seeds: a subclass says how its env's generators are seeded."""

    def __init__(self, env: Any) -> None:
        self.env = env

    def seed(self, seed: int) -> None:
        raise NotImplementedError

    def reset(self, seed: int | None) -> None:
        if seed is not None:
            self.seed(seed)
        self.over = self.terminated = self.truncated = False
        self.obs, self.reward, self.info = copy.deepcopy(self.env.reset().observation), 0.0, {}

    def step(self, action: Any) -> None:
        timestep = self.env.step(action)
        self.obs, self.over = copy.deepcopy(timestep.observation), timestep.last()
        self.reward = 0.0 if timestep.reward is None else timestep.reward
        self.terminated = self.over and timestep.discount == 0
        self.truncated = self.over and not self.terminated
        is_expected = timestep.discount in (None, 0 if self.terminated else 1)
        self.info = {} if is_expected else {"discount": timestep.discount}

    def render(self) -> Any:
        return self.env.physics.render()

    def assert_spaces(self, envs: Any) -> None:
        assert_spec(envs.single_observation_space, self.env.observation_spec())
        assert_spec(envs.single_action_space, self.env.action_spec())


@dataclass
class Agent:
    """The results of one agent in one step."""

    obs: Any
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    acting: bool = False


@dataclass
class BareAgents(BareLoop):
    """An env of several agents. told, infos: the last results of the agents that are there, by agent.

    cut: whether an agent was truncated in this episode.
    """

    env: Any
    cut: bool = False
    over: bool = True
    told: dict[Any, Agent] = field(default_factory=dict)
    infos: dict[Any, dict[str, Any]] = field(default_factory=dict)

    def own_action(self, envs: Any, actions: Any, i: int) -> dict[Any, Any]:
        return {
            agent: at(actions[group], i, a) for group, agents in envs.groups.items() for a, agent in enumerate(agents)
        }

    def assert_row(self, envs: Any, i: int, obs: Any, rewards: Any, infos: Any, *, has_ended: bool = True) -> None:
        for group, agents in envs.groups.items():
            for a, agent in enumerate(agents):
                told = self.told.get(agent)
                assert infos["alive"][group][i, a] == (told is not None), agent
                row = at(obs[group], i, a)
                if told is None:
                    assert_all_zero(row)
                    told = Agent(None)
                else:
                    assert_obs_equal(row, told.obs, infos, group, i, a)
                assert infos["acting"][group][i, a] == told.acting
                if has_ended:
                    assert infos["agent_terminated"][group][i, a] == told.terminated
                    assert infos["agent_truncated"][group][i, a] == told.truncated
                if rewards is not None:
                    assert rewards[group][i, a] == np.float32(told.reward)
        by_agent = {
            str(agent): {key: value for key, value in info.items() if key != "action_mask"}
            for agent, info in self.infos.items()
        }
        assert_info(infos.get("agent_infos", {}), i, {agent: info for agent, info in by_agent.items() if info})

    def assert_spaces(self, envs: Any) -> None:
        for group, agents in envs.groups.items():
            for agent in agents:
                assert envs.single_observation_space[group] == without_mask(self.env.observation_space(agent))
                assert envs.single_action_space[group] == self.env.action_space(agent)

    @property
    def terminated(self) -> bool:  # type: ignore[override]
        return self.over and not self.cut

    @property
    def truncated(self) -> bool:  # type: ignore[override]
        return self.over and self.cut


class BareParallel(BareAgents):
    def reset(self, seed: int | None, options: Any = None) -> None:
        obs, self.infos = copy.deepcopy(self.env.reset(seed=seed, options=options))
        self.told = {agent: Agent(one, acting=True) for agent, one in obs.items()}
        self.over = self.cut = False

    def step(self, actions: dict[Any, Any]) -> None:
        told = self.env.step({agent: actions[agent] for agent in self.env.agents})
        obs, rewards, terminations, truncations, self.infos = copy.deepcopy(told)
        self.told = {
            agent: Agent(one, rewards[agent], terminations[agent], truncations[agent], agent in self.env.agents)
            for agent, one in obs.items()
        }
        self.cut = self.cut or any(truncations.values())
        self.over = not self.env.agents


class BareTurns(BareAgents):
    def reset(self, seed: int | None, options: Any = None) -> None:
        self.env.reset(seed=seed, options=options)
        self.over = self.cut = False
        self.there: set[Any] = set()  # the agents that were there and have not ended, also those that have left
        self._listen()

    def step(self, actions: dict[Any, Any]) -> None:
        self.env.step(actions[self.env.agent_selection])
        self._listen()

    def _listen(self) -> None:
        self.told, self.infos = {}, {}
        acting = None
        while self.env.agents and acting is None:
            agent = self.env.agent_selection
            obs, reward, terminated, truncated, self.infos[agent] = copy.deepcopy(self.env.last())
            self.told[agent] = Agent(obs, reward, terminated, truncated, not (terminated or truncated))
            self.cut = self.cut or truncated
            if terminated or truncated:
                self.env.step(None)
            else:
                acting = agent
        for agent in self.env.agents:
            if agent != acting:
                self.told[agent] = Agent(copy.deepcopy(self.env.observe(agent)))
        self.over = not self.env.agents
        ended = {agent for agent, told in self.told.items() if told.terminated or told.truncated}
        self.there = (self.there | set(self.env.agents)) - ended
        for agent in self.there if self.over else ():  # what they were given since they left
            self.told[agent] = Agent(copy.deepcopy(self.env.observe(agent)), self.env._cumulative_rewards[agent])


class BarePlayers(BareAgents):
    """A dm_env env of lists, like Melting Pot's. Observations that all players share are kept once, in `shared`.

    A subclass says how its env is seeded.
    """

    SHARED = ("WORLD.RGB", "COLLECTIVE_REWARD")

    def seed(self, seed: int) -> None:
        raise NotImplementedError

    def reset(self, seed: int | None) -> None:
        if seed is not None:
            self.seed(seed)
        self._listen(self.env.reset(), [0.0] * len(self.env.action_spec()))

    def step(self, actions: dict[Any, Any]) -> None:
        timestep = self.env.step([int(action) for action in actions.values()])
        self._listen(timestep, timestep.reward)

    def _listen(self, timestep: Any, rewards: Sequence[float]) -> None:
        self.over = timestep.last()
        ended = bool(self.over and np.all(np.equal(timestep.discount, 0)))
        self.cut = self.over and not ended
        seen = copy.deepcopy(list(timestep.observation))
        self.shared = {key: seen[0][key] for key in self.SHARED if key in seen[0]}
        self.told = {
            f"player_{k}": Agent(
                {key: value for key, value in obs.items() if key not in self.SHARED},
                *(rewards[k], ended, self.cut, not self.over),
            )
            for k, obs in enumerate(seen)
        }

    def assert_row(self, envs: Any, i: int, obs: Any, rewards: Any, infos: Any, *, has_ended: bool = True) -> None:
        super().assert_row(envs, i, obs, rewards, infos, has_ended=has_ended)
        for key, value in self.shared.items():
            np.testing.assert_array_equal(obs["shared"][key][i], value)

    def assert_spaces(self, envs: Any) -> None:
        observed = dict(self.env.observation_spec()[0])
        shared = {key: observed.pop(key) for key in self.SHARED if key in observed}
        assert_spec(envs.single_observation_space["player"], observed)
        if shared:
            assert_spec(envs.single_observation_space["shared"], shared)
        assert_spec(envs.single_action_space["player"], self.env.action_spec()[0])

    def render(self) -> Any:
        return self.env.observation()[0]["WORLD.RGB"]


class BareSubstrate(BarePlayers):
    """A substrate of Melting Pot. No seed decides which player spawns where.

    build: makes the substrate, with the seed that it draws.
    """

    repeats = False

    def __init__(self, build: Callable[[], Any]) -> None:
        self.build = build
        super().__init__(substrate_of_seed(build, 1))

    def start_alike(self, seed: int, assert_alike: Callable[[], None]) -> None:
        for attempt in range(20):
            self.env.close()
            self.env = substrate_of_seed(self.build, seed)
            self.reset(None)
            try:
                assert_alike()
                return
            except AssertionError:
                if attempt == 19:
                    raise

    def seed(self, seed: int) -> None:
        self.env.close()
        self.env = substrate_of_seed(self.build, seed)


def substrate_of_seed(build: Callable[[], Any], seed: int) -> Any:
    """The substrate as Melting Pot builds it when its random seed happens to be `seed`."""
    drawn = random.randint
    random.randint = lambda *_: seed  # type: ignore[assignment]
    try:
        return build()
    finally:
        random.randint = drawn


def make(module: str, api: str, **kwargs: Any) -> Any:
    """The env of a PettingZoo or mpe2 module, by its api: "parallel_env" or "env"."""
    return getattr(importlib.import_module(module), api)(**kwargs)


def assert_rows_equal_a_bare_loop(
    module: str, api: str, steps: int, *, num_envs: int = 2, seed: int = 5, backend: str = "process", **kwargs: Any
) -> int:
    """Steps a vector env and bare loops side by side by random allowed actions; returns how many episodes ended."""
    loop = BareTurns if api == "env" else BareParallel
    bare = [loop(make(module, api, **kwargs)) for _ in range(num_envs)]
    with muster.make_vec(make, num_envs, backend=backend, env_kwargs={"module": module, "api": api, **kwargs}) as envs:
        ended = assert_rows_equal_bare_loops(envs, bare, steps, seed=seed)
    for one in bare:
        one.env.close()
    return ended


def assert_rows_equal_bare_loops(envs: Any, bare: Sequence[BareLoop], steps: int, *, seed: int = 5) -> int:
    """Steps `envs`, which reset on the step after an end, and one loop for each env; returns how many episodes ended.

    Where an episode does not follow from its seed alone, this returns at the first end.
    """
    rng = np.random.default_rng(seed)
    ended = 0
    obs, infos = envs.reset(seed=seed)
    for i, one in enumerate(bare):
        one.start_alike(seed + i, functools.partial(one.assert_row, envs, i, obs, None, infos))
    for _ in range(steps):
        actions = sample(envs, infos.get("action_mask"), rng)
        obs, rewards, terminated, truncated, infos = envs.step(actions)
        for i, one in enumerate(bare):
            if one.over:
                if not one.repeats:
                    return ended
                one.reset(None)
                assert not terminated[i]
                assert not truncated[i]
            else:
                one.step(one.own_action(envs, actions, i))
                assert terminated[i] == one.terminated
                assert truncated[i] == one.truncated
                ended += one.over
            one.assert_row(envs, i, obs, rewards, infos)
    return ended
