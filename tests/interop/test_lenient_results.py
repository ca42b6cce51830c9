"""Rewards and flags that the originals make numbers and bools of, though they are none."""

from functools import partial

import gymnasium as gym
import numpy as np
import pytest

sb3 = pytest.importorskip("stable_baselines3")

import torch  # noqa: E402
from gymnasium.utils.env_checker import data_equivalence  # noqa: E402
from gymnasium.vector import AsyncVectorEnv as TheirAsyncVectorEnv  # noqa: E402
from gymnasium.vector import AutoresetMode  # noqa: E402
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


class Several(Telling):
    """A reward of several numbers: per objective, or per agent. Env i's episodes have i + 2 steps, or two."""

    observation_space = gym.spaces.Box(-1, 1, (1,), np.float64)

    def __init__(self, told, length=2):
        super().__init__(told)
        self.length = length

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return np.zeros(1), {"begins": 1}

    def step(self, action):
        self.steps += 1
        return np.ones(1), self.told(self.steps), False, self.steps == self.length, {"steps": self.steps}


def played(cls, told, mode, lengths=(2, 2)):
    """All that four steps give, or the error and what the step after it gives."""
    envs, rows = cls([partial(Several, told, one) for one in lengths], context="fork", autoreset_mode=mode), []
    try:
        envs.reset(seed=0)
        for _ in range(4):
            try:
                rows.append(envs.step(np.zeros(2, int)))
            except ValueError as error:
                rows.append(str(error))
                continue
            _, _, terminated, truncated, _ = rows[-1]
            if mode is AutoresetMode.DISABLED and truncated.any():
                envs.reset(options={"reset_mask": terminated | truncated})
    finally:
        envs.close()
    return rows


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize(
    "told",
    [
        lambda t: np.array([t, 0.5], np.float32),
        lambda t: [t, -t],
        lambda t: np.full((2, 1), t),
        lambda t: torch.tensor([float(t)]),
    ],
    ids=["array", "list", "matrix", "tensor"],
)
def test_rewards_of_several_numbers_are_gymnasiums(told, mode):
    theirs, ours = played(TheirAsyncVectorEnv, told, mode), played(AsyncVectorEnv, told, mode)
    assert data_equivalence(ours, theirs)
    assert ours[0][1].shape == (2, *np.shape(told(1)))


def test_where_only_one_env_begins_anew_they_are_an_error_as_there():
    told = lambda t: np.array([t, 0.5])  # noqa: E731
    theirs, ours = (played(cls, told, AutoresetMode.NEXT_STEP, (2, 3)) for cls in (TheirAsyncVectorEnv, AsyncVectorEnv))
    assert data_equivalence(ours, theirs)
    assert ours[2].startswith("setting an array element with a sequence")


@pytest.mark.parametrize("told", [[1.0, 2.0], np.ones(2), torch.ones(2)], ids=["list", "array", "tensor"])
@pytest.mark.parametrize("make", [SyncVectorEnv, muster.make_vec, DummyVecEnv])
def test_elsewhere_the_error_says_what_to_write(make, told):
    envs = make([partial(Telling, (told, False, False))])
    envs.reset()
    with pytest.raises((EnvError, ValueError), match=r"reward must be one number, got .* wrapper.* PettingZoo"):
        envs.step(np.zeros(1, int))
    envs.close()


@pytest.mark.parametrize("flag", [torch.tensor(True), np.array(True)])
def test_flags_without_dimensions_are_flags(flag):
    with muster.make_vec(partial(Telling, (torch.tensor(2.5), flag, ~flag)), 1, backend="serial") as envs:
        envs.reset()
        _, rewards, terminated, truncated, _ = envs.step(np.zeros(1, int))
        assert (rewards.tolist(), terminated.tolist(), truncated.tolist()) == ([2.5], [True], [False])


def test_make_vec_says_what_is_wrong_with_them():
    with muster.make_vec([partial(Telling, told) for told in TOLD.values()], backend="serial") as envs:
        envs.reset()
        for env in range(len(TOLD)):
            envs.send(np.zeros(1, int), [env])
            with pytest.raises(EnvError, match="must be a bool|must be one number"):
                envs.recv()
