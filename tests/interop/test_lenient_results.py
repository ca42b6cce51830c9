"""Rewards and flags that the originals make numbers and bools of, though they are none."""

from functools import partial

import gymnasium as gym
import numpy as np
import pytest

sb3 = pytest.importorskip("stable_baselines3")

from gymnasium.vector import SyncVectorEnv as TheirSyncVectorEnv  # noqa: E402
from stable_baselines3.common.vec_env import DummyVecEnv as TheirDummyVecEnv  # noqa: E402

import muster  # noqa: E402
from muster.errors import EnvError  # noqa: E402
from muster.interop.gymnasium import AsyncVectorEnv, SyncVectorEnv  # noqa: E402
from muster.interop.sb3 import DummyVecEnv, SubprocVecEnv  # noqa: E402

# Reward, terminated, truncated.
TOLD = {
    "array of a bool": (1.0, np.array([True]), False),
    "no terminated": (1.0, None, True),
    "array of truncated": (1.0, False, np.array([[1]])),
    "no truncated": (1.0, True, None),
    "no reward": (None, False, False),
    "reward in writing": ("2.5", False, False),
}


class Telling(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, told):
        self.told = told

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), *self.told, {}


def _stepped(vector_env):
    envs = vector_env([partial(Telling, told) for told in TOLD.values()])
    try:
        envs.reset()
        return [np.asarray(part) for part in envs.step(np.zeros(len(TOLD), int))[1:-1]]
    finally:
        envs.close()


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [(TheirSyncVectorEnv, SyncVectorEnv), (TheirSyncVectorEnv, partial(AsyncVectorEnv, context="fork"))]
    + [(TheirDummyVecEnv, DummyVecEnv), (TheirDummyVecEnv, partial(SubprocVecEnv, start_method="fork"))],
    ids=["SyncVectorEnv", "AsyncVectorEnv", "DummyVecEnv", "SubprocVecEnv"],
)
def test_drop_ins_take_what_the_originals_take(theirs, ours):
    for expected, got in zip(_stepped(theirs), _stepped(ours), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_make_vec_says_what_is_wrong_with_them():
    with muster.make_vec([partial(Telling, told) for told in TOLD.values()], backend="serial") as envs:
        envs.reset()
        for env in range(len(TOLD)):
            envs.send(np.zeros(1, int), [env])
            with pytest.raises(EnvError, match="must be a bool|must be one number"):
                envs.recv()
