"""The facts that a worker sends about its envs, where an env holds what no other process can have."""

import threading
from functools import partial
from importlib import import_module
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import zmq
from gymnasium.utils import RecordConstructorArgs

import muster


class Served(gym.Env):
    """An env with an argument that cannot be pickled."""

    observation_space = gym.spaces.Box(0, 9, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, server):
        self.server = server

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {"kind": type(self.server).__name__}


@pytest.fixture
def served():
    gym.register("Served-v0", entry_point=Served)
    yield "Served-v0"
    del gym.registry["Served-v0"]


@pytest.mark.parametrize(("server", "kind"), [(zmq.Context, "Context"), (threading.Lock, "lock")])
def test_a_value_built_in_the_worker_that_no_spec_can_hold_is_no_reason_to_warn(served, server, kind, capfd):
    envs = muster.make_vec(served, 2, num_workers=1, env_kwargs={"server": muster.lazy(server)})
    assert envs.reset()[1]["kind"].tolist() == [kind] * 2
    envs.close()
    assert (envs.spec.id, envs.spec.kwargs) == (served, {})
    assert capfd.readouterr().err == ""


@pytest.fixture(autouse=True)
def registry():
    yield
    gym.registry.pop("Market-v0", None)


class Costly:
    """Notes each copy of itself in a file."""

    def __init__(self, notes: str):
        self.notes = Path(notes)

    def __deepcopy__(self, memo):
        with self.notes.open("a") as file:
            file.write("copied\n")
        return self


class Market(gym.Env):
    observation_space, action_space = Served.observation_space, Served.action_space

    def __init__(self, table, fee=0.1):
        self.table = table

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}


class Outer(gym.Wrapper):
    pass


class Recorded(gym.Wrapper, RecordConstructorArgs):
    def __init__(self, env, period, table=None):
        RecordConstructorArgs.__init__(self, period=period, table=table, _disable_deepcopy=True)
        super().__init__(env)


def market(make_table, entry_point=Market):
    table = make_table()
    gym.register("Market-v0", entry_point, max_episode_steps=9)
    return Outer(Recorded(Outer(gym.make("Market-v0", table=table, fee=0.2)), 3, table))


def drop_in(module, name, make):
    return getattr(import_module(f"muster.interop.{module}"), name)([make] * 2)


@pytest.mark.parametrize(
    "start",
    [
        lambda make: muster.make_vec(make, 2),
        lambda make: muster.make_vec(make, 2, num_workers=1, context="fork"),
        lambda make: muster.make_vec(make, 2, backend="serial"),
        pytest.param(lambda make: muster.make_vec(make, 2, backend="thread"), marks=pytest.mark.slow),
        pytest.param(partial(drop_in, "gymnasium", "AsyncVectorEnv"), marks=pytest.mark.slow),
        pytest.param(partial(drop_in, "gymnasium", "SyncVectorEnv"), marks=pytest.mark.slow),
        pytest.param(partial(drop_in, "sb3", "SubprocVecEnv"), marks=pytest.mark.slow),
        pytest.param(partial(drop_in, "sb3", "DummyVecEnv"), marks=pytest.mark.slow),
    ],
)
@pytest.mark.filterwarnings("ignore:.*Overriding environment Market-v0")
def test_nobody_copies_the_arguments_of_an_env(start, tmp_path):
    notes = tmp_path / "notes"
    envs = start(partial(market, partial(Costly, str(notes))))
    envs.reset()
    assert not notes.exists()
    if type(envs) is muster.VectorEnv:
        assert (envs.spec.id, envs.spec.kwargs, envs.spec.max_episode_steps) == ("Market-v0", {"fee": 0.2}, 9)
        wrappers = [(one.name, one.kwargs) for one in envs.spec.additional_wrappers]
        assert wrappers == [("Outer", None), ("Recorded", {"period": 3}), ("Outer", None)]
    get = envs.call if hasattr(envs, "call") else envs.get_attr
    assert [sorted(spec.kwargs) for spec in get("spec")] == [["fee", "table"]] * 2  # who asks has all of them
    assert notes.exists()
    envs.close()


@pytest.mark.parametrize("options", [{}, {"disable_env_checker": True}, {"max_episode_steps": 9}])
def test_the_spec_is_that_of_the_env(options):
    with muster.make_vec(partial(gym.make, "CartPole-v1", **options), 1, backend="serial") as envs:
        assert envs.spec == gym.make("CartPole-v1", **options).spec
