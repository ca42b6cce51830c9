"""One process for each env, in every front end: envs that cannot share one are what they are in the originals."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import muster
from muster.interop.gymnasium import AsyncVectorEnv
from muster.vector import side_by_side
from one_instance import ClassVariable, GlobalGenerator, Listening, Simulator, compile_library
from slow import slow

KINDS: dict[str, type[gym.Env[Any, Any]]] = {
    "refuses": Simulator,
    "crashes": Simulator,
    "shares": Simulator,
    "class variable": ClassVariable,
    "global generator": GlobalGenerator,
}
ACTIONS = np.array([0, 1, 2, 1, 2])
NUM_ENVS = len(ACTIONS)
ROWS = 3

# What plays an env function's envs: their observations [T, N], and the processes that stepped them.
Played = tuple[list[list[float]], set[int]]


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("simulators")
    return {kind: str(compile_library(folder, kind)) if KINDS[kind] is Simulator else "" for kind in KINDS}


def played_alone(kind: str) -> list[list[float]]:
    """The observations that each env gives in a process of its own."""
    if kind != "global generator":
        return [(ACTIONS * row).astype(float).tolist() for row in range(1, ROWS + 1)]
    draws = np.random.RandomState(3).rand(ROWS)
    return [(ACTIONS * draw).tolist() for draw in draws]


def stepped(envs: Any) -> Played:
    with contextlib.closing(envs):
        envs.reset(seed=0)
        rows = [envs.step(ACTIONS)[0][:, 0].tolist() for _ in range(ROWS)]
        return rows, {worker["pid"] for worker in envs.stats()["workers"]}


def with_make_vec(env: Any, context: str, **options: Any) -> Played:
    return stepped(muster.make_vec(env, NUM_ENVS, context=context, **options))


def with_async(env: Any, context: str) -> Played:
    return stepped(AsyncVectorEnv([_factory(env)] * NUM_ENVS, context=context))


def with_subproc(env: Any, context: str) -> Played:
    sb3 = pytest.importorskip("muster.interop.sb3", exc_type=ImportError)
    return _stepped_by_sb3(sb3.SubprocVecEnv([_factory(env)] * NUM_ENVS, start_method=context))


def with_make_vec_env(env: Any, context: str) -> Played:
    sb3 = pytest.importorskip("muster.interop.sb3", exc_type=ImportError)
    options = {"vec_env_cls": sb3.SubprocVecEnv, "vec_env_kwargs": {"start_method": context}}
    return _stepped_by_sb3(sb3.make_vec_env(env, NUM_ENVS, seed=0, **options))


def with_parallel_env(env: Any, context: str) -> Played:
    torchrl = pytest.importorskip("muster.interop.torchrl", exc_type=ImportError)
    import torch

    envs = torchrl.ParallelEnv(NUM_ENVS, _factory(env), mp_start_method=context)
    try:
        td = envs.reset()
        rows = []
        for _ in range(ROWS):
            td["action"] = torch.nn.functional.one_hot(torch.from_numpy(ACTIONS), 3)
            td = envs.step(td)["next"]
            rows.append(td["observation"][:, 0].tolist())
        return rows, {worker["pid"] for worker in envs.vector_env.stats()["workers"]}
    finally:
        envs.close()


def _stepped_by_sb3(envs: Any) -> Played:
    try:
        envs.reset()
        rows = [envs.step(ACTIONS)[0][:, 0].tolist() for _ in range(ROWS)]
        return rows, {worker["pid"] for worker in envs.vector_env.stats()["workers"]}
    finally:
        envs.close()


def _factory(env: Any) -> Callable[[], Any]:
    return functools.partial(gym.make, env, disable_env_checker=True) if isinstance(env, str) else env


FRONT_ENDS = {
    "make_vec": with_make_vec,
    "make_vec, caller_steps": functools.partial(with_make_vec, caller_steps=True),
    "AsyncVectorEnv": with_async,
    "SubprocVecEnv": with_subproc,
    "make_vec_env": with_make_vec_env,
    "ParallelEnv": with_parallel_env,
}
EACH_APART = [name for name in FRONT_ENDS if name != "make_vec, caller_steps"]


@pytest.fixture
def registered(libraries: dict[str, str]) -> Iterator[Callable[[str], str]]:
    """Registers an env of a kind, and returns its id."""
    ids = []

    def register(kind: str) -> str:
        ids.append(f"theirs/{kind.title().replace(' ', '')}-v0")
        gym.register(ids[-1], entry_point=KINDS[kind], kwargs={"library": libraries[kind]})
        return ids[-1]

    yield register
    for one in ids:
        del gym.registry[one]


def check(front_end: str, env: Any, kind: str, context: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*fork.*", DeprecationWarning)
        rows, pids = FRONT_ENDS[front_end](env, context)
    assert np.allclose(rows, played_alone(kind), rtol=1e-6)
    assert len(pids) == NUM_ENVS


def each_once(*kinds: str) -> list[Any]:
    """Front ends with kinds of envs; fast are the first front end with each kind, and each other one with the last."""
    return [
        pytest.param(name, kind, marks=() if name == EACH_APART[0] or kind == kinds[-1] else pytest.mark.slow)
        for name in EACH_APART
        for kind in kinds
    ]


@pytest.mark.parametrize(("front_end", "kind"), each_once(*KINDS))
def test_each_env_has_a_process_of_its_own(front_end, kind, libraries):
    # A drop-in's fresh process would import SB3, or TorchRL, for seconds.
    context = "forkserver" if front_end == "make_vec" else "fork"
    check(front_end, functools.partial(KINDS[kind], libraries[kind]), kind, context)


def test_so_has_each_env_of_an_id_of_somebody_else(libraries):
    gym.register("theirs/Shares-v0", entry_point=Simulator, kwargs={"library": libraries["shares"]})
    try:
        check("make_vec", "theirs/Shares-v0", "shares", "forkserver")
    finally:
        del gym.registry["theirs/Shares-v0"]


def test_the_caller_is_one_of_the_processes():
    check("make_vec, caller_steps", ClassVariable, "class variable", "forkserver")


@pytest.mark.parametrize("kind", ["crashes", "global generator", *slow("refuses")])
def test_auto_does_not_pack_them(kind, libraries, capfd):
    env = functools.partial(KINDS[kind], libraries[kind])
    with muster.make_vec(env, NUM_ENVS, num_workers="auto") as envs:
        assert len(envs.stats()["workers"]) == NUM_ENVS
    assert f"{NUM_ENVS} envs of " in capfd.readouterr().err


class Harmless(ClassVariable):
    """A class of its own, in which nothing is shared."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.own = 0.0
        return np.zeros(1), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.own += float(action)
        return np.array([self.own]), 0.0, False, False, {}


