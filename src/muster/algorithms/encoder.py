"""Observations as the float features that a network takes: each kind of space has a first layer of its own.

Layers have orthogonal weights, drawn from a generator that the caller seeds. Observations and rewards may be normalised
by running statistics, as Stable-Baselines3's ``VecNormalize`` does it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict, TensorDictBase  # type: ignore[import-untyped]  # ships no types
from torch import Tensor, nn

from muster.errors import UsageError
from muster.rollout.fields import FieldTree, Key
from muster.spaces.masks import MASK, choices_of

ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "elu": nn.ELU, "gelu": nn.GELU}
Kind = Literal["choices", "images", "codes", "grid", "bytes", "numbers", "mixed"]

MEASURED = ("numbers", "bytes", "mixed")  # kinds that may be normalised

MIN_PIXELS = 8  # of the shorter side
LARGE = 36  # pixels of the shorter side: what the three kernels of Mnih et al. need
LARGEST_MAP = 25  # cells of a side: the largest of MiniGrid's envs, which FullyObsWrapper shows as [W, H, 3]
MOST_CHANNELS = 12  # of a small image: four frames of colours
MAX_CODES = 32  # so many integers have one-hot codes
EMBEDDING = 8  # numbers for each code of a byte grid
CLIP = 10.0  # in standard deviations
EPSILON = 1e-8
# Of the three parts of a batch's observations: in the rows, after the last of them, at episodes' ends.
PLACES: tuple[Key, ...] = ((), ("collector", "last"), ("collector", "final"))


def kind_of(space: gym.Space[Any]) -> Kind:
    """How observations of ``space`` are read.

    choices: Discrete, MultiDiscrete and MultiBinary, one-hot.  images: uint8 Boxes of at least 8 x 8 pixels, grey,
    with channels first or last, or several of these stacked, as `_is_image` has it.  codes: other Boxes of at most 32
    whole numbers from 0 on, one-hot.  grid: other uint8 Boxes of two or three dimensions, such as MiniGrid's; each of
    their 256 codes is embedded, by channel.  bytes: other uint8 Boxes, such as Atari's RAM, divided by 255 or
    normalised.  numbers: all other Boxes, as they are or normalised.  mixed: Dict and Tuple; each part,
    as `leaves_of` has them, is read by its own kind.

    Raises UsageError for a Box of no numbers.
    """
    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        return "mixed"
    if not isinstance(space, spaces.Box):
        return "choices"
    shape = space.shape
    if not math.prod(shape):
        raise UsageError(f"PPO takes Boxes of at least one number, but this env has {space}.")
    few = np.issubdtype(space.dtype, np.integer) and space.low.min() >= 0 and space.high.max() < MAX_CODES
    if space.dtype == np.uint8 and not (few and len(shape) == 2) and _is_image(shape, space.high.max()):
        return "images"
    if few:
        return "codes"
    if space.dtype != np.uint8:
        return "numbers"
    return "grid" if len(shape) in (2, 3) else "bytes"


def pixel_axes(shape: Sequence[int]) -> tuple[int, int] | None:
    """Which dims of images ``[H, W]``, ``[H, W, C]``, ``[C, H, W]``, or stacked ``[S, ...]`` are height and width.

    The channels are first where there are fewer of them than columns.  None for other shapes, and below 8 x 8.
    """
    if not 2 <= len(shape) <= 4:
        return None
    first = int(len(shape) == 4)  # frames of other times are channels, too
    if len(shape) > 2 and shape[-1] > shape[first]:
        first += 1
    return (first, first + 1) if min(shape[first : first + 2]) >= MIN_PIXELS else None


def _is_image(shape: Sequence[int], high: int) -> bool:
    """Says if bytes of this shape, up to ``high``, are brightness. In doubt they are codes below 36 x 36.

    Codes of up to 10, divided by 255, are next to nothing, while an image with embedded bytes is learnt slowly.
    """
    axes = pixel_axes(shape)
    if axes is None:
        return False
    height, width = (shape[axis] for axis in axes)
    side, channels = min(height, width), math.prod(shape[-3:]) // (height * width)
    if side >= LARGE:
        return True
    # MiniGrid's maps have the same space as small images in RGB with channels last. More channels are planes, one for
    # each sort of thing; where the channels are as many as the pixels of a side, they look like rows.
    is_map = shape[-1] == 3 and side <= LARGEST_MAP
    return high == 255 and channels < min(side, MOST_CHANNELS + 1) and not is_map


def leaves_of(space: gym.Space[Any]) -> dict[Key, gym.Space[Any]]:
    """The parts of a Dict or a Tuple that a policy reads, under their keys in a TensorDict, sorted by these.

    Masks, under "action_mask", are no measurements and not among them; nor are parts of no numbers.

    Raises ConfigError for a part without a fixed shape, UsageError where none is to be read.
    """
    tree = FieldTree(space, ())
    parts = zip(tree.fields, tree.spaces, strict=True)
    leaves = {field.key: leaf for field, leaf in parts if MASK not in field.key and 0 not in field.shape}
    if not leaves:
        raise UsageError(f"PPO takes observations of at least one number, but this env has {space}.")
    return dict(sorted(leaves.items()))


def as_observation(obs: Any, dims: int = 1) -> Any:
    """A policy's argument as `Encoder` takes it: a tensor as it is, dicts and tuples as a TensorDict [B].

    A tuple's positions become keys, "0", "1" and so on.  dims: of the batch; 2 for agents.
    """
    if isinstance(obs, tuple):
        obs = dict(enumerate(obs))
    if isinstance(obs, TensorDictBase) or not isinstance(obs, Mapping):
        return obs
    parts = {str(name): as_observation(part, dims) for name, part in obs.items()}
    return TensorDict(parts, batch_size=next(iter(parts.values())).shape[:dims])


def observed(batch: TensorDictBase, space: Any, name: Key, dims: int = 1) -> tuple[Any, Any, Any]:
    """A collector's observations as `Encoder` takes them, at each of PLACES.

    name: ("observation",), or (group, "observation").  dims: of each of the last two; the rows have one more.
    """

    def at(place: Key, dims: int) -> Any:
        # After the rows it is an UnbatchedTensor, which a TensorDict would neither split nor flatten.
        if kind_of(space) != "mixed":
            return batch[(*place, *name)].as_subclass(Tensor)
        under = () if len(name) == 1 and isinstance(space, spaces.Dict) else name
        parts = {key: batch[(*place, *under, *key)].as_subclass(Tensor) for key in leaves_of(space)}
        return TensorDict(parts, batch_size=next(iter(parts.values())).shape[:dims])

    rows, last, finals = PLACES
    return at(rows, dims + 1), at(last, dims), at(finals, dims)


class Encoder(nn.Module):
    """Turns observations [B, *obs_shape] into float32 features [B, F], as `kind_of` says.

    Those of a Dict or a Tuple are a TensorDict [B] with the keys of `leaves_of`, as `as_observation` makes it; each
    part has an encoder, and their features stand one behind the other, in the order of the keys.

    The CNN is that of Mnih et al. 2015 (doi:10.1038/nature14236), with 3 x 3 kernels below 36 x 36 pixels.

    sprite: pixels of a side of the square pictures that images are laid out of, such as Melting Pot's 8. The first
    kernel sees one of them at a time, 3 x 3 kernels follow.

    needs_hidden: whether hidden layers belong behind the features; the CNN of images ends with one.

    Raises UsageError for images that are not made of whole sprites, and for other spaces as `kind_of` and `leaves_of`
    do.
    """

    first_rows: Tensor

    def __init__(self, space: gym.Space[Any], rng: torch.Generator | None, sprite: int | None = None) -> None:
        super().__init__()
        shape = space.shape or ()
        self.kind = kind_of(space)
        self.needs_hidden = self.kind != "images"
        self.channels_last = len(shape) == 3 and shape[2] <= shape[0]
        self.num_features = math.prod(shape)
        self.cnn: nn.Module | None = None
        if self.kind == "mixed":
            leaves = leaves_of(space)
            encoders = [Encoder(leaf, rng, sprite) for leaf in leaves.values()]
            self.keys, self.leaves = tuple(leaves), nn.ModuleList(encoders)
            self.num_features = sum(encoder.num_features for encoder in encoders)
        elif self.kind == "choices":
            self.choices = Choices(space, "observations")
            self.num_features = sum(self.choices.nvec)
        elif self.kind == "images":
            assert isinstance(space, spaces.Box)
            self.brightest = max(float(space.high.max()), 1.0)
            axes = pixel_axes(shape)
            assert axes is not None
            height, width = (shape[axis] for axis in axes)
            if sprite is not None and (height % sprite or width % sprite):
                raise UsageError(
                    f"sprite={sprite} is for images with sides of multiples of {sprite} pixels, but this env's are "
                    f"{height} x {width}. Leave it out, or crop them with a wrapper."
                )
            self.from_axes = (axes[0] + 1, axes[1] + 1)  # after the batch's
            self.image_shape = (math.prod(shape) // (height * width), height, width)
            self.cnn = _cnn(*self.image_shape, rng, sprite)
            self.num_features = 512
        elif self.kind == "codes":
            assert isinstance(space, spaces.Box)
            self.num_codes = int(space.high.max(initial=0)) + 1
            self.num_features *= self.num_codes
        elif self.kind == "grid":
            channels = shape[-1 if self.channels_last else 0] if len(shape) == 3 else 1
            # A table for each channel, one below the other: what a code means depends on its channel.
            tables = torch.empty(channels * 256, EMBEDDING).normal_(generator=rng)
            self.embeddings = nn.Parameter(tables)
            firsts = 256 * torch.arange(channels)
            rows = firsts if self.channels_last or channels == 1 else firsts.view(-1, 1, 1)
            self.register_buffer("first_rows", rows, persistent=False)
            self.num_features *= EMBEDDING

    def forward(self, obs: Tensor | TensorDictBase) -> Tensor:
        if isinstance(obs, TensorDictBase):
            return torch.cat([leaf(obs[key]) for key, leaf in zip(self.keys, self.leaves, strict=True)], -1)
        if self.kind in ("numbers", "bytes"):
            numbers = obs.reshape(obs.shape[0], -1).float()
            is_raw = self.kind == "bytes" and not obs.is_floating_point()  # normalised bytes are floats
            return numbers / 255 if is_raw else numbers
        if self.kind == "choices":
            columns = zip(self.choices.to_columns(obs).unbind(-1), self.choices.nvec, strict=True)
            # The zeros of an agent that is not there need not be choices.
            one_hots = [nn.functional.one_hot(column.clamp(0, n - 1), n) for column, n in columns]
            return torch.cat(one_hots, -1).float()
        if self.kind == "codes":
            codes = obs.reshape(obs.shape[0], -1).long().clamp(0, self.num_codes - 1)
            return nn.functional.one_hot(codes, self.num_codes).flatten(1).float()
        if self.kind == "grid":
            rows = obs.long() + self.first_rows
            return nn.functional.embedding(rows, self.embeddings).flatten(1)
        assert self.cnn is not None
        images = obs.movedim(self.from_axes, (-2, -1)).reshape(-1, *self.image_shape)
        # By pixels, their channels side by side: oneDNN's convolutions and their gradients are faster so.
        pixels = images.float().contiguous(memory_format=torch.channels_last)
        features: Tensor = self.cnn(pixels / self.brightest)
        return features


class Choices(nn.Module):
    """A Discrete, MultiDiscrete or MultiBinary space as K choices, the k-th among ``nvec[k]``, counted from 0."""

    starts: Tensor

    def __init__(self, space: gym.Space[Any], what: str) -> None:
        super().__init__()
        parts = choices_of(space)
        if parts is None:
            flattens = what == "observations" and space.is_np_flattenable
            such_as = "such as gymnasium.wrappers.FlattenObservation" if flattens else "which you have to write"
            raise UsageError(
                f"PPO takes Box, Discrete, MultiDiscrete and MultiBinary {what}, but this env has {space}. Turn them "
                f"into one of these with a wrapper, {such_as}."
            )
        nvec, starts = parts
        self.nvec = [int(n) for n in nvec]
        self.register_buffer("starts", torch.from_numpy(starts.astype(np.int64)), persistent=False)
        self.shape = space.shape or ()
        self.dtype = torch.from_numpy(np.empty(0, space.dtype)).dtype

    def to_columns(self, elements: Tensor) -> Tensor:
        """The space's elements [B, *shape] as choices [B, K] int64."""
        return elements.reshape(-1, len(self.nvec)).long() - self.starts

    def to_elements(self, columns: Tensor) -> Tensor:
        """Choices [..., K] as the space's elements [..., *shape]."""
        return (columns + self.starts).to(self.dtype).reshape(*columns.shape[:-1], *self.shape)


