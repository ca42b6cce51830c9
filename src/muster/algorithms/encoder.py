"""Observations as the float features that a network takes: each kind of space has a first layer of its own.

Layers have orthogonal weights, drawn from a generator that the caller seeds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from muster.errors import UsageError

ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "elu": nn.ELU, "gelu": nn.GELU}
Kind = Literal["choices", "images", "codes", "grid", "bytes", "numbers"]

MIN_PIXELS = 36  # of the shorter side: what the CNN's three kernels need
MAX_CODES = 32  # so many integers are told apart by one-hot codes
EMBEDDING = 8  # numbers for each code of a byte grid


def kind_of(space: gym.Space[Any]) -> Kind:
    """How observations of ``space`` are read.

    choices: Discrete, MultiDiscrete and MultiBinary, one-hot.  images: uint8 Boxes of at least 36 x 36 pixels, grey,
    with channels first or last, or several of these stacked.  codes: other Boxes of at most 32 whole numbers from 0 on,
    one-hot.  grid: other uint8 Boxes of two or three dimensions, such as MiniGrid's, each of whose 256 codes is
    embedded, by channel.  bytes: other uint8 Boxes, such as Atari's RAM, divided by 255 or normalised.  numbers: all
    other Boxes, as they are or normalised.

    Raises UsageError for a Box of no numbers.
    """
    if not isinstance(space, spaces.Box):
        return "choices"
    shape = space.shape
    if not math.prod(shape):
        raise UsageError(f"PPO takes Boxes of at least one number, but this env has {space}.")
    few = np.issubdtype(space.dtype, np.integer) and space.low.min() >= 0 and space.high.max() < MAX_CODES
    if space.dtype == np.uint8 and pixel_axes(shape) is not None and not (few and len(shape) == 2):
        return "images"
    if few:
        return "codes"
    if space.dtype != np.uint8:
        return "numbers"
    return "grid" if len(shape) in (2, 3) else "bytes"


def pixel_axes(shape: Sequence[int]) -> tuple[int, int] | None:
    """Which dims of images ``[H, W]``, ``[H, W, C]``, ``[C, H, W]``, or stacked ``[S, ...]`` are height and width.

    The channels are first where there are fewer of them than columns.  None for other shapes, and below 36 x 36.
    """
    if not 2 <= len(shape) <= 4:
        return None
    first = int(len(shape) == 4)  # frames of other times are channels, too
    if len(shape) > 2 and shape[-1] > shape[first]:
        first += 1
    return (first, first + 1) if min(shape[first : first + 2]) >= MIN_PIXELS else None


class Encoder(nn.Module):
    """Turns observations [B, *obs_shape] into float32 features [B, F], as `kind_of` says.

    The CNN is that of Mnih et al. 2015 (doi:10.1038/nature14236).
    """

    def __init__(self, space: gym.Space[Any], rng: torch.Generator | None) -> None:
        super().__init__()
        shape = space.shape or ()
        self.kind = kind_of(space)
        self.channels_last = len(shape) == 3 and shape[2] <= shape[0]
        self.num_features = math.prod(shape)
        self.cnn: nn.Module | None = None
        if self.kind == "choices":
            self.choices = Choices(space, "observations")
            self.num_features = sum(self.choices.nvec)
        elif self.kind == "images":
            assert isinstance(space, spaces.Box)
            self.brightest = max(float(space.high.max()), 1.0)
            axes = pixel_axes(shape)
            assert axes is not None
            height, width = (shape[axis] for axis in axes)
            self.from_axes = (axes[0] + 1, axes[1] + 1)  # after the batch's
            self.image_shape = (math.prod(shape) // (height * width), height, width)
            self.cnn = _cnn(*self.image_shape, rng)
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
            self.first_rows = firsts if self.channels_last or channels == 1 else firsts.view(-1, 1, 1)
            self.num_features *= EMBEDDING

    def forward(self, obs: Tensor) -> Tensor:
        if self.kind == "numbers":
            return obs.reshape(len(obs), -1).float()
        if self.kind == "bytes":
            numbers = obs.reshape(len(obs), -1).float()
            return numbers if obs.is_floating_point() else numbers / 255  # normalised ones are floats
        if self.kind == "choices":
            columns = self.choices.to_columns(obs).unbind(-1)
            one_hots = [nn.functional.one_hot(c, n) for c, n in zip(columns, self.choices.nvec, strict=True)]
            return torch.cat(one_hots, -1).float()
        if self.kind == "codes":
            codes = obs.reshape(len(obs), -1).long().clamp(0, self.num_codes - 1)
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


class Choices:
    """A Discrete, MultiDiscrete or MultiBinary space as K choices, the k-th among ``nvec[k]``, counted from 0."""

    def __init__(self, space: gym.Space[Any], what: str) -> None:
        if isinstance(space, spaces.Discrete):
            nvec, starts = np.array([space.n]), np.array([space.start])
        elif isinstance(space, spaces.MultiDiscrete):
            nvec, starts = space.nvec, space.start
        elif isinstance(space, spaces.MultiBinary):
            nvec, starts = np.full(space.shape, 2), np.zeros(space.shape)
        else:
            flattens = what == "observations" and space.is_np_flattenable
            such_as = "such as gymnasium.wrappers.FlattenObservation" if flattens else "which you have to write"
            raise UsageError(
                f"PPO takes Box, Discrete, MultiDiscrete and MultiBinary {what}, but this env has {space}. Turn them "
                f"into one of these with a wrapper, {such_as}."
            )
        self.nvec = [int(n) for n in nvec.flat]
        self.starts = torch.from_numpy(starts.reshape(-1).astype(np.int64))
        self.shape = space.shape or ()
        self.dtype = space.dtype

    def to_columns(self, elements: Tensor) -> Tensor:
        """The space's elements [B, *shape] as choices [B, K] int64."""
        return elements.reshape(-1, len(self.nvec)).long() - self.starts

    def to_elements(self, columns: Tensor) -> np.ndarray[Any, Any]:
        """Choices [B, K] as the space's elements [B, *shape]."""
        return (columns + self.starts).numpy().astype(self.dtype).reshape(-1, *self.shape)


