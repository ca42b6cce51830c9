"""The functions that one front end hands to vector env classes, in Muster's other vector envs."""

from __future__ import annotations

import contextlib
import functools
import threading

import gymnasium as gym
import numpy as np
import pytest
from stable_baselines3.common.vec_env import SubprocVecEnv as SB3sSubprocVecEnv

import muster
from muster.errors import CannotTravel, RecipeError
from muster.interop import gymnasium as dropins
from muster.interop.sb3 import DummyVecEnv, SubprocVecEnv, as_sb3, make_vec_env
from one_instance import ClassVariable
from slow import slow

ACTIONS = np.array([0, 1, 2])
ROWS = [[0.0, 1.0, 2.0], [0.0, 2.0, 4.0]]


def by_make_vec(fns, **options):
    return as_sb3(muster.make_vec(list(fns), autoreset_mode="same_step", **options))


def by_wrapped_functions(fns, **options):
    return by_make_vec([functools.partial(wrapped, fn) for fn in fns], **options)


def wrapped(fn):
    return gym.wrappers.TransformReward(fn(), float)


@pytest.mark.parametrize("cls", [by_make_vec, by_wrapped_functions, SubprocVecEnv, *slow(SB3sSubprocVecEnv)])
def test_make_vec_env_builds_envs_by_any_class(cls):
    # Forked: in a fresh process the import of SB3, for its Monitor, takes seconds.
    options = {"context": "fork"} if cls in (by_make_vec, by_wrapped_functions) else {"start_method": "fork"}
    with contextlib.closing(make_vec_env(ClassVariable, 3, seed=0, vec_env_cls=cls, vec_env_kwargs=options)) as envs:
        envs.reset()
        assert [envs.step(ACTIONS)[0][:, 0].tolist() for _ in ROWS] == ROWS


def test_their_remedies_are_those_of_both_calls():
    with pytest.raises(CannotTravel) as caught:
        make_vec_env(ClassVariable, 2, env_kwargs={"library": threading.Lock()}, vec_env_cls=by_make_vec)
    assert 'env_kwargs["library"] = ' in str(caught.value)
    assert 'backend="serial" hands over this very object' in str(caught.value)


def test_functions_of_gymnasiums_make_vec_work_in_others():
    gym.register("theirs/ClassVariable-v0", entry_point=ClassVariable)
    try:
        with contextlib.closing(dropins.make_vec("theirs/ClassVariable-v0", 3)) as envs:
            fns = envs.env_fns
        with muster.make_vec(list(fns)) as envs:
            envs.reset()
            assert [envs.step(ACTIONS)[0][:, 0].tolist() for _ in ROWS] == ROWS
            assert len(envs.stats()["workers"]) == 3
        with pytest.raises(RecipeError, match="comes from make_vec with all its arguments"):
            muster.make_vec(list(fns), env_kwargs={"library": ""})
        with contextlib.closing(DummyVecEnv(list(fns))) as envs:
            envs.reset()
    finally:
        del gym.registry["theirs/ClassVariable-v0"]
