"""Hints on one process for each env, in the words of each front end: followed to the letter, they work."""

from __future__ import annotations

import os
import re
from typing import ClassVar

import gymnasium
import numpy as np
import pytest

import muster
from muster.errors import OneEnvPerProcess
from muster.interop import sb3
from muster.interop.gymnasium import AsyncVectorEnv, SyncVectorEnv


class Alone(gymnasium.Env):
    metadata = {"one_per_process": True}  # noqa: RUF012 - as Gymnasium declares it
    observation_space = gymnasium.spaces.Box(-1, 1, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}


def test_how_each_env_gets_a_process_of_its_own():
    hint = 'Give each a process of its own: backend="process".'
    with pytest.raises(OneEnvPerProcess, match=re.escape(hint)):
        muster.make_vec(Alone, 2, backend="serial")
    with pytest.raises(OneEnvPerProcess, match=re.escape("own: SubprocVecEnv(env_fns).")):
        sb3.DummyVecEnv([Alone, Alone])


class Once(gymnasium.Env):
    """An env of a library that works once in a process."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    built: ClassVar[set[int]] = set()

    def __init__(self):
        if os.getpid() in self.built:
            raise RuntimeError("the library runs already in this process")
        self.built.add(os.getpid())

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 0.0, False, False, {}


def collector(**options):
    made = muster.Collector(Once, None, num_envs=3, frames_per_batch=3, make_vec_options=options)
    made.close = made.shutdown
    made.reset = made.rollout
    return made


def parallel_env(**options):
    from muster.interop.torchrl import ParallelEnv

    return ParallelEnv(3, Once, **options)


def of_sb3(**options):
    return sb3.make_vec_env(Once, 3, vec_env_cls=sb3.SubprocVecEnv, vec_env_kwargs=options)


MORE_HINTS = [
    (
        lambda: muster.make_vec(Once, 3, num_workers=2),
        "one_env_per_process=True without num_workers",
        lambda: muster.make_vec(Once, 3, one_env_per_process=True),
    ),
    (
        lambda: collector(num_workers=2),
        'make_vec_options={"one_env_per_process": True} without num_workers',
        lambda: collector(one_env_per_process=True),
    ),
    (
        lambda: of_sb3(num_workers=2),
        "vec_env_cls=SubprocVecEnv without num_workers in vec_env_kwargs",
        of_sb3,
    ),
    (lambda: parallel_env(num_processes=2), "ParallelEnv without num_processes", parallel_env),
]


@pytest.mark.parametrize(
    ("make", "hint", "made_as_told"),
    [
        (
            lambda: muster.make_vec(Once, 3, backend="serial"),
            'backend="process"',
            lambda: muster.make_vec(Once, 3, backend="process"),
        ),
        (lambda: SyncVectorEnv([Once] * 3), "AsyncVectorEnv(env_fns)", lambda: AsyncVectorEnv([Once] * 3)),
        (
            lambda: AsyncVectorEnv([Once] * 3, num_workers=2),
            "AsyncVectorEnv(env_fns) without num_workers",
            lambda: AsyncVectorEnv([Once] * 3),
        ),
        (lambda: sb3.DummyVecEnv([Once] * 3), "SubprocVecEnv(env_fns)", lambda: sb3.SubprocVecEnv([Once] * 3)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE_HINTS),
    ],
)
def test_the_hint_for_a_library_that_works_once_in_a_process_can_be_followed(make, hint, made_as_told):
    Once.built.clear()
    with pytest.raises(RuntimeError) as raised:
        make()
    said = "\n".join([str(raised.value), *getattr(raised.value, "__notes__", ())])
    assert set(re.findall(r"give each env its own: (.*)\.$", said, re.MULTILINE)) == {hint}
    Once.built.clear()
    envs = made_as_told()
    envs.reset()
    envs.close()
