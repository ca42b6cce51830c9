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
from gymnasium.vector.utils import (  # noqa: E402
    create_shared_memory,
    read_from_shared_memory,
    write_to_shared_memory,
)
from stable_baselines3.common.vec_env import DummyVecEnv as TheirDummyVecEnv  # noqa: E402

import muster  # noqa: E402
from muster.errors import EnvError  # noqa: E402
from muster.interop.gymnasium import AsyncVectorEnv, SyncVectorEnv  # noqa: E402
from muster.interop.sb3 import DummyVecEnv, SubprocVecEnv  # noqa: E402
from muster.spaces import tree  # noqa: E402

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


INT8, CHOICE = gym.spaces.MultiDiscrete([100, 100], dtype=np.int8), gym.spaces.Discrete(4)
OBSERVATIONS = {
    "ints that fit": (INT8, [1, 2]),
    "an int that does not": (INT8, [300, 1]),
    "a tuple": (INT8, (-129, 1)),
    "NumPy's ints in a list": (INT8, [np.int64(300), 1]),
    "NaN in a list": (INT8, [float("nan"), 1]),
    "a negative number": (gym.spaces.Box(0, 255, (2,), np.uint8), [-1, 1]),
    "a whole float": (gym.spaces.Box(0, 255, (2,), np.uint8), [256.7, 1]),
    "no float": (gym.spaces.Box(-1, 1, (2,), np.float32), [10**400, 1]),
    "a complex number": (gym.spaces.Box(-1, 1, (2,), np.float32), [1j, 1]),
    "a word": (gym.spaces.Box(-1, 1, (2,), np.float32), ["a", 1]),
    "a large float": (gym.spaces.Box(-1, 1, (2,), np.float32), [1e300, 1]),
    "NaN": (CHOICE, float("nan")),
    "infinity": (CHOICE, float("inf")),
    "2 ** 63": (CHOICE, 2**63),
    "2 ** 64": (CHOICE, 2**64),
    "1e300": (CHOICE, 1e300),
    "None": (CHOICE, None),
    "in a dict": (gym.spaces.Dict(a=INT8, b=CHOICE), {"a": [1, 2], "b": 2**63}),
    "in a tuple": (gym.spaces.Tuple((INT8, CHOICE)), ([300, 2], 1)),
    "an array": (INT8, np.array([300, 1])),
    "an array of objects": (INT8, np.array([300, 1], object)),
    "a tensor": (INT8, torch.tensor([300, 1])),
}


class Seeing(Telling):
    def __init__(self, space, seen):
        super().__init__((0.0, False, False))
        self.observation_space, self.seen = space, seen

    def reset(self, *, seed=None, options=None):
        return self.seen, {}


def _first_observation(cls, *seeing):
    """The observation of one env, or the class of the error."""
    envs = cls([partial(Seeing, *seeing)])
    try:
        obs = envs.reset()
    except (OverflowError, ValueError, TypeError) as error:
        return type(error)
    finally:
        envs.close()
    return obs[0] if isinstance(envs, gym.vector.VectorEnv) else obs


def _as_their_workers_write(case):
    """The same, as the workers of Gymnasium's AsyncVectorEnv write it."""
    space, seen = OBSERVATIONS[case]
    memory = create_shared_memory(space, n=1)
    try:
        write_to_shared_memory(space, 0, seen, memory)
    except (OverflowError, ValueError, TypeError) as error:
        return type(error)
    return read_from_shared_memory(space, memory, n=1)


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast", "ignore:overflow encountered in cast")
@pytest.mark.parametrize("case", OBSERVATIONS)
@pytest.mark.parametrize("numpy_wraps", [tree._WRAPS, True])
def test_numbers_that_a_dtype_does_not_hold_are_refused_in_lists_and_cast_in_arrays(numpy_wraps, case, monkeypatch):
    monkeypatch.setattr(tree, "_WRAPS", numpy_wraps)
    for cls in (SyncVectorEnv, DummyVecEnv)[case == "an array of objects" :]:  # see below
        assert data_equivalence(_first_observation(cls, *OBSERVATIONS[case]), _as_their_workers_write(case))


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
@pytest.mark.parametrize(
    ("space", "seen"),
    [
        (INT8, np.array([1.5, np.nan])),
        (INT8, np.array([1, 2], object)),
        (INT8, np.array([200, 1], np.uint8)),
        (gym.spaces.Box(0, 255, (2,), np.uint8), np.array([-1, 1])),
        (gym.spaces.Box(-1, 1, (2,), np.float32), np.array([0.1, 1])),
        (CHOICE, np.float64(np.nan)),
        (CHOICE, np.float32(1e30)),
        (CHOICE, np.float64(1.5)),
        (CHOICE, np.uint64(3)),
    ],
)
@pytest.mark.parametrize("pair", [(SyncVectorEnv, TheirSyncVectorEnv), (DummyVecEnv, TheirDummyVecEnv)])
def test_arrays_and_numpys_numbers_are_cast_as_the_originals_cast_them(pair, space, seen):
    ours, theirs = (_first_observation(cls, space, seen) for cls in pair)
    assert data_equivalence(ours, theirs)


@pytest.mark.filterwarnings("ignore:.*from Worker-0", "ignore:.*Traceback", "ignore:.*the last exception")
@pytest.mark.parametrize("cls", [partial(AsyncVectorEnv, context="fork"), partial(SubprocVecEnv, start_method="fork")])
def test_the_error_comes_from_workers_with_the_place(cls):
    envs = cls([partial(Seeing, INT8, [300, 1])])
    with pytest.raises(OverflowError, match="300 out of bounds for int8") as raised:
        envs.reset()
    envs.close()
    assert "observation is list [300, 1], expected shape (2,) of int8" in "".join(raised.value.__notes__)
