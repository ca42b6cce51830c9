"""Envs that wait: a worker steps all its envs at the same time, with the rows that they have one after the other."""

from __future__ import annotations

import asyncio
import functools
import gc
import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from waiting_envs import Bound, Coroutines

import muster
from muster.errors import ConfigError, EnvError, RecipeError

WAYS: dict[str, dict[str, Any]] = {
    "workers": {"num_workers": 2},
    "concurrent": {"num_workers": 2, "concurrent": True},
    "thread": {"backend": "thread"},
    "concurrent thread": {"backend": "thread", "concurrent": True},
    "caller_steps": {"num_workers": 1, "caller_steps": True},
    "one each": {"one_env_per_process": True},
}


def make_coroutines(**options: Any) -> Coroutines:
    return Coroutines(**options)


def rows_of(env: Callable[..., Any], mode: str, num_envs: int = 3, **options: Any) -> list[Any]:
    with muster.make_vec(env, num_envs, env_kwargs={"length": 4}, autoreset_mode=mode, **options) as envs:
        rows: list[Any] = [envs.reset(seed=5)]
        rows += [envs.step(np.zeros(num_envs, int)) for _ in range(11)]
        envs.send([0, 0], env_ids=[2, 0])
        rows += [envs.recv(), envs.call("asked", 7)]
        return rows


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
@pytest.mark.parametrize("way", WAYS)
def test_rows_of_coroutine_envs_are_those_of_serial(way: str, mode: str, leaves_nothing: None) -> None:
    expected = rows_of(Coroutines, mode, backend="serial")
    assert repr(rows_of(Coroutines, mode, **WAYS[way])) == repr(expected)
    assert repr(rows_of(make_coroutines, mode, **WAYS[way])) == repr(expected)
    assert expected[-1] == ((7, 0), (7, 1), (7, 2))
    assert expected[1][4]["env"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
@pytest.mark.parametrize("way", ["concurrent", "concurrent thread"])
def test_an_env_has_one_thread_for_its_whole_life(way: str, mode: str, leaves_nothing: None) -> None:
    expected = rows_of(Bound, mode, backend="serial")
    assert repr(rows_of(Bound, mode, **WAYS[way])) == repr(expected)
    with muster.make_vec(Bound, 5, on_failure="restart", **WAYS[way]) as envs:
        envs.reset(seed=0)
        assert envs.step([0, 1, 0, 0, 0])[3].tolist() == [False, True, False, False, False]
        envs.step(np.zeros(5, int))
        assert envs.render() == (2, 0, 2, 2, 2)  # the new env's first step was its reset
        envs.set_attr("t", [10, 20, 30, 40, 50])
        assert envs.step(np.zeros(5, int))[1].tolist() == [11, 21, 31, 41, 51]


@pytest.mark.parametrize("env", [Coroutines, Bound])
def test_envs_wait_at_the_same_time(env: Any) -> None:
    with muster.make_vec(env, 40, env_kwargs={"wait_s": 0.2}, concurrent=True) as envs:
        envs.reset(seed=0)
        began = time.monotonic()
        for _ in range(3):
            envs.step(np.zeros(40, int))
        assert time.monotonic() - began < 4  # 24 s one after the other
        workers = envs.stats()["workers"]
        assert len(workers) <= len(muster.make_vec.__doc__ or "")  # never one for each env
        assert sum(one["in_step"] for one in workers) > 20


def test_a_class_of_coroutine_envs_shares_processes_and_a_factory_does_not() -> None:
    with muster.make_vec(Coroutines, 6) as envs:
        packed = envs.stats()["processes"]
    with muster.make_vec(make_coroutines, 6) as envs:
        assert packed < envs.stats()["processes"] == 6


def test_a_slow_env_keeps_no_other_one(leaves_nothing: None) -> None:
    with muster.make_vec(Coroutines, 8, num_workers=1) as envs:
        envs.reset(seed=0)
        envs.send([5] + [0] * 7)
        assert envs.recv(min_envs=7).env_ids.tolist() == [1, 2, 3, 4, 5, 6, 7]
        envs.send([0, 0], env_ids=[1, 2])
        assert envs.recv(min_envs=2).env_ids.tolist() == [1, 2]
        assert envs.recv().env_ids.tolist() == [0]


def test_serial_coroutine_envs_run_in_a_loop_of_the_callers() -> None:
    async def run() -> Any:
        with muster.make_vec(Coroutines, 2, backend="serial") as envs:
            return envs.reset(seed=0)[1]["env"].tolist()

    assert asyncio.run(run()) == [0, 1]


def test_some_envs_are_reset_while_others_step(leaves_nothing: None) -> None:
    with muster.make_vec(Coroutines, 4, num_workers=1, autoreset_mode="disabled", env_kwargs={"length": 1}) as envs:
        envs.reset(seed=0)
        envs.send([5, 0, 0, 0])
        ended = envs.recv(min_envs=3)
        assert ended.terminated.all()
        envs.send_reset([1, 2], seed=7)
        first = envs.recv(min_envs=2)
        assert first.env_ids.tolist() == [1, 2]
        assert first.obs[:, :2].tolist() == [[2, 0], [2, 0]]
        assert first.obs[0, 2] == np.random.default_rng(8).random()  # 7 + 1
        with pytest.raises(muster.errors.PendingError, match="env 0"):
            envs.send_reset([0])
        assert envs.recv().env_ids.tolist() == [0]
        envs.send_reset([3, 0], seed=[1, 2], options={})
        assert envs.recv().obs[:, 2].tolist() == [np.random.default_rng(seed).random() for seed in (2, 1)]


@pytest.mark.parametrize("options", [{"backend": "serial"}, {"num_workers": 1}], ids=["serial", "worker"])
def test_a_refused_reset_leaves_what_is_pending(options: dict[str, Any], leaves_nothing: None) -> None:
    with muster.make_vec(Coroutines, 3, autoreset_mode="disabled", **options) as envs:
        envs.reset(seed=0)
        envs.send([0, 0], env_ids=[0, 1])
        with pytest.raises(muster.errors.PendingError, match="env 1"):
            envs.send_reset([1, 2])
        assert envs.recv().rewards.tolist() == [1.0, 1.0]


class NoReset(Coroutines):
    def reset(self, **arguments: Any) -> Any:  # type: ignore[override]
        return self._reset(None)


class Generator(Coroutines):
    async def step(self, action: int) -> Any:  # type: ignore[override]
        yield


@pytest.mark.parametrize(("env", "words"), [(NoReset, "async def reset"), (Generator, "async generator")])
def test_half_a_coroutine_env_is_refused(env: Any, words: str, leaves_nothing: None) -> None:
    with pytest.raises((RecipeError, EnvError), match=words):
        muster.make_vec(env, 2)


@pytest.mark.parametrize("other", [{"one_env_per_process": True}, {"caller_steps": True}])
def test_concurrent_is_for_workers_with_several_envs(other: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="concurrent"):
        muster.make_vec("CartPole-v1", 2, concurrent=True, **other)


def test_serial_ordinary_envs_cannot_be_concurrent() -> None:
    with pytest.raises(ConfigError, match="concurrent"):
        muster.make_vec("CartPole-v1", 2, concurrent=True, backend="serial")


class Limited(Coroutines, gym.Env[Any, Any]):  # type: ignore[misc]
    pass


class Ours(gym.ObservationWrapper[Any, Any, Any]):
    """A wrapper of the user's that steps as Gymnasium's do."""

    def observation(self, obs: Any) -> Any:
        return obs


@pytest.mark.parametrize("wrapper", [functools.partial(gym.wrappers.TimeLimit, max_episode_steps=5), Ours])
def test_a_wrapper_that_does_not_await_is_named(wrapper: Any, leaves_nothing: None) -> None:
    name = "Ours" if wrapper is Ours else "TimeLimit"
    with pytest.raises(RecipeError, match=f"the wrapper {name} does not await"):
        muster.make_vec(lambda: wrapper(Limited()), 2, num_workers=1)


def test_torchrls_wrapper_does_not_await(leaves_nothing: None) -> None:
    pytest.importorskip("torchrl.envs")
    from torchrl.envs import GymWrapper

    from muster.interop.torchrl import ParallelEnv

    with pytest.raises(RecipeError, match="GymWrapper"):
        ParallelEnv(2, lambda: GymWrapper(Limited()))


def test_drop_ins_name_make_vec(leaves_nothing: None) -> None:
    from muster.interop.gymnasium import AsyncVectorEnv

    with pytest.raises(RecipeError, match="make_vec"):
        AsyncVectorEnv([Limited] * 2)


def test_an_env_of_gymnasium_is_looked_up_as_quickly_as_before() -> None:
    from muster.hosts.env_facts import facts_of

    env = gym.make("CartPole-v1")
    facts_of(env)
    # CPython looks attributes up more slowly once an object has a dict of its own, which `vars` makes: 9 % of a step.
    assert not any(type(one) is dict and "state" in one for one in gc.get_referents(env.unwrapped))