def _cnn(channels: int, height: int, width: int, rng: torch.Generator | None, sprite: int | None) -> nn.Sequential:
    layers: list[nn.Module] = []
    sizes, large = [height, width], sprite is None and min(height, width) >= LARGE
    for filters, size, step in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
        # Kernel, stride and padding. 3 x 3 kernels see each pixel, and leave 2 to 7 of a side of 8 to 35.
        fitting = [(min(3, pixels), 1 + (pixels > 11), int(pixels > 11)) for pixels in sizes]
        windows = [(size, step, 0)] * 2 if large else fitting
        if sprite is not None and not layers:
            windows = [(sprite, sprite, 0)] * 2
        kernels, strides, paddings = zip(*windows, strict=True)
        layers += [layer(nn.Conv2d, channels, filters, kernels, strides, paddings, rng=rng), nn.ReLU()]
        sizes = [(n + 2 * padding - k) // stride + 1 for n, (k, stride, padding) in zip(sizes, windows, strict=True)]
        channels = filters
    return nn.Sequential(*layers, nn.Flatten(), layer(nn.Linear, channels * math.prod(sizes), 512, rng=rng), nn.ReLU())


def mlp(sizes: Sequence[int], *, activation: str, gain: float, rng: torch.Generator | None) -> nn.Sequential:
    """Linear layers with an activation (a key of ACTIVATIONS) between them; ``gain`` is the last layer's."""
    layers: list[nn.Module] = []
    for i in range(len(sizes) - 2):
        layers += [layer(nn.Linear, sizes[i], sizes[i + 1], rng=rng), ACTIVATIONS[activation]()]
    return nn.Sequential(*layers, layer(nn.Linear, sizes[-2], sizes[-1], rng=rng, gain=gain))


def layer(kind: Any, *sizes: int | tuple[int, ...], rng: torch.Generator | None, gain: float = 2**0.5) -> Any:
    """A layer, or a GRU's cell, with orthogonal weights and zero biases.

    It is built empty: torch's own draw would use its global rng.
    """
    built: nn.Module = nn.utils.skip_init(kind, *sizes)  # type: ignore[no-untyped-call]  # torch's gap
    for name, one in built.named_parameters():
        if name.startswith("weight"):
            nn.init.orthogonal_(one, gain, generator=rng)
        else:
            nn.init.zeros_(one)
    return built


class RunningMoments(nn.Module):
    """Mean and variance, float64 ``[*shape]``, of all rows seen so far (Chan et al. 1979, the pairwise update).

    They are buffers, which follow wherever the weights go.
    """

    mean: Tensor
    var: Tensor

    def __init__(self, shape: Sequence[int] = ()) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(tuple(shape), dtype=torch.float64))
        self.register_buffer("var", torch.ones(tuple(shape), dtype=torch.float64))
        self.count = 0

    def update(self, rows: Tensor) -> None:
        """Adds rows ``[B, *shape]`` to the statistics."""
        if not len(rows):
            return
        var, mean = torch.var_mean(rows.double(), dim=0, correction=0)
        total = self.count + len(rows)
        delta, share = mean - self.mean, len(rows) / total
        self.var = self.var * (1 - share) + var * share + delta.square() * (share * (1 - share))
        self.mean = self.mean + delta * share
        self.count = total

    def to_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "var": self.var, "count": self.count}

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from `to_dict`."""
        parts = (state[name].to(self.mean.device) for name in ("mean", "var"))
        self.mean, self.var = (part.expand_as(self.mean) for part in parts)  # refuses another shape
        self.count = int(state["count"])


class ObservationNormalizer(nn.Module):
    """Subtracts the running mean from observations, divides by the running deviation, and clips to 10 deviations.

    Each measurement in a Dict or a Tuple has statistics of its own; the other parts stay as they are.

    space: of one env's observations, or the shape of numbers.
    """

    moments: RunningMoments

    def __init__(self, space: gym.Space[Any] | Sequence[int]) -> None:
        super().__init__()
        self.is_mixed = isinstance(space, (spaces.Dict, spaces.Tuple))
        if isinstance(space, (spaces.Dict, spaces.Tuple)):
            leaves = leaves_of(space)
            self.keys = [key for key, leaf in leaves.items() if kind_of(leaf) in ("numbers", "bytes")]
            self.leaves = nn.ModuleList(ObservationNormalizer(leaves[key]) for key in self.keys)
        else:
            self.moments = RunningMoments((space.shape or ()) if isinstance(space, gym.Space) else space)

    def forward(self, obs: Tensor | TensorDictBase) -> Tensor | TensorDictBase:
        """Normalised observations, float32 ``[B, *shape]``. obs: of any dtype. The statistics stay as they are."""
        if isinstance(obs, TensorDictBase):
            seen = obs.copy()
            for key, leaf in self._by_key():
                seen[key] = leaf(obs[key])
            return seen
        scale = (self.moments.var + EPSILON).rsqrt()
        return ((obs.double() - self.moments.mean) * scale).clamp(-CLIP, CLIP).float()

    def update(self, rows: Tensor | TensorDictBase) -> None:
        """Adds rows ``[B, *shape]``, or a TensorDict ``[B]`` of them, to the statistics."""
        if isinstance(rows, TensorDictBase):
            for key, leaf in self._by_key():
                leaf.update(rows[key])
        else:
            self.moments.update(rows)

    def to_dict(self) -> dict[str, Any]:
        return {"parts": [leaf.to_dict() for _, leaf in self._by_key()]} if self.is_mixed else self.moments.to_dict()

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from `to_dict`."""
        if self.is_mixed:
            for (_, leaf), part in zip(self._by_key(), state["parts"], strict=True):
                leaf.load(part)
        else:
            self.moments.load(state)

    def _by_key(self) -> Iterator[tuple[Key, Any]]:
        return zip(self.keys, self.leaves, strict=True)


