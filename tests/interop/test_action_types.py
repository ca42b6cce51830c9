"""Actions reach the envs of drop-ins in the caller's own types, as the originals pass them."""

import gymnasium as gym
import numpy as np
import pytest

sb3 = pytest.importorskip("stable_baselines3")

from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple  # noqa: E402
from gymnasium.vector import SyncVectorEnv as TheirSyncVectorEnv  # noqa: E402
from stable_baselines3.common.vec_env import DummyVecEnv as TheirDummyVecEnv  # noqa: E402

from muster.interop.gymnasium import AsyncVectorEnv, SyncVectorEnv  # noqa: E402
from muster.interop.sb3 import DummyVecEnv, SubprocVecEnv  # noqa: E402

SINGLE, PAIR, CHOICE = Box(-1, 1, (), np.float32), Box(-1, 1, (2,), np.float32), Discrete(4)
NUMBERS, PAIRS = [0.1, 0.2], [[0.1, 0.2], [0.3, 0.4]]
MASKED = np.ma.MaskedArray(PAIRS, np.eye(2, dtype=bool), dtype=np.float32)
# Spaces, and batches for two envs: the dtype of the space, other dtypes, other byte orders, lists.
CASES = [
    (SINGLE, [*(np.array(NUMBERS, kind) for kind in ("f4", "f8", "f2", ">f4", "i8")), NUMBERS]),
    (
        PAIR,
        [
            *(np.array(PAIRS, kind) for kind in ("f4", "f8", "f2", ">f4", "i8")),
            PAIRS,
            [np.array(p) for p in PAIRS],
            MASKED,
        ],
    ),
    (CHOICE, [*(np.array([1, 2], kind) for kind in ("i8", "i4", "u1", "f4", "?")), [1, 2], (1, 2)]),
    (MultiDiscrete([3, 4]), [np.array([[1, 2], [0, 3]], kind) for kind in ("i8", "i4")]),
    (MultiBinary(2), [np.array([[1, 0], [0, 1]], kind) for kind in ("i1", "i8", "?")]),
]


# Forked: fresh processes would import this module, and with it SB3.
def forked_async(env_fns):
    return AsyncVectorEnv(env_fns, context="fork")


def forked_subproc(env_fns):
    return SubprocVecEnv(env_fns, start_method="fork")


DROP_INS = [
    (TheirSyncVectorEnv, SyncVectorEnv),
    (TheirSyncVectorEnv, forked_async),
    (TheirDummyVecEnv, DummyVecEnv),
    (TheirDummyVecEnv, forked_subproc),
]


def _described(action):
    if isinstance(action, dict):
        return {key: _described(part) for key, part in action.items()}
    if isinstance(action, tuple):
        return [_described(part) for part in action]
    kind = getattr(action, "dtype", None)
    return f"{type(action).__name__} of {kind}: {np.asarray(action).tolist()}"


def _seen(vector_env, space, batches):
    class Told(gym.Env):
        observation_space = Box(-1, 1, (1,), np.float32)
        action_space = space

        def reset(self, *, seed=None, options=None):
            return np.zeros(1, np.float32), {}

        def step(self, action):
            return np.zeros(1, np.float32), 0.0, False, False, {"got": str(_described(action))}

    envs = vector_env([Told] * 2)
    try:
        envs.reset()
        rows = [envs.step(batch)[-1] for batch in batches]
    finally:
        envs.close()
    return [[one["got"] for one in row] if isinstance(row, (list, tuple)) else list(row["got"]) for row in rows]


@pytest.mark.parametrize(("theirs", "ours"), DROP_INS, ids=lambda drop_in: drop_in.__name__)
def test_their_type_is_kept(theirs, ours):
    # In processes the action goes the same way: single numbers show it, and the dicts and tuples below.
    for space, batches in CASES if ours in (SyncVectorEnv, DummyVecEnv) else CASES[:1]:
        assert _seen(ours, space, batches) == _seen(theirs, space, batches)


@pytest.mark.parametrize(("theirs", "ours"), DROP_INS, ids=lambda drop_in: drop_in.__name__)
def test_their_type_is_kept_in_dicts_and_tuples(theirs, ours):
    names = ("turn", "push", "key")
    for space in (Dict(key=CHOICE, push=PAIR, turn=SINGLE), Tuple((SINGLE, PAIR, CHOICE))):
        batches = []
        for kind in ("f4", "f8"):
            parts = (np.array(NUMBERS, kind), np.array(PAIRS, kind), np.array([1, 2]))
            rows = list(zip(*parts, strict=True)) if theirs is TheirDummyVecEnv else [parts]
            if isinstance(space, Dict):
                rows = [dict(zip(names, row, strict=True)) for row in rows]
            batches.append(rows if theirs is TheirDummyVecEnv else rows[0])
        assert _seen(ours, space, batches) == _seen(theirs, space, batches)
