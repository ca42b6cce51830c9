"""Gymnasium's `make_vec` with Muster's classes: the same calls, the same observations, specs and errors."""

import inspect
import threading

import gymnasium as gym
import numpy as np
import pytest
import zmq
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector.async_vector_env import AsyncVectorEnv as TheirAsyncVectorEnv
from gymnasium.vector.async_vector_env import _async_worker
from gymnasium.wrappers import ClipReward, TimeAwareObservation

import muster
from muster.errors import CannotTravel
from muster.interop.gymnasium import AsyncVectorEnv, SyncVectorEnv, make_vec
from slow import slow

ASYNC = {"vectorization_mode": "async", "vector_kwargs": {"num_workers": 2}}
SYNC = {"vectorization_mode": "sync"}


class Served(gym.Env):
    """An env with an argument that cannot be pickled."""

    observation_space = gym.spaces.Box(0, 9, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, server, options=None):
        self.kinds = [type(one).__name__ for one in (server, *(options or {}).values())]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {"kinds": " ".join(self.kinds)}

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, False, False, {}


@pytest.fixture
def served():
    gym.register("Served-v0", entry_point=Served)
    yield "Served-v0"
    del gym.registry["Served-v0"]


def steps(envs, count=30):
    """The observations, rewards and ends of some steps, after a reset with a seed."""
    envs.action_space.seed(0)
    rows = [envs.reset(seed=3)[0]]
    for _ in range(count):
        rows += envs.step(envs.action_space.sample())[:4]
    envs.close()
    return rows


def test_the_signature_is_gymnasiums():
    ours, theirs = (inspect.signature(one).parameters.values() for one in (make_vec, gym.make_vec))
    assert [(one.name, one.kind, one.default) for one in ours] == [(one.name, one.kind, one.default) for one in theirs]


@pytest.mark.parametrize(
    ("mode", "kind"), [(SYNC, SyncVectorEnv), pytest.param(ASYNC, AsyncVectorEnv, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("env_id", "options"),
    [
        ("Pendulum-v1", {"wrappers": [TimeAwareObservation, lambda env: ClipReward(env, -1, 1)], "g": 5.0}),
        ("CartPole-v1", {"max_episode_steps": 7, "sutton_barto_reward": True}),
        (gym.spec("FrozenLake-v1"), {"is_slippery": False}),
    ],
)
def test_envs_step_as_gymnasiums(mode, kind, env_id, options):
    envs = make_vec(env_id, 3, **mode, **options)
    assert isinstance(envs, kind)
    theirs = gym.make_vec(env_id, 3, vectorization_mode="sync", **options)
    assert envs.spec.kwargs == {**theirs.spec.kwargs, **mode}
    for ours, expected in zip(steps(envs), steps(theirs), strict=True):
        np.testing.assert_array_equal(ours, expected)


def test_without_a_mode_it_is_the_specs_own_vector_env_or_sync():
    for env_id, kind in (("CartPole-v1", CartPoleVectorEnv), ("Pendulum-v1", SyncVectorEnv)):
        envs = make_vec(env_id, 2)
        assert type(envs) is kind
        envs.close()


@pytest.mark.parametrize("mode", [ASYNC, *slow(SYNC)])
def test_the_spec_makes_the_same_again(mode):
    first = make_vec("CartPole-v1", 3, **mode, wrappers=[TimeAwareObservation], sutton_barto_reward=True)
    second = make_vec(first.spec, num_envs=9)
    assert second.spec == first.spec
    third = muster.make_vec(first.spec, num_workers=2)
    rows = [steps(envs) for envs in (first, second, third)]
    for others in rows[1:]:
        for ours, expected in zip(others, rows[0], strict=True):
            np.testing.assert_array_equal(ours, expected)


@pytest.mark.parametrize("mode", [ASYNC, *slow(SYNC)])
def test_lazy_arguments_are_built_where_the_env_is(served, mode):
    options = {"lock": muster.lazy(threading.Lock)}
    envs = make_vec(served, 2, **mode, server=muster.lazy(zmq.Context), options=options)
    again = make_vec(envs.spec)
    for one in (envs, again):
        assert one.reset()[1]["kinds"].tolist() == ["Context lock"] * 2
        one.close()


def test_a_custom_worker_runs_on_gymnasiums_own_class(served):
    vector_kwargs = {"worker": _async_worker, "context": "fork"}
    envs = make_vec(served, 2, "async", vector_kwargs, server=muster.lazy(zmq.Context))
    assert type(envs) is TheirAsyncVectorEnv
    assert envs.spec.kwargs["vector_kwargs"] == vector_kwargs
    assert envs.reset()[1]["kinds"].tolist() == ["Context"] * 2
    envs.close()


def test_an_argument_that_cannot_travel_is_named_as_the_call_names_it(served):
    with pytest.raises(CannotTravel, match=r'^options\["lock"\] cannot be sent to a worker'):
        make_vec(served, 2, **ASYNC, server=None, options={"lock": threading.Lock()})
    lock = threading.Lock()
    with pytest.raises(CannotTravel, match=r"^wrappers\[0\] cannot be sent to a worker"):
        make_vec(served, 2, **ASYNC, server=None, wrappers=[lambda env: (env, lock)[0]])


@pytest.mark.parametrize(
    ("target", "options"),
    [
        ("CartPol-v1", {}),
        (3, {}),
        ("Pendulum-v1", {"vectorization_mode": "vector_entry_point"}),
        ("CartPole-v1", {"vectorization_mode": "parallel"}),
        ("CartPole-v1", {"vector_kwargs": {"copy": False}}),
        ("CartPole-v1", {"wrappers": [TimeAwareObservation]}),
        ("CartPole-v1", {**SYNC, "nothing": 3}),
    ],
)
def test_what_gymnasium_refuses_is_refused_in_its_words(target, options):
    with pytest.raises(Exception) as expected:  # whatever Gymnasium raises
        gym.make_vec(target, **options)
    with pytest.raises(type(expected.value)) as refusal:
        make_vec(target, **options)
    assert type(refusal.value) is type(expected.value)
    assert str(refusal.value) == str(expected.value)
