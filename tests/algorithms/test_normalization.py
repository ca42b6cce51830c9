"""Running statistics against numpy's over all that was seen."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch.testing import assert_close

from muster.algorithms.encoder import Encoder, ObservationNormalizer, RewardNormalizer, RunningMoments, as_observation


def test_moments_are_those_of_all_rows_together():
    rows = np.random.default_rng(0).normal(1e3, 2.0, (60, 3))
    moments = RunningMoments((3,))
    for part in np.split(rows, (1, 8, 50)):
        moments.update(torch.from_numpy(part))
    moments.update(torch.empty(0, 3))
    assert moments.count == 60
    assert_close(moments.mean.numpy(), rows.mean(0))
    assert_close(moments.var.numpy(), rows.var(0))


def test_observations_come_to_mean_0_and_deviation_1_within_10():
    normalizer = ObservationNormalizer(spaces.Box(-1, 1, (1,)))
    obs = torch.tensor([[1.0], [3.0], [5.0], [7.0]])
    normalizer.update(obs)
    seen = normalizer(obs)
    assert seen.dtype == torch.float32
    assert_close(seen, (obs - 4) / 5**0.5)
    assert normalizer(torch.tensor([[1e9]])).item() == 10.0
    assert normalizer.moments.count == 4  # looking alone changes nothing


def test_observations_before_any_was_seen_are_as_they_are():
    assert_close(
        ObservationNormalizer(spaces.Box(-1, 1, (2,)))(torch.tensor([[1.0, -2.0]])), torch.tensor([[1.0, -2.0]])
    )


PARTS = spaces.Dict(
    {
        "at": spaces.Box(-1, 1, (1,), np.float64),
        "image": spaces.Box(0, 255, (8, 8), np.uint8),
        "rest": spaces.Tuple([spaces.Box(0, 255, (1,), np.uint8), spaces.Discrete(5)]),
    }
)


def test_each_measurement_of_a_dict_has_its_own_statistics():
    normalizer = ObservationNormalizer(PARTS)
    image = torch.full((4, 8, 8), 200, dtype=torch.uint8)
    obs = as_observation(
        {
            "at": torch.tensor([[1.0], [3.0], [5.0], [7.0]], dtype=torch.float64),
            "image": image,
            "rest": (torch.tensor([[10], [30], [50], [70]], dtype=torch.uint8), torch.tensor([4, 0, 0, 0])),
        }
    )
    normalizer.update(obs[:0])
    normalizer.update(obs[:1])
    normalizer.update(obs[1:])
    seen = normalizer(obs)
    expected = torch.tensor([[-3.0], [-1.0], [1.0], [3.0]]) / 5**0.5
    for key in ("at", ("rest", "0")):
        assert seen[key].dtype == torch.float32
        assert_close(seen[key], expected)
    assert torch.equal(seen["image"], image)
    assert torch.equal(seen["rest", "1"], obs["rest", "1"])
    assert obs["rest", "0"].dtype == torch.uint8  # what is given stays as it is
    features = Encoder(PARTS, torch.Generator())(seen)
    assert_close(features[:, 513:514], expected)  # bytes that were normalised are not divided by 255

    other = ObservationNormalizer(PARTS)
    other.load(normalizer.to_dict())
    assert torch.equal(other(obs)["rest", "0"], seen["rest", "0"])
    assert len(normalizer.state_dict()) == 4  # means and variances follow with the weights


@pytest.mark.parametrize("parts", [(), (2,), (1, 3)])
def test_rewards_are_divided_by_the_deviation_of_discounted_returns(parts: tuple[int, ...]):
    rewards = torch.tensor([[1.0], [2.0], [4.0], [8.0]])
    done = torch.tensor([[False], [True], [False], [False]])
    normalizer = RewardNormalizer((1,), gamma=0.5)
    mask = torch.ones(4, 1, dtype=torch.bool)
    for part in np.split(np.arange(4), parts):
        last = normalizer.update(rewards[part], done[part], mask[part])
    returns = np.array([1.0, 2 + 0.5, 4.0, 8 + 2.0])
    assert_close(last[-1].item(), 8 / returns.std(), rtol=1e-6, atol=0)


def test_masked_rows_count_for_nothing():
    normalizer = RewardNormalizer((1,), gamma=0.5)
    rewards = torch.tensor([[4.0], [float("nan")], [2.0]])
    mask = torch.tensor([[True], [False], [True]])
    given = normalizer.update(rewards, torch.zeros(3, 1, dtype=torch.bool), mask)
    returns = np.array([4.0, 2 + 2.0])
    assert normalizer.moments.count == 2
    assert_close(normalizer.moments.mean.item(), returns.mean())
    assert given[0].item() == 10.0  # both returns are equal, so any reward is cut off