class RewardNormalizer:
    """Divides rewards by the running deviation of the discounted returns, and clips to 10; their sign is kept.

    returns: those of episodes so far, which are carried from rollout to rollout, and start from 0 with each episode.

    shape: of one step's rewards: (N,) of N envs, or (N, A) of A agents in each.  device: of rewards.
    """

    def __init__(self, shape: Sequence[int], gamma: float, device: torch.device | None = None) -> None:
        self.moments = RunningMoments().to(device)
        self._gamma = gamma
        self.returns = torch.zeros(tuple(shape), dtype=torch.float64, device=device)

    def update(self, rewards: Tensor, done: Tensor, mask: Tensor) -> Tensor:
        """Normalised rewards, float32 ``[T, *shape]``.

        rewards: float32, and done, mask: bool, of that shape; rows where mask is False count for nothing.
        All rows are divided by the same number: the deviation with this rollout counted in.
        """
        returns = torch.zeros_like(rewards, dtype=torch.float64)
        for t, (reward, ended, kept) in enumerate(zip(rewards, done, mask, strict=True)):
            following = self.returns * self._gamma + reward
            returns[t] = self.returns = torch.where(kept, following, self.returns)
            self.returns = self.returns.masked_fill(ended, 0.0)
        self.moments.update(returns[mask])
        scale = (self.moments.var + EPSILON).rsqrt().float()
        return (rewards * scale).clamp(-CLIP, CLIP)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from the state of ``moments``, with returns of 0: envs that start again begin new episodes."""
        self.moments.load(state)
        self.returns.zero_()
