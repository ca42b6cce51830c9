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
from muster.algorithms.encoder import Encoder, as_observation, kind_of
from muster.errors import ConfigError, UsageError

IMAGE, SPEEDS = spaces.Box(0, 255, (8, 10, 4), np.uint8), spaces.Box(-1, 1, (2,), np.float32)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def batch_of(space: gym.Space[Any], size: int) -> torch.Tensor:
    space.seed(0)
    return torch.from_numpy(np.stack([space.sample() for _ in range(size)]))


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
        (spaces.Box(0, 255, (7, 40, 3), np.uint8), "grid"),
        (spaces.Box(0, 255, (8, 8, 3), np.uint8), "grid"),  # MiniGrid's maps
        (spaces.Box(0, 255, (16, 8, 3), np.uint8), "grid"),
        (spaces.Box(0, 255, (25, 25, 3), np.uint8), "grid"),
        (spaces.Box(0, 255, (25, 25, 20), np.uint8), "grid"),  # planes, as OneHotPartialObsWrapper has them
        (spaces.Box(0, 255, (9, 9, 20), np.uint8), "grid"),
        (spaces.Box(0, 255, (8, 8, 8), np.uint8), "grid"),
        (spaces.Box(0, 99, (21, 79), np.uint8), "grid"),
        (spaces.Box(0, 15, (21, 79), np.uint8), "codes"),  # NetHack's colours
        (spaces.Box(0, 1, (10, 10, 4), np.bool_), "numbers"),  # MinAtar
        (spaces.Box(0, 1, (8, 8, 111), np.bool_), "numbers"),  # chess
        (spaces.Box(0, 10, (7, 7, 3), np.uint8), "codes"),
        (spaces.Box(0, 1, (20,), np.int8), "codes"),
        (spaces.Box(0, 255, (128,), np.uint8), "bytes"),
        (spaces.Box(0, 1000, (3,), np.int64), "numbers"),
        (spaces.Box(-1, 1, (3,), np.int64), "numbers"),
        (spaces.Box(0, 1, (3,), np.float32), "numbers"),
        (spaces.Box(-1, 1, (), np.float32), "numbers"),
        (spaces.Box(-np.inf, np.inf, (3, 2), np.float64), "numbers"),
        (spaces.Box(0, 255, (4, 3, 40, 60), np.uint8), "images"),
        (spaces.Box(0, 255, (2, 2, 2, 2), np.uint8), "bytes"),
        (spaces.Discrete(4, start=-2), "choices"),
        (spaces.MultiDiscrete([[2, 3], [4, 5]]), "choices"),
        (spaces.MultiBinary((2, 2)), "choices"),
    ],
    ids=str,
)
def test_each_space_has_its_kind_of_first_layer_and_gets_parameters_and_a_value(space: gym.Space[Any], kind: str):
    assert kind_of(space) == kind
    policy = ActorCritic(space, spaces.Discrete(3), generator())
    obs = batch_of(space, 5)
    params, values = policy(obs)
    assert (params.shape, values.shape) == ((5, 3), (5,))
    assert policy.head.sample(policy.decide(obs)[0], generator()).shape == (5, 1)


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


SMALL = [
    *((side, side) for side in range(8, 36)),
    *((1, side, side) for side in (8, 11, 12, 25, 35)),
    *((3, side, side) for side in (8, 11, 12, 25, 35)),
    *((side, side, 4) for side in (8, 12, 35)),
    *((side, side, 3) for side in (26, 32)),
    *((4, side, side) for side in (8, 23)),
    *((4, 3, side, side) for side in (8, 10)),
    *((4, 30, 30, 3), (1, 30, 45), (30, 45, 1), (9, 80), (80, 9, 2), (12, 32, 32), (32, 32, 12)),
]


@pytest.mark.parametrize("shape", SMALL, ids=str)
def test_small_images_are_seen_by_a_cnn_down_to_the_last_pixel(shape: tuple[int, ...]):
    space = spaces.Box(0, 255, shape, np.uint8)
    encoder = Encoder(space, generator())
    assert kind_of(space) == "images"
    obs = torch.full((1, *shape), 100.0, requires_grad=True)
    features = encoder(obs)
    assert features.shape == (1, encoder.num_features)
    (features * torch.randn(features.shape, generator=generator())).sum().backward()
    assert obs.grad is not None
    assert obs.grad.all()  # each pixel of each channel counts


