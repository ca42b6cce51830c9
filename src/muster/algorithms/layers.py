"""Layers with orthogonal weights, drawn from a generator that the caller seeds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "elu": nn.ELU, "gelu": nn.GELU}


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
