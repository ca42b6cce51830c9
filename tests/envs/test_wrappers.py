"""Wrappers are stepped through, whoever puts them there and whenever, and envs are let go."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import gymnasium
import numpy as np
import pytest
from agent_envs import Turns
from gymnasium import spaces
from gymnasium.wrappers import OrderEnforcing, TimeLimit

import muster
from muster.errors import EnvError


class Still(gymnasium.Env[Any, Any]):
    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(2, np.float32), 1.0, False, False, {}


class Halving(gymnasium.Wrapper[Any, Any, Any, Any]):
    def step(self, action: Any) -> Any:
        obs, reward, *rest = self.env.step(action)
        return obs, 0.5 * float(reward), *rest


def test_a_wrapper_put_inside_later_is_stepped() -> None:
    def wrap(env: Any, env_index: int) -> None:
        env.env = Halving(env.env)

    with muster.make_vec("CartPole-v1", 2, num_workers=2) as envs:
        envs.reset(seed=0)
        assert envs.step(np.zeros(2, np.int64))[1].tolist() == [1.0, 1.0]
        envs.call(wrap)
        assert envs.step(np.zeros(2, np.int64))[1].tolist() == [0.5, 0.5]


def test_envs_that_are_replaced_within_their_wrappers_are_let_go() -> None:
    built: list[Any] = []

    def replace(env: Any, env_index: int) -> None:
        env.env.env = Still()
        built.append(weakref.ref(env.env.env))

    with muster.make_vec(lambda: TimeLimit(OrderEnforcing(Still()), 9), 1, backend="serial") as envs:
        for _ in range(150):
            envs.call(replace)
            envs.reset(seed=0)
            envs.step(np.zeros(1, np.int64))
        gc.collect()
        assert sum(one() is not None for one in built) == 1


@pytest.mark.parametrize("env", [Still, Turns])
def test_closed_envs_that_know_their_adapter_are_let_go(env: Any) -> None:
    seen: list[Any] = []

    def know(adapter: Any, env_index: int) -> None:
        own = getattr(adapter, "env", adapter)
        own.owner = adapter
        seen.append(weakref.ref(own))

    envs = muster.make_vec(env, 1, backend="serial")
    envs.call(know)
    envs.reset(seed=0)
    envs.step(envs.action_space.sample())
    envs.close()
    gc.collect()
    assert seen[0]() is None


class Blinded(Turns):
    """All end with the third turn; whoever is told of it then sees NaN."""

    def observe(self, agent: str) -> Any:
        return np.full(2, np.nan, np.float32) if self.t == 3 else super().observe(agent)

    def _over(self, agent: str) -> bool:
        return self.t == 3


def test_an_env_of_turns_goes_on_after_an_error_that_left_nobody() -> None:
    turn = {"p": np.zeros((1, 3, 1), np.float32)}
    with muster.make_vec(Blinded, 1, backend="serial", check_finite=True) as envs:
        envs.reset(seed=0)
        for _ in range(2):
            envs.step(turn)
        with pytest.raises(EnvError, match="NaN"):
            envs.step(turn)
        assert [envs.step(turn)[2].item() for _ in range(3)] == [True, False, False]
