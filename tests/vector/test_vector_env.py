"""The vector env's contract, the same over all backends, start methods and autoreset modes."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.utils.env_checker import data_equivalence
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import muster
from muster.errors import (
    ActionError,
    CannotTravel,
    ClosedError,
    EnvError,
    NotPendingError,
    PendingError,
    SpecMismatch,
    UsageError,
    WaitTimeout,
)
from sample_envs import Counter, Everything, Infos, Returning

BACKENDS: dict[str, dict[str, Any]] = {
    "serial": {"backend": "serial"},
    "thread": {"backend": "thread", "num_workers": 2},
    "fork": {"context": "fork", "num_workers": 2},
    "forkserver": {"context": "forkserver", "num_workers": 2},
    "spawn": {"context": "spawn", "num_workers": 2},
    "caller_steps": {"context": "fork", "num_workers": 1, "caller_steps": True},
}
# Start methods differ in starting only; what comes after is tested on one of them.
QUICK = ("serial", "thread", "fork", "caller_steps")

MakeVec = Callable[..., muster.VectorEnv]


@pytest.fixture(params=QUICK)
def make(request: pytest.FixtureRequest) -> Iterator[MakeVec]:
    yield from _maker(BACKENDS[request.param])


@pytest.fixture(params=BACKENDS)
def make_everywhere(request: pytest.FixtureRequest) -> Iterator[MakeVec]:
    yield from _maker(BACKENDS[request.param])


def _maker(options: dict[str, Any]) -> Iterator[MakeVec]:
    made: list[muster.VectorEnv] = []

    def make(*args: Any, **kwargs: Any) -> muster.VectorEnv:
        made.append(muster.make_vec(*args, **{**options, **kwargs}))
        return made[-1]

    yield make
    for envs in made:
        envs.close()


def same_run(envs: Any, reference: Any, steps: int, seed: int = 3) -> None:
    """Asserts that two vector envs give identical rows for the same seeds and actions."""
    assert data_equivalence(envs.reset(seed=seed), reference.reset(seed=seed))
    envs.action_space.seed(seed)
    for t in range(steps):
        actions = envs.action_space.sample()
        for name, ours, theirs in zip(
            ("obs", "rewards", "terminated", "truncated", "infos"),
            envs.step(actions),
            reference.step(actions),
            strict=True,
        ):
            assert data_equivalence(ours, theirs), f"{name} differ at step {t}: {ours} and {theirs}"


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
@pytest.mark.parametrize("env_id", ["CartPole-v1", "HalfCheetah-v5", "Pendulum-v1"])
def test_rows_equal_gymnasiums_sync_vector_env(make: MakeVec, env_id: str, mode: str) -> None:
    kwargs = {"max_episode_steps": 30}
    reference = gym.make_vec(env_id, 3, "sync", vector_kwargs={"autoreset_mode": AutoresetMode[mode.upper()]}, **kwargs)
    same_run(make(env_id, 3, autoreset_mode=mode, env_kwargs=kwargs), reference, 100)


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_every_kind_of_space_survives_the_trip(make_everywhere: MakeVec, mode: str) -> None:
    envs = make_everywhere([Everything] * 3, autoreset_mode=mode)
    reference = gym.vector.SyncVectorEnv([Everything] * 3, autoreset_mode=AutoresetMode[mode.upper()])
    assert envs.observation_space == reference.observation_space
    assert envs.single_action_space == reference.single_action_space
    same_run(envs, reference, 20)


def _pong() -> gym.Env[Any, Any]:
    import ale_py

    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    return gym.make("ALE/Pong-v5", max_episode_steps=200)


REPRODUCIBLE: dict[str, Callable[[], gym.Env[Any, Any]]] = {
    "CartPole": functools.partial(gym.make, "CartPole-v1"),
    "HalfCheetah": functools.partial(gym.make, "HalfCheetah-v5", max_episode_steps=50),
    "Pong": _pong,
    "nested Dict": functools.partial(Everything, length=30),
}


def bit_identical_run(name: str, steps: int, **options: Any) -> None:
    """Asserts that 6 envs on worker processes give the rows that they give in this process."""
    recipes = [REPRODUCIBLE[name]] * 6
    with muster.make_vec(recipes, **options) as envs, muster.make_vec(recipes, backend="serial") as reference:
        same_run(envs, reference, steps)


@pytest.mark.parametrize(("context", "num_workers"), [("fork", 1), ("forkserver", 3)])
@pytest.mark.parametrize("name", REPRODUCIBLE)
def test_runs_are_bit_identical_whatever_steps_them(name: str, context: str, num_workers: int) -> None:
    bit_identical_run(name, 60, context=context, num_workers=num_workers)


@pytest.mark.slow
@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("context", ["fork", "forkserver", "spawn"])
@pytest.mark.parametrize("name", REPRODUCIBLE)
def test_long_runs_are_bit_identical(name: str, context: str, num_workers: int) -> None:
    bit_identical_run(name, 1000, context=context, num_workers=num_workers)


def test_same_step_keeps_the_final_obs_of_envs_that_reuse_their_buffer(make: MakeVec) -> None:
    envs = make([Counter] * 3, autoreset_mode="same_step")
    envs.reset(seed=10)
    for _ in range(3):
        envs.step(np.zeros(3, int))
    obs, rewards, terminated, _, infos = envs.step(np.zeros(3, int))
    assert terminated.all()
    assert rewards.tolist() == [4, 4, 4]
    assert obs.tolist() == [[10, 2, 0], [11, 2, 0], [12, 2, 0]]
    assert [final.tolist() for final in infos["final_obs"]] == [[10, 1, 4], [11, 1, 4], [12, 1, 4]]
    assert envs.episode_returns.tolist() == [10, 10, 10]
    assert envs.episode_lengths.tolist() == [4, 4, 4]


class ReusingAll(gym.Env[Any, Any]):
    """Reuses the objects, arrays and lists that it gives, in its reset too."""

    observation_space = spaces.Dict(x=spaces.Box(-9, 9, (1,)), graph=spaces.Graph(spaces.Box(-9, 9, (1,)), None))
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.nodes = np.zeros((2, 1), np.float32)
        self.large = np.zeros(100_000)  # has no place in the infos' rows
        self.trace: list[int] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.nodes[:] = self.large[:] = 0
        self.trace.clear()
        return self._obs(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.trace.append(len(self.trace) + 1)
        self.nodes[:] = self.large[:] = len(self.trace)
        return self._obs(), 0.0, len(self.trace) == 3, False, {"trace": self.trace, "large": self.large}

    def _obs(self) -> dict[str, Any]:
        return {"x": self.nodes[0], "graph": spaces.GraphInstance(self.nodes, None, None)}


def test_same_step_keeps_final_objects_that_the_reset_reuses(make: MakeVec) -> None:
    envs = make([ReusingAll] * 2, autoreset_mode="same_step")
    first = envs.reset()[0]
    actions = np.zeros(2, int)
    envs.step(actions)
    assert first["graph"][0].nodes.tolist() == [[0], [0]]
    envs.step(actions)
    infos = envs.step(actions)[4]
    assert infos["final_obs"][1]["graph"].nodes.tolist() == [[3], [3]]
    assert infos["final_info"]["trace"][1] == [1, 2, 3]
    assert infos["final_info"]["large"][1][0] == 3


class BusySimulator(Counter):
    """Its second reset raises."""

    resets = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.resets += 1
        if self.resets == 2:
            raise RuntimeError("busy")
        return super().reset(seed=seed, options=options)


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_an_autoreset_that_failed_is_tried_again(make: MakeVec, mode: str) -> None:
    envs = make([functools.partial(BusySimulator, length=1), functools.partial(Counter, length=9)], autoreset_mode=mode)
    envs.reset(seed=5)
    actions = np.zeros(2, int)
    if mode == "next_step":
        assert envs.step(actions)[2].tolist() == [True, False]
    with pytest.raises(EnvError, match="busy"):
        envs.step(actions)
    _, rewards, terminated, _, _ = envs.step(actions)
    assert (rewards[0], terminated[0]) == (0.0, False)


def test_next_step_resets_on_the_step_after_the_end(make: MakeVec) -> None:
    envs = make([functools.partial(Counter, length=1 + i) for i in range(2)])
    envs.reset(seed=5)
    actions = np.zeros(2, int)
    obs, _, terminated, _, _ = envs.step(actions)
    assert (terminated.tolist(), obs.tolist()) == ([True, False], [[5, 1, 1], [6, 1, 1]])
    obs, rewards, terminated, _, _ = envs.step(actions)
    assert (terminated.tolist(), obs.tolist()) == ([False, True], [[5, 2, 0], [6, 1, 2]])
    assert rewards.tolist() == [0, 2]


def test_disabled_refuses_to_step_an_ended_env_until_it_is_reset(make: MakeVec) -> None:
    envs = make([functools.partial(Counter, length=1 + i) for i in range(2)], autoreset_mode="disabled")
    envs.reset(seed=5)
    _, _, terminated, _, _ = envs.step(np.zeros(2, int))
    with pytest.raises(UsageError, match=r"env 0 has ended.*reset_mask"):
        envs.step(np.zeros(2, int))
    obs, _ = envs.reset(options={"reset_mask": terminated})
    assert obs.tolist() == [[5, 2, 0], [6, 1, 1]]
    obs, *_ = envs.step(np.zeros(2, int))
    assert obs.tolist() == [[5, 2, 1], [6, 1, 2]]


def test_copies_stay_and_views_follow(make: MakeVec) -> None:
    for copy in (True, False):
        envs = make([Counter] * 2, copy=copy)
        first, _ = envs.reset(seed=1)
        kept = first.copy()
        envs.step(np.zeros(2, int))
        assert (first == kept).all() == copy
        assert np.shares_memory(envs.step(np.zeros(2, int))[0], envs.step(np.zeros(2, int))[0]) != copy


def test_envs_own_their_actions_and_get_gymnasiums_types(make: MakeVec) -> None:
    envs = make([Counter] * 2)
    envs.reset()
    actions = np.array([1, 2])
    envs.step(actions)
    actions[:] = 0
    assert [type(one[0]) for one in envs.get_attr("actions")] == [np.int64, np.int64]
    assert envs.get_attr("actions") == ([1], [2])


def test_first_ready_envs_come_first(make: MakeVec) -> None:
    if make([Counter] * 4).stats()["workers"][0]["pid"] is None:
        pytest.skip("needs a stepping worker")
    envs = make([functools.partial(Counter, step_s=0.3 if i == 3 else 0.0) for i in range(4)])
    envs.reset(seed=0)
    envs.send(np.zeros(4, int))
    seen: list[int] = []
    while len(seen) < 4:
        batch = envs.recv(min_envs=1)
        assert batch.obs[:, 0].tolist() == batch.env_ids.tolist()
        assert (len(batch.rewards), len(batch.terminated), len(batch.truncated)) == (len(batch.env_ids),) * 3
        seen += batch.env_ids.tolist()
    assert sorted(seen) == [0, 1, 2, 3]
    with pytest.raises(NotPendingError, match="0 envs are pending"):
        envs.recv(min_envs=1)


def test_envs_can_be_sent_to_in_any_order(make: MakeVec) -> None:
    envs = make([Counter] * 4)
    envs.reset(seed=0)
    envs.send(np.array([1, 2]), [3, 0])
    with pytest.raises(PendingError, match="env 3 still owes"):
        envs.send(np.array([1]), [3])
    batch = envs.recv()
    assert batch.env_ids.tolist() == [0, 3]
    assert batch.obs.tolist() == [[0, 1, 1], [3, 1, 1]]
    assert envs.get_attr("actions") == ([2], [], [], [1])


def test_a_timeout_leaves_the_step_pending() -> None:
    with muster.make_vec([functools.partial(Counter, step_s=0.5)] * 2, num_workers=2, context="fork") as envs:
        envs.reset(seed=0)
        envs.step_async(np.zeros(2, int))
        with pytest.raises(WaitTimeout, match="stay pending"):
            envs.step_wait(timeout=0.05)
        with pytest.raises(PendingError):
            envs.step(np.zeros(2, int))
        obs, *_ = envs.step_wait()
        assert obs[:, 2].tolist() == [1, 1]


def test_calls_and_attributes_reach_every_env(make: MakeVec) -> None:
    envs = make([functools.partial(Counter, length=9)] * 3, env_kwargs=[{"render_mode": "ansi"}] * 3)
    envs.reset(seed=7)
    assert envs.render_mode == "ansi"
    assert envs.metadata["speed"] == 7
    assert envs.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
    assert envs.render() == ("7/0", "8/0", "9/0")
    assert envs.get_attr("length") == (9, 9, 9)
    envs.set_attr("length", [1, 2, 3])
    envs.set_attr("step_s", 0.0)
    assert envs.get_attr("length") == (1, 2, 3)
    with pytest.raises(EnvError, match=r"env 0 .*AttributeError"):
        envs.get_attr("no_such_thing")
    with pytest.raises(ValueError, match="expected 3 values"):
        envs.set_attr("length", [1])
    assert envs.step(np.zeros(3, int))[2].tolist() == [True, False, False]


def test_options_seeds_and_masks(make: MakeVec) -> None:
    envs = make([Counter] * 3)
    obs, infos = envs.reset(seed=[4, None, 6], options={"level": 2})
    assert obs[:, 0].tolist() == [4, -1, 6]
    assert infos["options"]["level"].tolist() == [2, 2, 2]
    mask = np.array([False, True, False])
    obs, _ = envs.reset(seed=20, options={"reset_mask": mask})
    assert obs.tolist() == [[4, 1, 0], [21, 2, 0], [6, 1, 0]]
    for wrong in ({"reset_mask": [True] * 3}, {"reset_mask": np.zeros(3, int)}):
        with pytest.raises(TypeError, match="reset_mask"):
            envs.reset(options=wrong)
    for mask in (np.zeros(3, bool), np.ones(2, bool)):
        with pytest.raises(ValueError, match="reset_mask"):
            envs.reset(options={"reset_mask": mask})
    for seed, error in ((1.5, UsageError), ([1, 2], ValueError), (-1, ValueError), (True, UsageError)):
        with pytest.raises(error):
            envs.reset(seed=seed)
    assert envs.reset(seed=1)[0][:, 0].tolist() == [1, 2, 3]


INFO_SCRIPTS = {
    "numbers": [{"a": 1, "b": 2.5, "c": True, "d": np.float32(3), "e": np.arange(3)}],
    "strings": [{"name": "x", "n": 1}],
    "nested": [{"deep": {"deeper": {"x": 1.5}, "y": 2}, "empty": {}}],
    "changing": [{}, {"a": 1}, {"b": "text"}, {"a": 2, "b": "more"}, {"c": None}],
    "many": [{f"key{i}": i} for i in range(100)],
    "big": [{"image": np.ones((100, 100)), "small": 1}],
    "odd": [{1: "one"}, {"array": np.array(["a", None])}],
}


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.longdouble])
def test_nan_is_found_in_every_float(dtype: type) -> None:
    factory = functools.partial(Constant, dtype, (0, np.nan))
    with (
        muster.make_vec(factory, 1, backend="serial", check_finite=True) as envs,
        pytest.raises(EnvError, match="NaN"),
    ):
        envs.reset()


def test_close_takes_gymnasiums_default_timeout(make: MakeVec) -> None:
    make([Counter] * 2).close(timeout=None)


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
@pytest.mark.parametrize("script", INFO_SCRIPTS)
def test_infos_arrive_in_gymnasiums_format(make: MakeVec, script: str, mode: str) -> None:
    def factory() -> gym.Env[Any, Any]:
        return Infos(INFO_SCRIPTS[script], length=5)

    reference = gym.vector.SyncVectorEnv([factory] * 3, autoreset_mode=AutoresetMode[mode.upper()])
    same_run(make([factory] * 3, autoreset_mode=mode), reference, 110 if script == "many" else 12)


def test_ints_too_big_for_a_column_arrive_as_objects(make: MakeVec) -> None:
    envs = make([functools.partial(Infos, [{"huge": 2**70}])] * 2)
    envs.reset()
    assert envs.step(np.zeros(2, int))[4]["huge"].tolist() == [2**70] * 2


def test_infos_of_some_envs_and_of_different_types(make: MakeVec) -> None:
    scripts: list[list[dict[str, Any]]] = [[{"v": 1}], [{"v": 2.7}], [{}], [{"v": np.int32(5), "w": "s"}]]
    envs = make([functools.partial(Infos, script) for script in scripts])
    envs.reset()
    infos = envs.step(np.zeros(4, int))[4]
    assert infos["v"].tolist() == [1.0, 2.7, 0.0, 5.0]
    assert infos["_v"].tolist() == [True, True, False, True]
    assert infos["w"].tolist() == [None, None, None, "s"]


def test_infos_with_shapes_or_kinds_that_differ_become_objects(make: MakeVec) -> None:
    scripts: list[list[dict[str, Any]]] = [[{}], [{"v": np.zeros(2)}], [{"v": np.zeros(3)}], [{"v": "text"}]]
    envs = make([functools.partial(Infos, script) for script in scripts])
    envs.reset()
    column = envs.step(np.zeros(4, int))[4]["v"]
    assert column[0] is None
    assert [len(value) for value in column[1:]] == [2, 3, 4]


def test_infos_that_are_dicts_in_some_envs_and_numbers_in_others_become_objects(make: MakeVec) -> None:
    scripts: list[list[dict[str, Any]]] = [[{"v": {"deep": 2}}], [{"v": 1}], [{"v": {"deep": 3}}]]
    envs = make([functools.partial(Infos, script) for script in scripts])
    envs.reset()
    assert envs.step(np.zeros(3, int))[4]["v"].tolist() == [{"deep": 2}, 1, {"deep": 3}]


def test_a_number_after_none_has_a_column_of_its_own(make: MakeVec) -> None:
    envs = make([functools.partial(Infos, [{"v": None}, {"v": 1.5}])] * 2)
    envs.reset()
    assert envs.step(np.zeros(2, int))[4]["v"].tolist() == [None, None]
    infos = envs.step(np.zeros(2, int))[4]
    assert infos["v"].dtype == np.float64
    assert infos["v"].tolist() == [1.5, 1.5]


class Named(Counter):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return super().reset(seed=seed, options=options)[0], {"names": np.array(["a", None], object)}


def test_a_partial_reset_spreads_arrays_of_objects(make: MakeVec) -> None:
    envs = make([Named] * 2)
    envs.reset()
    infos = envs.reset(options={"reset_mask": np.array([False, True])})[1]
    assert infos["names"].tolist() == [[None, None], ["a", None]]
    assert infos["_names"].tolist() == [False, True]


class Constant(gym.Env[Any, Any]):
    """Observes ``values`` in a dtype, for ever."""

    action_space = spaces.Discrete(2)

    def __init__(self, dtype: Any, values: tuple[float, ...]) -> None:
        self.observation_space = spaces.Box(-9, 9, (len(values),), np.dtype(dtype))
        self.obs = np.array(values, dtype)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return self.obs, {}


def test_foreign_byte_order_is_understood(make: MakeVec) -> None:
    factory = functools.partial(Constant, ">f4", (0.5, -1))
    assert make([factory] * 2).reset()[0].tolist() == [[0.5, -1], [0.5, -1]]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"obs": np.zeros(1, np.float32)}, r"observation has shape \(1,\), expected shape \(3,\) of float32"),
        ({"obs": np.zeros(3, np.complex64)}, "observation has dtype complex64"),
        ({"obs": "text"}, "observation is str 'text'"),
        ({"obs": {"a": 1}}, "observation is dict"),
        ({"reward": None}, "reward must be one number, got NoneType"),
        ({"reward": np.zeros(1)}, "reward must be one number, got numpy.ndarray"),
        ({"terminated": None}, "terminated must be a bool, got NoneType"),
        ({"terminated": "no"}, "terminated must be a bool, got str"),
    ],
)
def test_what_an_env_returns_is_checked(make: MakeVec, wrong: dict[str, Any], message: str) -> None:
    envs = make([Returning, functools.partial(Returning, **wrong)])
    envs.reset()
    envs.step(np.zeros(2, int))
    with pytest.raises(EnvError, match=message) as caught:
        envs.step(np.zeros(2, int))
    assert caught.value.env_index == 1
    assert caught.value.batch.env_ids.tolist() == [0]
    # In step again: the next call works.
    assert envs.step(np.zeros(2, int))[1].tolist() == [0, 0]
    assert len(envs.reset()[0]) == 2


def test_results_may_be_lists(make: MakeVec) -> None:
    class Lists(Counter):
        def reset(self, **given: Any) -> Any:
            return list(super().reset(**given))

        def step(self, action: Any) -> Any:
            return list(super().step(action))

    same_run(make([Lists] * 2), SyncVectorEnv([Counter] * 2), 6)


def test_an_info_that_holds_itself_is_an_error_and_no_crash(make: MakeVec) -> None:
    class Endless(Counter):
        def step(self, action: Any) -> Any:
            obs, *rest, info = super().step(action)
            info["itself"] = info
            return (obs, *rest, info)

    envs = make([Endless] * 2)
    envs.reset(seed=0)
    with pytest.raises(RecursionError):
        envs.step(np.zeros(2, int))


def test_every_env_is_told_its_index_whatever_is_done_with_it(make: MakeVec) -> None:
    class Knows(Counter):
        def _index(self) -> Any:
            info = muster.get_worker_info()
            assert info is not None
            return info.env_index

        def reset(self, **given: Any) -> Any:
            obs, _ = super().reset(**given)
            return obs, {"in_reset": self._index()}

        def step(self, action: Any) -> Any:
            return (*super().step(action)[:4], {"in_step": self._index()})

        def called(self) -> Any:
            return self._index()

    envs = make([Knows] * 3)
    assert envs.reset(seed=0)[1]["in_reset"].tolist() == [0, 1, 2]
    assert envs.step(np.zeros(3, int))[4]["in_step"].tolist() == [0, 1, 2]
    assert envs.call("called") == (0, 1, 2)
    assert muster.get_worker_info() is None


def test_a_vector_env_says_that_it_cannot_be_pickled(make: MakeVec) -> None:
    envs = make([Counter] * 2)
    for duplicate in (pickle.dumps, deepcopy):
        with pytest.raises(CannotTravel, match=r"call muster\.make_vec with the same arguments"):
            duplicate(envs)


def test_harmless_casts_are_made(make: MakeVec) -> None:
    for obs in ([1, 2, 3], np.arange(3), np.ones(3), np.ones(3, np.float16), (True, False, True)):
        envs = make([functools.partial(Returning, obs=obs)] * 2)
        envs.reset()
        envs.step(np.zeros(2, int))
        got = envs.step(np.zeros(2, int))[0]
        assert got.dtype == np.float32
        assert got[0].tolist() == list(obs)


def test_nan_is_refused_where_asked_for(make: MakeVec) -> None:
    nan = np.array([0, np.nan, 0], np.float32)
    for wrong, message in (({"obs": nan}, "NaN or infinity"), ({"reward": float("inf")}, "the reward is inf")):
        envs = make([functools.partial(Returning, **wrong)] * 2, check_finite=True)
        envs.reset()
        envs.step(np.zeros(2, int))
        with pytest.raises(EnvError, match=message):
            envs.step(np.zeros(2, int))


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        (np.zeros(2, int), "expected 3 actions, one for each env, got 2 rows"),
        (np.zeros((3, 1), int), r"expected shape \(3,\), got \(3, 1\)"),
        (np.zeros(3), "expected dtype int64, got float64"),
        (np.array([0, 3, 1]), "the action for env 1 is 3, expected 0 to 2"),
        (np.array([0, -1, 1]), "the action for env 1 is -1"),
        (None, "expected an array"),
        (1, "a single number"),
        ([0, "a", 1], "expected an array"),
    ],
)
def test_wrong_actions_are_refused_before_anything_is_sent(make: MakeVec, actions: Any, message: str) -> None:
    envs = make([Counter] * 3)
    envs.reset(seed=0)
    with pytest.raises(ActionError, match=message):
        envs.step(actions)
    for good in (np.zeros(3, np.int32), [0, 1, 2], np.array([0, 1, 2], np.uint8)):
        assert envs.step(good)[0].shape == (3, 3)


def test_calls_out_of_turn_are_refused_and_harmless(make: MakeVec) -> None:
    envs = make([Counter] * 2)
    with pytest.raises(UsageError, match=r"has not been reset; call reset\(\) first"):
        envs.step(np.zeros(2, int))
    envs.reset(seed=0)
    with pytest.raises(NotPendingError):
        envs.step_wait()
    envs.step_async(np.zeros(2, int))
    for call in (
        lambda: envs.step(np.zeros(2, int)),
        lambda: envs.step_async(np.zeros(2, int)),
        envs.reset,
        lambda: envs.get_attr("length"),
        lambda: envs.set_attr("length", 3),
    ):
        with pytest.raises(PendingError):
            call()
    with pytest.raises(NotPendingError, match="2 envs are pending; wait for 1 to 2 of the envs sent to"):
        envs.recv(min_envs=3)
    assert envs.step_wait()[0][:, 2].tolist() == [1, 1]
    assert not envs.closed
    envs.close()
    envs.close()
    assert envs.closed
    with pytest.raises(ClosedError):
        envs.step(np.zeros(2, int))
    with pytest.raises(ClosedError):
        envs.reset()


def test_an_error_says_where_and_keeps_the_original(make: MakeVec) -> None:
    class Failing(Counter):
        def step(self, action: Any) -> Any:
            if self.count == 2 and self.seed == 1:
                raise KeyError("lost it")
            return super().step(action)

    envs = make([Failing] * 2)
    envs.reset(seed=0)
    for _ in range(2):
        envs.step(np.zeros(2, int))
    with pytest.raises(EnvError, match=r"env 1 \(worker \d, step 2\): KeyError: 'lost it'") as caught:
        envs.step(np.zeros(2, int))
    assert isinstance(caught.value.__cause__, KeyError)
    assert "in step" in (caught.value.worker_traceback or "")
    assert (caught.value.env_index, caught.value.step, caught.value.original_type) == (1, 2, "KeyError")
    assert caught.value.batch.obs.tolist() == [[0, 1, 3]]
    assert envs.reset(seed=0)[0].tolist() == [[0, 2, 0], [1, 2, 0]]


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (spaces.Box(-1e9, 1e9, (4,), np.float64), r"env 1 differs from env 0 in observation: shape is \(4,\)"),
        (spaces.Box(-1e9, 1e9, (3,), np.float32), "dtype is float32, expected float64"),
        (spaces.Discrete(3), "type is Discrete, expected Box"),
        (spaces.Box(-1, 1, (3,), np.float64), 'observation_mode="different"'),
    ],
)
def test_envs_must_agree(make: MakeVec, second: Any, message: str) -> None:
    def other() -> gym.Env[Any, Any]:
        env = Counter()
        env.observation_space = second
        return env

    with pytest.raises(SpecMismatch, match=message):
        make([Counter, other])


def test_bounds_may_differ_where_asked_for(make: MakeVec) -> None:
    def other() -> gym.Env[Any, Any]:
        env = Counter()
        env.observation_space = spaces.Box(-5, 5, (3,), np.float64)
        return env

    envs = make([Counter, other], observation_mode="different")
    assert envs.observation_space.high[:, 0].tolist() == [1e9, 5]


def test_wrappers_are_applied_in_order(make: MakeVec) -> None:
    wrappers = (gym.wrappers.FlattenObservation, functools.partial(gym.wrappers.TimeLimit, max_episode_steps=2))
    envs = make("CartPole-v1", 2, wrappers=wrappers)
    envs.reset(seed=0)
    envs.step(np.zeros(2, int))
    assert envs.step(np.zeros(2, int))[3].tolist() == [True, True]


def test_record_video_films_the_envs(make: MakeVec, tmp_path: Path) -> None:
    pytest.importorskip("moviepy")
    envs: Any = make("CartPole-v1", 2, env_kwargs={"render_mode": "rgb_array"})
    folder = tmp_path / "films"
    envs = gym.wrappers.vector.RecordVideo(envs, str(folder), step_trigger=lambda step: step == 0, video_length=5)
    envs.reset(seed=1)
    for _ in range(8):
        envs.step(envs.action_space.sample())
    envs.close()
    assert [path.suffix for path in folder.iterdir()] == [".mp4"]


def test_gymnasiums_vector_wrappers_work(make: MakeVec) -> None:
    envs: Any = make("CartPole-v1", 3)
    envs = gym.wrappers.vector.RecordEpisodeStatistics(envs)
    envs = gym.wrappers.vector.NormalizeObservation(envs)
    envs = gym.wrappers.vector.ClipReward(envs, -1, 1)
    envs.reset(seed=1)
    envs.action_space.seed(1)
    episodes = []
    for _ in range(60):
        infos = envs.step(envs.action_space.sample())[4]
        if "episode" in infos:
            episodes += infos["episode"]["l"][infos["_episode"]].tolist()
    assert len(episodes) >= 3
    assert min(episodes) > 5


def test_two_vector_envs_live_side_by_side(make: MakeVec) -> None:
    train, evaluate = make([Counter] * 2), make([Counter] * 2)
    train.reset(seed=0)
    evaluate.reset(seed=50)
    train.step(np.zeros(2, int))
    train.close()
    assert evaluate.step(np.zeros(2, int))[0].tolist() == [[50, 1, 1], [51, 1, 1]]


def test_stats_tell_where_the_time_went(make: MakeVec) -> None:
    envs = make([functools.partial(Counter, step_s=0.001)] * 4, copy=False)
    envs.reset()
    for _ in range(20):
        envs.step(np.zeros(4, int))
    stats = envs.stats()
    assert stats["env_steps"] + sum(worker["resets"] for worker in stats["workers"]) == 84
    assert not envs.copy
    for worker in stats["workers"]:
        assert worker["stepping"] + worker["waiting"] + worker["copying"] == pytest.approx(1)
        assert worker["memory_bytes"] > 0
        assert worker["fds"] > 0


def test_use_in_a_second_thread_is_a_named_error() -> None:
    import threading

    with muster.make_vec([functools.partial(Counter, step_s=0.3)], context="fork") as envs:
        envs.reset()
        thread = threading.Thread(target=envs.step, args=(np.zeros(1, int),))
        thread.start()
        with pytest.raises((UsageError, PendingError), match="another thread|still owe"):
            for _ in range(1000):
                envs.step(np.zeros(1, int))
        thread.join()


def test_infos_of_some_envs_are_not_taken_for_those_of_all(make: MakeVec) -> None:
    scripts: list[list[dict[str, Any]]] = [[{"v": 1}], [{}], [{}]]
    envs = make([functools.partial(Infos, script) for script in scripts])
    envs.reset()
    envs.send(np.zeros(1, int), [0])
    assert envs.recv().infos["v"].tolist() == [1]
    assert envs.step(np.zeros(3, int))[4]["_v"].tolist() == [True, False, False]
