"""`muster.lazy` in everything that a drop-in passes on to envs and wrappers, also where another library builds them."""

from __future__ import annotations

import functools
import logging
import secrets
import threading

import gymnasium as gym
import numpy as np
import pytest
import stable_baselines3.common.vec_env as sb3s
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector.async_vector_env import _async_worker
from stable_baselines3.common.monitor import Monitor

import muster
from muster.errors import NotBuilt
from muster.interop.gymnasium import AsyncVectorEnv, SyncVectorEnv, make_vec
from muster.interop.sb3 import DummyVecEnv, SubprocVecEnv, make_vec_env
from muster.pool.unique_indices import TREE

LOCK = type(threading.Lock())


class Guarded(gym.Env):
    """Observes the env index that its `port` was built with, plus the entries of `options`."""

    observation_space = gym.spaces.Box(-1, 1e9, (2,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, lock=None, port=0, options=None, make=None):
        self.lock, self.port = lock, port
        self.sum = sum(options["numbers"]) if options else 0
        if make is not None:
            self.sum += make()

    def reset(self, *, seed=None, options=None):
        with self.lock:
            return np.array([self.port, self.sum], np.float64), {}

    def step(self, action):
        return np.array([self.port, self.sum], np.float64), 0.0, True, False, {}


class Noting(gym.Wrapper):
    """Keeps `log` open while its env lives."""

    def __init__(self, env, log, lock=None):
        super().__init__(env)
        self.log = log
        self.level = 0
        assert lock is None or type(lock) is LOCK

    def reset(self, **arguments):
        self.log.write("reset")
        return super().reset(**arguments)


class Log:
    def __init__(self, path):
        self.path = f"{path}{muster.get_worker_info().env_index}"

    def write(self, word):
        with open(self.path, "a") as file:
            file.write(f"{word} ")

    def close(self):
        self.write("closed")


def port():
    return 5000 + muster.get_worker_info().env_index


def arguments():
    numbers = {"numbers": [1, muster.lazy(int, "2"), (muster.lazy(int, "3"),)[0]]}
    make = functools.partial(max, [1, muster.lazy(int, "4")])
    return {"lock": muster.lazy(threading.Lock), "port": muster.lazy(port), "options": numbers, "make": make}


EXPECTED = [[5000.0, 10.0], [5001.0, 10.0]]
CLASSES = [DummyVecEnv, SubprocVecEnv, sb3s.DummyVecEnv, pytest.param(sb3s.SubprocVecEnv, marks=pytest.mark.slow)]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: f"{cls.__module__.partition('.')[0]}-{cls.__name__}")
def test_make_vec_env_builds_them_in_every_class(cls, tmp_path):
    envs = make_vec_env(
        Guarded,
        2,
        env_kwargs=arguments(),
        wrapper_class=Noting,
        wrapper_kwargs={"log": muster.lazy(Log, str(tmp_path / "log")), "lock": muster.lazy(threading.Lock)},
        monitor_kwargs={"info_keywords": muster.lazy(tuple)},
        vec_env_cls=cls,
        vec_env_kwargs={} if "Dummy" in cls.__name__ else {"start_method": "fork"},
    )
    assert envs.reset().tolist() == EXPECTED
    assert all(envs.env_is_wrapped(Monitor))
    envs.set_attr("level", 3)
    assert envs.get_attr("level") == [3, 3]
    envs.close()
    assert [(tmp_path / f"log{i}").read_text() for i in range(2)] == ["reset closed "] * 2


@pytest.mark.parametrize("cls", [SyncVectorEnv, pytest.param(AsyncVectorEnv, marks=pytest.mark.slow)])
def test_a_list_of_partials_for_gymnasium(cls):
    envs = cls([functools.partial(Guarded, **arguments()) for _ in range(2)])
    assert envs.reset()[0].tolist() == EXPECTED
    envs.close()


def test_wrappers_and_specs_of_make_vec(tmp_path):
    gym.register("Guarded-v0", entry_point=Guarded, kwargs=arguments())
    try:
        spec = gym.spec("Guarded-v0")
        wrapper = functools.partial(Noting, log=muster.lazy(Log, str(tmp_path / "log")))
        with muster.make_vec(spec, 2, backend="serial", wrappers=[wrapper]) as envs:
            assert envs.reset()[0].tolist() == EXPECTED
    finally:
        del gym.registry["Guarded-v0"]
    assert (tmp_path / "log1").read_text() == "reset closed "


class Options:
    def __init__(self, lock):
        self.lock = lock


def test_one_that_arrives_in_an_object_says_so_where_it_is_used(caplog):
    options = Options(muster.lazy(threading.Lock))
    envs = DummyVecEnv([lambda: Guarded(lock=options.lock)])
    with pytest.raises(NotBuilt, match=r"muster\.lazy\(allocate_lock\) has not been built.*closure"):
        envs.reset()
    envs.close()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_functions_for_other_vector_envs_know_a_number_that_no_other_env_has(monkeypatch):
    monkeypatch.setenv(TREE, str(secrets.randbits(40)))
    kwargs = arguments() | {"port": muster.lazy(lambda: muster.get_worker_info().unique_index)}
    spec = EnvSpec("Guarded-v1", Guarded, kwargs=kwargs, disable_env_checker=True, order_enforce=False)
    with muster.make_vec("CartPole-v1", 1, backend="serial"):
        envs = make_vec(spec, 2, vectorization_mode="async", vector_kwargs={"worker": _async_worker})
        assert sorted(envs.get_attr("port")) == [1, 2]
        envs.close()