@pytest.mark.parametrize("side", [8, 11, 26, 35, 84])
def test_images_mean_the_same_with_channels_first_or_last(side: int):
    first, last = (spaces.Box(0, 255, shape, np.uint8) for shape in ((4, side, side + 1), (side, side + 1, 4)))
    obs = batch_of(first, 2)
    assert_close(Encoder(first, generator())(obs), Encoder(last, generator())(obs.permute(0, 2, 3, 1)))


def test_images_from_36_pixels_on_have_the_network_of_mnih_et_al():
    rng, channels, side = generator(), 4, 84
    expected = []
    for filters, kernel, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
        empty = torch.empty(filters, channels, kernel, kernel)
        expected.append(torch.nn.init.orthogonal_(empty, 2**0.5, generator=rng))
        channels, side = filters, (side - kernel) // stride + 1
    expected.append(torch.nn.init.orthogonal_(torch.empty(512, 64 * side * side), 2**0.5, generator=rng))
    encoder = Encoder(spaces.Box(0, 255, (4, 84, 84), np.uint8), generator())
    weights = [weights for name, weights in encoder.named_parameters() if name.endswith("weight")]
    assert all(torch.equal(*pair) for pair in zip(weights, expected, strict=True))
    pixels = batch_of(spaces.Box(0, 255, (4, 84, 84), np.uint8), 2).float() / 255
    x = pixels
    for kernel, stride in zip(expected[:3], (4, 2, 1), strict=True):
        x = torch.nn.functional.conv2d(x, kernel, stride=stride).relu()
    assert_close(encoder(pixels * 255), (x.flatten(1) @ expected[3].T).relu())


def test_the_first_kernel_sees_one_sprite_at_a_time():
    space = spaces.Box(0, 255, (88, 88, 3), np.uint8)
    encoder = Encoder(space, generator(), sprite=8)
    first = encoder.cnn[0]
    weights = {name: tuple(one.shape) for name, one in encoder.named_parameters() if name.endswith("weight")}
    assert list(weights.values()) == [(32, 3, 8, 8), (64, 32, 3, 3), (64, 64, 3, 3), (512, 64 * 7 * 7)]
    blank = torch.zeros(1, 88, 88, 3, dtype=torch.uint8)
    drawn = blank.clone()
    drawn[0, 8:16, 80:, :] = 255  # the sprite in row 1, column 10
    changed = (first(drawn.permute(0, 3, 1, 2) / 255) - first(blank.permute(0, 3, 1, 2) / 255)).abs().sum(1)
    assert changed.nonzero().tolist() == [[0, 1, 10]]
    assert encoder(drawn).shape == (1, 512)
    for shape in ((36, 36, 3), (168, 240, 3), (12, 12, 4)):  # few and many
        space = spaces.Box(0, 255, shape, np.uint8)
        assert Encoder(space, generator(), sprite=12)(batch_of(space, 2)).shape == (2, 512)


def test_images_of_no_whole_sprites_are_refused():
    with pytest.raises(UsageError, match="multiples of 8 pixels, but this env's are 84 x 90. Leave it out"):
        Encoder(spaces.Box(0, 255, (84, 90, 3), np.uint8), generator(), sprite=8)


def test_rows_of_bytes_are_divided_by_255_unless_they_were_normalised():
    encoder = Encoder(spaces.Box(0, 255, (2,), np.uint8), generator())
    assert_close(encoder(torch.tensor([[51, 255]], dtype=torch.uint8)), torch.tensor([[0.2, 1.0]]))
    assert_close(encoder(torch.tensor([[-1.5, 2.0]])), torch.tensor([[-1.5, 2.0]]))


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


def test_the_last_layers_start_as_the_references_have_them():
    policy = ActorCritic(spaces.Box(-1, 1, (4,), np.float32), spaces.Discrete(2), generator())
    assert_close(policy.critic[-1].weight.norm().item(), 1.0)
    assert_close(torch.linalg.svdvals(policy.actor[-1].weight), torch.full((2,), 0.01))


@pytest.mark.parametrize(
    ("space", "remedy"),
    [(spaces.Text(5), "such as .*FlattenObservation"), (spaces.Sequence(SPEEDS), "which you have to write")],
    ids=["Text", "Sequence"],
)
def test_other_observations_are_refused_with_the_remedy(space: gym.Space[Any], remedy: str):
    with pytest.raises(UsageError, match=f"MultiBinary observations, but this env has .* with a wrapper, {remedy}"):
        ActorCritic(space, spaces.Discrete(2), generator())


