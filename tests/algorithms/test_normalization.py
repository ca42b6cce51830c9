"""Running statistics against numpy's over all that was seen."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from muster.algorithms.normalization import ObservationNormalizer, RewardNormalizer, RunningMoments


def test_moments_are_those_of_all_rows_together():
    rows = np.random.default_rng(0).normal(1e3, 2.0, (60, 3))
    moments = RunningMoments((3,))
    for part in np.split(rows, (1, 8, 50)):
        moments.update(torch.from_numpy(part))
    moments.update(torch.empty(0, 3))
    assert moments.count == 60
    assert_close(moments.mean.numpy(), rows.mean(0))
    assert_close(moments.var.numpy(), rows.var(0))


def test_moments_survive_saving():
    moments, copy = RunningMoments((2,)), RunningMoments((2,))
    moments.update(torch.tensor([[1.0, 2.0], [3.0, 6.0]]))
    copy.load(moments.to_dict())
    copy.update(torch.tensor([[5.0, 4.0]]))
    assert copy.mean.tolist() == [3.0, 4.0]
    assert moments.mean.tolist() == [2.0, 4.0]


def test_observations_come_to_mean_0_and_deviation_1_within_10():
    normalizer = ObservationNormalizer((1,))
    obs = torch.tensor([[1.0], [3.0], [5.0], [7.0]])
    normalizer.moments.update(obs)
    seen = normalizer(obs)
    assert seen.dtype == torch.float32
    assert_close(seen, (obs - 4) / 5**0.5)
    assert normalizer(torch.tensor([[1e9]])).item() == 10.0
    assert normalizer.moments.count == 4  # looking alone changes nothing


def test_observations_before_any_was_seen_are_as_they_are():
    assert_close(ObservationNormalizer((2,))(torch.tensor([[1.0, -2.0]])), torch.tensor([[1.0, -2.0]]))


@pytest.mark.parametrize("parts", [(), (2,), (1, 3)])
def test_rewards_are_divided_by_the_deviation_of_discounted_returns(parts: tuple[int, ...]):
    rewards = torch.tensor([[1.0], [2.0], [4.0], [8.0]])
    done = torch.tensor([[False], [True], [False], [False]])
    normalizer = RewardNormalizer(1, gamma=0.5)
    mask = torch.ones(4, 1, dtype=torch.bool)
    for part in np.split(np.arange(4), parts):
        last = normalizer.update(rewards[part], done[part], mask[part])
    returns = np.array([1.0, 2 + 0.5, 4.0, 8 + 2.0])
    assert_close(last[-1].item(), 8 / returns.std(), rtol=1e-6, atol=0)


def test_masked_rows_count_for_nothing():
    normalizer = RewardNormalizer(1, gamma=0.5)
    rewards = torch.tensor([[4.0], [float("nan")], [2.0]])
    mask = torch.tensor([[True], [False], [True]])
    given = normalizer.update(rewards, torch.zeros(3, 1, dtype=torch.bool), mask)
    returns = np.array([4.0, 2 + 2.0])
    assert normalizer.moments.count == 2
    assert_close(normalizer.moments.mean.item(), returns.mean())
    assert given[0].item() == 10.0  # both returns are equal, so any reward is cut off