class CountsInInfos(Harmless):
    """Shows the state of its class in infos alone, beside a time, which differs from run to run."""

    count = 0

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        CountsInInfos.count += 1
        info = {"at": time.perf_counter(), "of the class": {"count": CountsInInfos.count}}
        return *super().step(action)[:4], info


def harmless_too() -> Any:
    return Harmless()


LISTS: dict[str, tuple[list[Any], bool]] = {
    "two kinds": ([Harmless, Harmless, harmless_too, harmless_too], True),
    "harmless ones first": ([Harmless, Harmless, ClassVariable, ClassVariable], False),
    "more kinds than are tried": ([type(f"Own{i}", (Harmless,), {}) for i in range(4)], False),
}


@pytest.mark.parametrize(("fns", "packs"), LISTS.values(), ids=LISTS)
def test_auto_tries_every_kind_of_env_in_a_list(fns, packs):
    with muster.make_vec(fns, num_workers="auto") as envs:
        assert len(envs.stats()["workers"]) == (len(os.sched_getaffinity(0)) if packs else 4)


def test_auto_does_not_pack_envs_that_differ_in_infos_alone(capfd):
    with muster.make_vec(CountsInInfos, 3, num_workers="auto") as envs:
        assert envs.stats()["processes"] == 3
    assert "infos['of the class']['count'] changes when another env is stepped" in capfd.readouterr().err


class Drawing(Harmless):
    """Draws from a generator that nobody seeds."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.random.default_rng().random(1), *super().step(action)[1:]


class Waiting(Harmless):
    """The second one in a process waits for ever."""

    built = 0

    def __init__(self) -> None:
        Waiting.built += 1
        while Waiting.built > 1:
            threading.Event().wait()


def test_auto_tells_envs_that_do_not_repeat_themselves_from_those_that_disturb_each_other(capfd):
    with muster.make_vec(Drawing, 3, num_workers="auto") as envs:
        assert envs.stats()["processes"] == 3
    said = capfd.readouterr().err
    assert "not known: alone, too, its trajectory differs from run to run" in said
    assert "disturb" not in said


def test_auto_gives_up_where_two_take_three_times_as_long_as_one(capfd, monkeypatch):
    monkeypatch.setattr(side_by_side, "LEAST_S", 0.1)
    with muster.make_vec(Waiting, 3, num_workers="auto") as envs:
        assert envs.stats()["processes"] == 3
    assert re.search(r"not known: building a second .*, it took over \S+ s, 3 times", capfd.readouterr().err)


def test_an_env_with_an_address_of_its_own_meets_itself_in_no_trial():
    env_kwargs = {"address": f"muster-test-{os.getpid()}-"}
    with muster.make_vec(Listening, 4, env_kwargs=env_kwargs, num_workers="auto") as envs:
        assert len(envs.stats()["workers"]) == len(os.sched_getaffinity(0))


def cart_pole() -> Any:
    return gym.wrappers.RecordEpisodeStatistics(gym.make("CartPole-v1"))  # whose infos hold times


def test_auto_packs_envs_that_share_nothing():
    with muster.make_vec(cart_pole, NUM_ENVS, num_workers="auto") as envs:
        assert len(envs.stats()["workers"]) == len(os.sched_getaffinity(0))


def test_auto_is_said_once(capfd):
    for _ in range(2):
        AsyncVectorEnv([ClassVariable] * 2, num_workers="auto").close()
    assert capfd.readouterr().err.count("2 envs of one_instance.ClassVariable in 2 processes") == 1


def test_ids_of_known_libraries_pack_as_they_did():
    with muster.make_vec("CartPole-v1", NUM_ENVS, wrappers=[gym.wrappers.RecordEpisodeStatistics]) as envs:
        assert len(envs.stats()["workers"]) == len(os.sched_getaffinity(0))
    for wrapper in (_own_wrapper, functools.wraps(gym.wrappers.TimeLimit)(lambda env: _own_wrapper(env))):
        with muster.make_vec("CartPole-v1", 3, wrappers=[wrapper]) as envs:
            assert len(envs.stats()["workers"]) == 3


def _own_wrapper(env: Any) -> Any:
    return gym.wrappers.TimeLimit(env, 10)


def test_many_processes_say_that_envs_may_share_them(monkeypatch, capfd):
    monkeypatch.setattr("muster.vector.make.usable_cores", lambda: 1)
    with muster.make_vec(ClassVariable, 9) as envs:
        assert len(envs.stats()["workers"]) == 9
    said = capfd.readouterr().err
    assert "9 processes start on 1 core" in said
    assert "may share processes" in said
