"""Every space an env may have, and distributions against torch's own."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch.distributions import Categorical, Normal
from torch.testing import assert_close

from muster.algorithms.actor_critic import ActorCritic, Categoricals, Gaussian
from muster.algorithms.encoder import Encoder, kind_of
from muster.errors import UsageError


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batch_of(space: gym.Space[Any], size: int) -> torch.Tensor:
    space.seed(0)
    return torch.from_numpy(np.stack([space.sample() for _ in range(size)]))


@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-1, 1, (), np.float32),
        spaces.Box(-np.inf, np.inf, (3, 2), np.float64),
        spaces.Box(0, 255, (128,), np.uint8),
        spaces.Box(0, 9, (2,), np.int64),
        spaces.Box(0, 255, (48, 40, 3), np.uint8),
        spaces.Box(0, 255, (7, 7, 3), np.uint8),
        spaces.Box(0, 255, (3, 7, 7), np.uint8),
        spaces.Box(0, 255, (9, 11), np.uint8),
        spaces.Box(0, 7, (9, 11), np.uint8),
        spaces.Box(0, 1, (48, 40, 4), np.uint8),
        spaces.Box(0, 255, (4, 40, 60, 3), np.uint8),
        spaces.Box(0, 255, (4, 3, 40, 60), np.uint8),
        spaces.Box(0, 255, (36, 5, 37), np.uint8),
        spaces.Box(0, 255, (2, 2, 2, 2), np.uint8),
        spaces.Discrete(4, start=-2),
        spaces.MultiDiscrete([[2, 3], [4, 5]]),
        spaces.MultiBinary((2, 2)),
    ],
    ids=str,
)
def test_every_observation_gets_action_parameters_and_a_value(space: gym.Space[Any]):
    policy = ActorCritic(space, spaces.Discrete(3), generator())
    obs = batch_of(space, 5)
    params, values = policy(obs)
    assert params.shape == (5, 3)
    assert values.shape == (5,)
    assert policy.act(obs, generator()).shape == (5, 1)


def test_images_mean_the_same_with_channels_first_or_last():
    first = ActorCritic(spaces.Box(0, 255, (4, 84, 84), np.uint8), spaces.Discrete(3), generator())
    last = ActorCritic(spaces.Box(0, 255, (84, 84, 4), np.uint8), spaces.Discrete(3), generator())
    obs = batch_of(spaces.Box(0, 255, (4, 84, 84), np.uint8), 2)
    assert_close(first(obs), last(obs.permute(0, 2, 3, 1)))


def test_grey_and_stacked_images_are_seen_as_those_with_channels():
    channels = spaces.Box(0, 255, (6, 40, 60), np.uint8)
    obs = batch_of(channels, 2)
    for other, seen in (
        (spaces.Box(0, 255, (2, 3, 40, 60), np.uint8), obs.view(2, 2, 3, 40, 60)),
        (spaces.Box(0, 255, (2, 40, 60, 3), np.uint8), obs.view(2, 2, 3, 40, 60).permute(0, 1, 3, 4, 2)),
    ):
        assert_close(Encoder(other, generator())(seen), Encoder(channels, generator())(obs))
    grey, bare = spaces.Box(0, 255, (40, 60, 1), np.uint8), spaces.Box(0, 255, (40, 60), np.uint8)
    assert_close(Encoder(bare, generator())(obs[:, 0]), Encoder(grey, generator())(obs[:, 0].unsqueeze(-1)))


def test_rows_of_bytes_are_divided_by_255_unless_they_were_normalised():
    encoder = Encoder(spaces.Box(0, 255, (2,), np.uint8), generator())
    assert_close(encoder(torch.tensor([[51, 255]], dtype=torch.uint8)), torch.tensor([[0.2, 1.0]]))
    assert_close(encoder(torch.tensor([[-1.5, 2.0]])), torch.tensor([[-1.5, 2.0]]))


@pytest.mark.parametrize(
    ("space", "kind"),
    [
        (spaces.Box(0, 255, (96, 96, 3), np.uint8), "images"),
        (spaces.Box(0, 255, (96, 96), np.uint8), "images"),
        (spaces.Box(0, 255, (4, 96, 96, 3), np.uint8), "images"),
        (spaces.Box(0, 31, (96, 96), np.uint8), "codes"),
        (spaces.Box(0, 255, (36, 5, 37), np.uint8), "grid"),
        (spaces.Box(0, 255, (2, 7, 7, 3), np.uint8), "bytes"),
        (spaces.Box(0, 255, (7, 7, 3), np.uint8), "grid"),
        (spaces.Box(0, 255, (7, 7), np.uint8), "grid"),
        (spaces.Box(0, 10, (7, 7, 3), np.uint8), "codes"),
        (spaces.Box(0, 1, (20,), np.int8), "codes"),
        (spaces.Box(0, 255, (128,), np.uint8), "bytes"),
        (spaces.Box(0, 1000, (3,), np.int64), "numbers"),
        (spaces.Box(-1, 1, (3,), np.int64), "numbers"),
        (spaces.Box(0, 1, (3,), np.float32), "numbers"),
        (spaces.Discrete(3), "choices"),
    ],
    ids=str,
)
def test_each_space_has_its_kind_of_first_layer(space: gym.Space[Any], kind: str):
    assert kind_of(space) == kind


@pytest.mark.parametrize("shape", [(7, 7, 3), (3, 7, 7), (7, 7)], ids=str)
def test_codes_of_a_grid_lie_as_far_apart_as_other_numbers_do(shape: tuple[int, ...]):
    encoder = Encoder(spaces.Box(0, 255, shape, np.uint8), generator())
    blank = torch.full((1, *shape), 1, dtype=torch.uint8)
    other = blank.clone()
    other.view(-1)[0] = 2
    difference = (encoder(other) - encoder(blank)).abs()
    assert encoder(blank).std() > 0.5  # MiniGrid's codes are at most 10: a 255th of that is next to nothing
    assert 1 <= int((difference > 0).sum()) <= 8  # one code, one cell


def test_a_code_means_something_else_in_each_channel():
    encoder = Encoder(spaces.Box(0, 255, (4, 4, 3), np.uint8), generator())
    cell = encoder(torch.full((1, 4, 4, 3), 4, dtype=torch.uint8)).view(4, 4, 3, 8)
    assert torch.equal(cell[0, 0], cell[1, 1])
    assert not torch.isclose(cell[0, 0, 0], cell[0, 0, 1]).any()


def test_small_codes_are_told_apart_one_by_one():
    encoder = Encoder(spaces.Box(0, 3, (2,), np.uint8), generator())
    assert encoder(torch.tensor([[3, 0]], dtype=torch.uint8)).tolist() == [[0, 0, 0, 1, 1, 0, 0, 0]]


def test_weights_come_from_the_given_generator_alone():
    spaces_of = (spaces.Box(-1, 1, (4,), np.float32), spaces.Discrete(2))
    before = torch.get_rng_state()
    one, same, other = (ActorCritic(*spaces_of, generator(seed)) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one.actor[0].weight, same.actor[0].weight)
    assert not torch.equal(one.actor[0].weight, other.actor[0].weight)


def test_it_starts_out_without_a_preference():
    policy = ActorCritic(spaces.Box(-1, 1, (4,), np.float32), spaces.Discrete(2), generator())
    params, _ = policy(torch.rand(10, 4, generator=generator()))
    assert params.softmax(-1).sub(0.5).abs().max() < 0.02


def test_the_last_layers_start_as_the_references_have_them():
    policy = ActorCritic(spaces.Box(-1, 1, (4,), np.float32), spaces.Discrete(2), generator())
    assert_close(policy.critic[-1].weight.norm().item(), 1.0)
    assert_close(torch.linalg.svdvals(policy.actor[-1].weight), torch.full((2,), 0.01))


def test_values_are_in_the_units_of_returns_however_large():
    policy = ActorCritic(spaces.Box(-1, 1, (4,), np.float32), spaces.Discrete(2), generator())
    assert not [name for name, _ in policy.named_buffers()]  # nothing but weights stands between critic and value


@pytest.mark.parametrize(
    ("space", "remedy"),
    [
        (spaces.Text(5), "such as .*FlattenObservation"),
        (spaces.Dict({"a": spaces.Discrete(2)}), "such as .*FlattenObservation"),
        (spaces.Dict({"a": spaces.Sequence(spaces.Discrete(2))}), "which you have to write"),
    ],
    ids=str,
)
def test_other_observations_are_refused_with_the_remedy(space: gym.Space[Any], remedy: str):
    with pytest.raises(UsageError, match=f"MultiBinary observations, but this env has .* with a wrapper, {remedy}"):
        ActorCritic(space, spaces.Discrete(2), generator())


@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
def test_spaces_of_no_numbers_are_refused(dtype: Any):
    with pytest.raises(UsageError, match="at least one number, but this env has"):
        ActorCritic(spaces.Box(0, 1, (0,), dtype), spaces.Discrete(2), generator())
    with pytest.raises(UsageError, match="at least one number, but this env has"):
        ActorCritic(spaces.Discrete(2), spaces.Box(0, 1, (2, 0), np.float32), generator())


def test_other_actions_are_refused():
    space = spaces.Box(-1, 1, (4,), np.float32)
    with pytest.raises(UsageError, match="MultiBinary actions"):
        ActorCritic(space, spaces.Tuple([spaces.Discrete(2)]), generator())
    with pytest.raises(UsageError, match="float dtype"):
        ActorCritic(space, spaces.Box(0, 9, (1,), np.int64), generator())


class TestCategoricals:
    def test_log_probabilities_and_entropy_are_torchs(self):
        head = Categoricals(spaces.MultiDiscrete([2, 3]))
        params = torch.randn(10, 5, generator=generator())
        actions = head.sample(params, generator())
        log_prob, entropy = head.log_prob_and_entropy(params, actions)
        parts = [Categorical(logits=params[:, :2]), Categorical(logits=params[:, 2:])]
        assert_close(log_prob, parts[0].log_prob(actions[:, 0]) + parts[1].log_prob(actions[:, 1]))
        assert_close(entropy, parts[0].entropy() + parts[1].entropy())

    def test_samples_follow_the_probabilities(self):
        head = Categoricals(spaces.Discrete(3))
        params = torch.tensor([0.2, 0.5, 0.3]).log().expand(20_000, 3)
        shares = head.sample(params, generator()).squeeze(-1).bincount() / 20_000
        assert_close(shares, torch.tensor([0.2, 0.5, 0.3]), atol=0.015, rtol=0)

    def test_huge_logits_are_sampled_and_scored(self):
        head = Categoricals(spaces.Discrete(2))
        params = torch.tensor([[1000.0, 0.0]])
        assert head.sample(params, generator()).tolist() == [[0]]
        log_prob, entropy = head.log_prob_and_entropy(params, torch.tensor([[0]]))
        assert (log_prob.item(), entropy.item()) == (0.0, 0.0)

    @pytest.mark.parametrize(
        "space",
        [
            spaces.Discrete(3, start=-5),
            spaces.MultiDiscrete([[2, 3], [4, 5]], dtype=np.int32),
            spaces.MultiDiscrete([2, 3], start=[1, 9]),
            spaces.MultiBinary((2, 2)),
        ],
        ids=str,
    )
    def test_actions_are_the_spaces(self, space: gym.Space[Any]):
        head = Categoricals(space)
        actions = head.to_env(head.sample(torch.zeros(50, head.num_params), generator()))
        assert all(space.contains(action) for action in actions)
        assert len({action.tobytes() for action in actions}) > 2


class TestGaussian:
    def test_log_probabilities_and_entropy_are_torchs(self):
        head = Gaussian(spaces.Box(-1, 1, (3,), np.float32))
        with torch.no_grad():
            head.log_std.copy_(torch.tensor([-1.0, 0.0, 0.5]))
        params = torch.randn(10, 3, generator=generator())
        actions = head.sample(params, generator())
        log_prob, entropy = head.log_prob_and_entropy(params, actions)
        normal = Normal(params, head.log_std.exp())
        assert_close(log_prob, normal.log_prob(actions).sum(-1))
        assert_close(entropy, normal.entropy().sum(-1))

    def test_samples_have_the_mean_and_the_deviation(self):
        head = Gaussian(spaces.Box(-1, 1, (1,), np.float32))
        with torch.no_grad():
            head.log_std.fill_(-1)
            samples = head.sample(torch.full((20_000, 1), 0.3), generator())
        assert_close(samples.mean().item(), 0.3, atol=0.01, rtol=0)
        assert_close(samples.std().log().item(), -1.0, atol=0.02, rtol=0)

    def test_minus_1_and_1_stand_for_finite_bounds(self):
        head = Gaussian(spaces.Box(np.array([2, -np.inf], np.float32), np.array([6, np.inf], np.float32)))
        actions = head.to_env(torch.tensor([[-1.0, -1.0], [0.0, 0.0], [1.0, 1.0], [9.0, 9.0]]))
        assert actions.tolist() == [[2, -1], [4, 0], [6, 1], [6, 9]]

    def test_actions_are_finite_in_a_small_dtype_too(self):
        head = Gaussian(spaces.Box(-np.inf, np.inf, (2,), np.float16))
        assert head.to_env(torch.tensor([[1e6, -1e6]])).tolist() == [[65504, -65504]]

    @pytest.mark.parametrize(
        "space",
        [
            spaces.Box(-2, 2, (1,), np.float32),
            spaces.Box(0, np.inf, (2, 2), np.float64),
            spaces.Box(np.finfo(np.float32).min, np.finfo(np.float32).max, (2,), np.float32),
        ],
        ids=str,
    )
    def test_actions_are_the_spaces(self, space: spaces.Box):
        head = Gaussian(space)
        actions = head.to_env(10 * torch.randn(50, head.num_params, generator=generator()))
        assert all(space.contains(action) for action in actions)