def _cnn(channels: int, height: int, width: int, rng: torch.Generator | None) -> nn.Sequential:
    layers: list[nn.Module] = []
    for filters, kernel, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
        layers += [layer(nn.Conv2d, channels, filters, kernel, stride, rng=rng), nn.ReLU()]
        height, width = ((size - kernel) // stride + 1 for size in (height, width))
        channels = filters
    return nn.Sequential(*layers, nn.Flatten(), layer(nn.Linear, channels * height * width, 512, rng=rng), nn.ReLU())


def mlp(sizes: Sequence[int], *, activation: str, gain: float, rng: torch.Generator | None) -> nn.Sequential:
    """Linear layers with an activation (a key of ACTIVATIONS) between them; ``gain`` is the last layer's."""
    layers: list[nn.Module] = []
    for i in range(len(sizes) - 2):
        layers += [layer(nn.Linear, sizes[i], sizes[i + 1], rng=rng), ACTIVATIONS[activation]()]
    return nn.Sequential(*layers, layer(nn.Linear, sizes[-2], sizes[-1], rng=rng, gain=gain))


def layer(
    kind: type[nn.Linear] | type[nn.Conv2d], *sizes: int, rng: torch.Generator | None, gain: float = 2**0.5
) -> nn.Module:
    """A layer with orthogonal weights and zero biases. It is built empty: torch's own draw would use its global rng."""
    built: nn.Linear | nn.Conv2d = nn.utils.skip_init(kind, *sizes)  # type: ignore[no-untyped-call]  # torch's gap
    nn.init.orthogonal_(built.weight, gain, generator=rng)
    if built.bias is not None:
        nn.init.zeros_(built.bias)
    return built
