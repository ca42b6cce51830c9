"""What is written instead, where an env or a vector env is of another kind."""

import pdb
import sys
import types

import gymnasium
import numpy as np
import pytest
from dropin_envs import Counter

import muster
from muster.errors import EnvError, SpecMismatch

sb3 = pytest.importorskip("stable_baselines3")

from gymnasium.vector import AsyncVectorEnv as TheirAsync  # noqa: E402
from stable_baselines3.common.vec_env import DummyVecEnv as TheirDummy  # noqa: E402

from muster.interop.gymnasium import AsyncVectorEnv, SyncVectorEnv  # noqa: E402
from muster.interop.sb3 import SubprocVecEnv, as_sb3  # noqa: E402


class Overridden(SyncVectorEnv):
    def step(self, actions):
        return super().step(actions)


@pytest.mark.parametrize(
    ("made", "instead"),
    [
        (lambda: TheirAsync([Counter]), r"SubprocVecEnv\(env_fns\)"),
        (lambda: SyncVectorEnv([Counter]), r"SubprocVecEnv\(env_fns\)"),
        (lambda: Overridden([Counter], autoreset_mode="SameStep"), r"SubprocVecEnv\(env_fns\)"),
        (lambda: TheirDummy([Counter]), "used as it is"),
        (lambda: gymnasium.make("CartPole-v1"), r"DummyVecEnv\(\[make_env\]\)"),
        (lambda: muster.make_vec("pettingzoo/mpe/simple_v3", 1, backend="serial"), "muster.Collector"),
        (lambda: "CartPole-v1", r"make_vec\(make_env, num_envs, autoreset_mode=\"same_step\"\)"),
    ],
)
def test_as_sb3_says_what_to_write_in_its_place(made, instead):
    envs = made()
    try:
        with pytest.raises((TypeError, ValueError), match=instead):
            as_sb3(envs)
    finally:
        getattr(envs, "close", bool)()


class Debugged(Counter):
    def step(self, action):
        breakpoint()
        return super().step(action)


@pytest.mark.parametrize(
    ("make", "works"),
    [
        (lambda: muster.make_vec(Debugged, 1, context="fork"), 'backend="serial"'),
        (lambda: AsyncVectorEnv([Debugged], context="fork"), "SyncVectorEnv"),
        (lambda: SubprocVecEnv([Debugged], start_method="fork"), "DummyVecEnv"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*from Worker-0", "ignore:.*Traceback", "ignore:.*the last exception")
def test_a_breakpoint_in_a_worker_says_where_it_works(make, works, monkeypatch):
    monkeypatch.setattr(sys, "breakpointhook", pdb.set_trace)  # pytest has one of its own
    envs = make()
    envs.reset()
    with pytest.raises(Exception, match="BdbQuit|A debugger") as raised:
        envs.step(np.zeros(1, int))
    envs.close()
    said = "\n".join([str(raised.value), *raised.value.__notes__])
    assert f"breakpoint() works with {works}." in said


@pytest.fixture
def gym(monkeypatch):
    """A stand-in for the package gym, of which two classes count."""
    module = types.ModuleType("gym")
    module.Env = type("Env", (), {"__module__": "gym.core", "close": lambda self: None})
    module.Box = type("Box", (), {"__module__": "gym.spaces.box"})
    return module


BOTH_WRAPPERS = r"GymV26CompatibilityV0\(env=env\).*shimmy.GymV21CompatibilityV0\(env=env\)"


@pytest.mark.parametrize(
    "make", [lambda env: muster.make_vec(env, 1, backend="serial"), lambda env: SyncVectorEnv([env])]
)
def test_an_env_of_gym_is_to_be_wrapped(gym, make):
    class Old(gym.Env):
        observation_space = action_space = gym.Box()

        def reset(self):
            return np.zeros(1, np.float32)

        def step(self, action):
            return np.zeros(1, np.float32), 0.0, False, {}

    with pytest.raises(SpecMismatch, match=BOTH_WRAPPERS):
        make(Old)

    class OldWithNewSpaces(Old):
        observation_space, action_space = Counter.observation_space, Counter.action_space

    envs = make(OldWithNewSpaces)
    with pytest.raises((EnvError, TypeError)) as raised:
        envs.reset()
    envs.close()
    assert "shimmy.GymV26CompatibilityV0(env=env)" in "\n".join([str(raised.value), *raised.value.__notes__])


def test_an_env_of_gymnasium_is_to_use_its_spaces(gym):
    class New(Counter):
        observation_space = gym.Box()

    with pytest.raises(SpecMismatch, match=r"comes from the package gym: use gymnasium\.spaces$"):
        muster.make_vec(New, 1, backend="serial")
