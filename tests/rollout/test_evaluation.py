"""Evaluation by whole episodes, shared out among the envs beforehand."""

from __future__ import annotations

import functools

import pytest
import torch
from counting_env import CountingEnv, NoisyEnv

import muster
from muster.errors import ConfigError, UsageError
from muster.rollout.evaluation import evaluate


def zeros(obs: torch.Tensor) -> torch.Tensor:
    return torch.zeros(len(obs), dtype=torch.int64)


@pytest.mark.parametrize("mode", ["same_step", "next_step"])
def test_short_episodes_do_not_crowd_out_long_ones(mode: str):
    envs = [functools.partial(CountingEnv, length=length) for length in (3, 70)]
    with muster.make_vec(envs, backend="serial", autoreset_mode=mode) as made:
        played = evaluate(made, zeros, episodes=5)
    assert played.lengths.tolist() == [3, 3, 3, 70, 70]
    assert played.env_ids.tolist() == [0, 0, 0, 1, 1]
    assert played.returns.tolist() == [6.0] * 3 + [70 * 71 / 2] * 2


def test_fewer_episodes_than_envs():
    with muster.make_vec(functools.partial(CountingEnv, length=3), 4, backend="serial") as envs:
        assert evaluate(envs, zeros, episodes=2).env_ids.tolist() == [0, 1]
        with pytest.raises(ConfigError, match="episodes must be a whole number of at least 1, got 0"):
            evaluate(envs, zeros, episodes=0)
        with pytest.raises(ConfigError, match="episodes must be a whole number of at least 1, got 'x'"):
            evaluate(envs, zeros, episodes="x")


def test_the_seed_decides():
    with muster.make_vec(NoisyEnv, 2, backend="serial", autoreset_mode="same_step") as envs:
        first, second, other = (evaluate(envs, zeros, episodes=4, seed=seed) for seed in (1, 1, 2))
    assert first.returns.tolist() == second.returns.tolist() != other.returns.tolist()


def test_episodes_that_have_not_ended_after_max_steps_are_left_out():
    told = []
    envs = [functools.partial(CountingEnv, length=length) for length in (3, 10**9)]
    with muster.make_vec(envs, backend="serial", autoreset_mode="same_step") as made:
        played = evaluate(made, zeros, episodes=2, max_steps=200, on_progress=lambda *progress: told.append(progress))
    assert told == [(1, 128), (1, 256)]
    assert (played.returns.tolist(), played.lengths.tolist(), played.env_ids.tolist()) == ([6.0], [3], [0])


def test_no_episode_within_max_steps_is_an_error():
    with (
        muster.make_vec(functools.partial(CountingEnv, length=10**9), 2, backend="serial") as envs,
        pytest.raises(UsageError, match=r"none of 2 episodes had ended after 256 steps.*max_steps is 200.*TimeLimit"),
    ):
        evaluate(envs, zeros, episodes=2, max_steps=200)
