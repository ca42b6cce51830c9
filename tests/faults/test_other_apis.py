"""Envs that follow another API than Muster expects: the error says which, and what to write."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import muster
from envs import Scripted
from muster.errors import EnvError, RecipeError, SpecMismatch

OBS = np.zeros(3, np.float32)
BOX = gym.spaces.Box(-1, 1, (3,), np.float32)


class ResetsAsGym(Scripted):
    def reset(self, **_: Any) -> Any:
        return OBS


class StepsAsGym(Scripted):
    def step(self, action: Any) -> Any:
        return OBS, 0.0, False, {}


class InfosInLists(Scripted):
    def step(self, action: Any) -> Any:
        return OBS, 0.0, False, False, ["info"]


class LacksKeys(Scripted):
    def __init__(self) -> None:
        super().__init__(obs_space=gym.spaces.Dict({"x": BOX, "y": BOX}))

    def reset(self, **_: Any) -> Any:
        return {"x": OBS}, {}


class HasNoSpace(Scripted):
    def __init__(self) -> None:
        super().__init__()
        self.observation_space = None  # type: ignore[assignment]


class KeepsItsGraph(Scripted):
    def reset(self, **_: Any) -> Any:
        import torch  # not at the top: workers import this module

        return torch.zeros(3, requires_grad=True), {}


class TakesNoSeed(Scripted):
    def reset(self) -> Any:  # type: ignore[override]
        return OBS, {}


class Agents:
    """A parallel env of PettingZoo's. Each subclass breaks the API in one way."""

    possible_agents = ("a", "bc")

    def observation_space(self, agent: str) -> Any:
        return BOX

    def action_space(self, agent: str) -> Any:
        return gym.spaces.Discrete(2)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.agents = list(self.possible_agents)
        return dict.fromkeys(self.agents, OBS), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> Any:
        flags = dict.fromkeys(self.agents, False)
        return dict.fromkeys(self.agents, OBS), dict.fromkeys(self.agents, 1.0), flags, flags, {}

    def close(self) -> None: ...


class AgentsResetAsBefore(Agents):
    def reset(self, **kwargs: Any) -> Any:
        return super().reset(**kwargs)[0]


class AgentsStepAsBefore(Agents):
    def step(self, actions: dict[str, Any]) -> Any:
        obs, rewards, dones, _, infos = super().step(actions)
        return obs, rewards, dones, infos


class AgentsInLists(Agents):
    def step(self, actions: dict[str, Any]) -> Any:
        obs, *rest = super().step(actions)
        return list(obs.values()), *rest


class AgentsEarnArrays(Agents):
    def step(self, actions: dict[str, Any]) -> Any:
        obs, rewards, *rest = super().step(actions)
        return obs, rewards | {"bc": np.ones(1)}, *rest


class AgentsUnnamed(Agents):
    def step(self, actions: dict[str, Any]) -> Any:
        result = super().step(actions)
        self.agents = [*self.agents, "z"]
        return tuple(one | {"z": one.get("a", {})} for one in result)


class Unready:
    def __float__(self) -> float:
        raise ZeroDivisionError("of the env")


class AgentsFail(Agents):
    def step(self, actions: dict[str, Any]) -> Any:
        obs, rewards, *rest = super().step(actions)
        return obs, rewards | {"bc": Unready()}, *rest


@pytest.mark.parametrize(
    ("env", "error", "message"),
    [
        (ResetsAsGym, EnvError, r"reset must return \(obs, info\), got array.*Gym before 0\.26"),
        (StepsAsGym, EnvError, r"step must return \(obs, reward, .*, False, {}\); an env written for Gym before 0\.26"),
        (InfosInLists, EnvError, "info must be a dict, got list"),
        (LacksKeys, SpecMismatch, r"observation: expected keys \['x', 'y'\], got \['x'\]"),
        (HasNoSpace, SpecMismatch, r"HasNoSpace\.observation_space is None, expected a gymnasium\.spaces\.Space"),
        (KeepsItsGraph, SpecMismatch, r"observation is Tensor .*requires grad.*detach"),
        (AgentsResetAsBefore, SpecMismatch, r"reset must return \(observations, infos\), .* got {'a': array"),
        (AgentsStepAsBefore, SpecMismatch, r"step must return \(observations, rewards, terminations, truncations"),
        (AgentsInLists, EnvError, r"expected a dict of observations by agent, got \[array"),
        (
            AgentsUnnamed,
            SpecMismatch,
            r"agent 'z' is not among the env's possible_agents \['a', 'bc'\]; slots are fixed",
        ),
        (AgentsFail, EnvError, "ZeroDivisionError: of the env"),
        (AgentsEarnArrays, EnvError, r"the reward of 'bc' is array\(\[1\.\]\), expected a number"),
    ],
)
def test_it_is_said_what_was_expected(env: Any, error: type[Exception], message: str) -> None:
    with (
        pytest.raises(error, match=message),
        muster.make_vec(env, 1, backend="serial") as envs,
    ):
        envs.reset(seed=0)
        envs.step(envs.action_space.sample())


def test_a_reset_that_takes_no_seed_is_shown_what_to_take() -> None:
    with muster.make_vec(TakesNoSeed, 1) as envs, pytest.raises(EnvError, match="'seed'") as raised:
        envs.reset()
    assert any("def reset(self, *, seed=None, options=None)" in note for note in raised.value.__notes__)


def test_actions_of_other_bounds_have_a_remedy() -> None:
    class Wide(Scripted):
        action_space = gym.spaces.Box(-2, 2, (1,))

    class Narrow(Scripted):
        action_space = gym.spaces.Box(-1, 1, (1,))

    with pytest.raises(SpecMismatch, match=r"low is \[-1\.\], expected \[-2\.\]; .*RescaleAction"):
        muster.make_vec([Wide, Narrow], backend="serial")


def test_an_env_of_torchrls_is_told_where_it_belongs() -> None:
    envs = pytest.importorskip("torchrl.envs")
    with pytest.raises(RecipeError, match=r"env of TorchRL, a torchrl.*GymEnv\. .*torchrl\.ParallelEnv\("):
        muster.make_vec(lambda: envs.GymEnv("CartPole-v1"), 1, backend="serial")