@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
def test_spaces_of_no_numbers_are_refused(dtype: Any):
    with pytest.raises(UsageError, match="at least one number, but this env has"):
        ActorCritic(spaces.Box(0, 1, (0,), dtype), spaces.Discrete(2), generator())
    with pytest.raises(UsageError, match="at least one number, but this env has"):
        ActorCritic(spaces.Dict(nothing=spaces.Box(0, 1, (0,), dtype)), spaces.Discrete(2), generator())
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


class TestMixedObservations:
    def test_the_features_of_each_part_stand_in_the_order_of_the_keys(self):
        space = spaces.Dict([("turn", spaces.Discrete(3)), ("image", IMAGE), ("at", SPEEDS)])
        encoder = Encoder(space, generator())
        image, at = batch_of(IMAGE, 2), torch.tensor([[0.5, -1.0], [0.0, 2.0]])
        features = encoder(as_observation({"turn": torch.tensor([2, 0]), "image": image, "at": at}))
        assert kind_of(space) == "mixed"
        assert encoder.num_features == 2 + 512 + 3
        assert_close(features[:, :2], at)
        assert_close(features[:, 2:514], Encoder(IMAGE, generator())(image))
        assert features[:, 514:].tolist() == [[0, 0, 1], [1, 0, 0]]

    def test_the_order_of_a_dict_changes_no_weights(self):
        parts = [("a", IMAGE), ("b", spaces.Box(0, 255, (3, 3), np.uint8))]
        one, other = (Encoder(spaces.Dict(order), generator()) for order in (parts, parts[::-1]))
        obs = as_observation({name: batch_of(part, 2) for name, part in parts})
        assert torch.equal(one(obs), other(obs))

    def test_tuples_and_dicts_may_lie_in_one_another(self):
        space = spaces.Tuple([spaces.Dict({"at": SPEEDS, "on": spaces.MultiBinary(2)}), spaces.Tuple([SPEEDS])])
        speeds, on = torch.tensor([[0.25, 0.5]]), torch.tensor([[1, 0]], dtype=torch.int8)
        obs = as_observation(({"at": speeds, "on": on}, (2 * speeds,)))
        assert set(obs.keys(include_nested=True, leaves_only=True)) == {("0", "at"), ("0", "on"), ("1", "0")}
        assert Encoder(space, generator())(obs).tolist() == [[0.25, 0.5, 0, 1, 1, 0, 0.5, 1]]

    def test_sprites_are_of_the_images_alone(self):
        space = spaces.Dict({"rgb": spaces.Box(0, 255, (88, 88, 3), np.uint8), "ready": spaces.Box(0, 1, ())})
        encoder = Encoder(space, generator(), sprite=8)
        obs = as_observation({"rgb": batch_of(space["rgb"], 2), "ready": torch.ones(2)})
        assert encoder(obs).shape == (2, 513)
        assert (32, 3, 8, 8) in [weights.shape for weights in encoder.parameters()]

    def test_hidden_layers_are_behind_an_image_with_numbers_but_not_behind_an_image(self):
        mixed, alone = spaces.Dict({"image": IMAGE, "at": SPEEDS}), IMAGE
        policies = [ActorCritic(space, spaces.Discrete(3), generator()) for space in (mixed, alone)]
        assert [policy.encoder.needs_hidden for policy in policies] == [True, False]
        assert [len(policy.actor) for policy in policies] == [5, 1]
        params, values = policies[0](as_observation({"image": batch_of(IMAGE, 2), "at": torch.ones(2, 2)}))
        assert (params.shape, values.shape) == ((2, 3), (2,))

    @pytest.mark.parametrize(
        "part",
        [spaces.Text(5), spaces.Sequence(spaces.Discrete(2)), spaces.Graph(SPEEDS, None)],
        ids=["Text", "Sequence", "Graph"],
    )
    def test_parts_without_a_fixed_shape_are_named(self, part: gym.Space[Any]):
        with pytest.raises(ConfigError, match=r"^map\.1 is .*: without a fixed shape"):
            Encoder(spaces.Dict({"map": spaces.Tuple([SPEEDS, part])}), generator())
