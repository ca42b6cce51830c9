"""What `functools` puts around functions of a script travels with them, cold; what SWIG made is named."""

from __future__ import annotations

import functools
import pickle
import warnings
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import muster
from muster.errors import CannotTravel
from muster.pickling import find_culprits
from muster.pickling.probe import attempt

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # as an error, what SWIG's types are warned about ends the process
    import Box2D


def test_caches_of_a_scripts_own_class_work_in_workers() -> None:
    @functools.singledispatch
    def worth(value: object) -> float:
        return 1.0

    @worth.register
    def _(value: int) -> float:
        return 2.0

    @functools.cache
    def load(size: int) -> Any:
        return np.ones(size, np.float32)

    class Cached(gym.Env[Any, Any]):
        observation_space = gym.spaces.Box(-1, 1, (3,), np.float32)
        action_space = gym.spaces.Discrete(2)

        @functools.cached_property
        def reward(self) -> float:
            return worth(3) + worth("")

        @functools.lru_cache(maxsize=8)  # noqa: B019  # as PettingZoo's tutorial does
        def obs(self, size: int) -> Any:
            return load(size)

        def reset(self, **_: Any) -> Any:
            return self.obs(3), {"hits": type(self).obs.cache_info().hits, "size": type(self).obs.cache_info().maxsize}

        def step(self, action: Any) -> Any:
            return self.obs(3), self.reward, False, False, {}

    Cached().reset()
    with muster.make_vec(Cached, 2, num_workers=2) as envs:
        _, infos = envs.reset()
        assert (infos["hits"].tolist(), infos["size"].tolist()) == ([0, 0], [8, 8])
        assert envs.step(np.zeros(2, np.int64))[1].tolist() == [3.0, 3.0]


@functools.cache
def at_top_level() -> None: ...


def test_those_of_modules_travel_by_name() -> None:
    assert pickle.loads(attempt(at_top_level, silence_s=5.0).data or b"") is at_top_level


def test_a_cache_that_was_wrapped_again_is_refused_or_right() -> None:
    def plain(value: int) -> int:
        return value

    @functools.wraps(plain)
    @functools.cache
    def hundreds(value: int) -> int:
        return plain(value) + 100

    @functools.wraps(plain)
    def again(value: int) -> int:
        return hundreds(value)

    hundreds.__wrapped__ = plain  # type: ignore[method-assign]  # as functools.wraps leaves it
    outcome = attempt(again, silence_s=5.0)
    assert outcome.data is None or pickle.loads(outcome.data)(1) == 101


@pytest.mark.parametrize("context", ["fork", "forkserver"])
def test_what_calls_send_and_bring_back_may_hold_caches(context: str) -> None:
    @functools.cache
    def double(value: float) -> float:
        return 2 * value

    class Holder:
        @functools.cached_property
        def four(self) -> float:
            return double(2)

        def __call__(self, env: Any, index: int) -> Any:
            return self

    with muster.make_vec("CartPole-v1", 1, context=context) as envs:
        assert envs.call(lambda env, index: double(index + 3.0)) == (6.0,)
        assert envs.call(Holder())[0].four == 4.0


def holding_a_world() -> Any:
    world = Box2D.b2World()

    def make() -> Any:
        return world

    return make


@pytest.mark.parametrize(
    "hand_over",
    [
        lambda: muster.make_vec("CartPole-v1", 1, env_kwargs={"world": Box2D.b2World()}),
        lambda: muster.make_vec(holding_a_world(), 1),
    ],
)
def test_objects_whose_class_has_no_module_are_named(hand_over: Any) -> None:
    with pytest.raises(CannotTravel, match=r"world.*\.this: SwigPyObject: TypeError: cannot pickle"):
        hand_over()
    assert find_culprits({"world": Box2D.b2World()})[0].type == "SwigPyObject"
