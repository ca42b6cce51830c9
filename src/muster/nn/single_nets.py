"""One agent's network of the usual layers, with the options of TorchRL's ``MLP`` and ``ConvNet``."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from muster.errors import ConfigError, SpecMismatch

Size = int | tuple[int, int]
LayerClass = Callable[..., Any]
Options = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None
# The class of some layers, None for none of them, and its options: one dict for all layers, or one for each.
Kind = tuple[LayerClass | None, Options]


def mlp(
    n_inputs: int, n_outputs: int | Sequence[int], hidden: Sequence[int], *,
    layer: Kind, norm: Kind, activation: Kind, dropout: float | None, bias_last_layer: bool,
    single_bias_last_layer: bool, activate_last_layer: bool, device: torch.device | str | None,
) -> nn.Sequential:  # fmt: skip
    """Linear layers, after each but the last dropout, norm and activation; [B, n_inputs] to [B, *n_outputs]."""
    depth = len(hidden)
    n_flat = math.prod(n_outputs) if isinstance(n_outputs, Sequence) else n_outputs
    linears = _makers("layer_kwargs", layer, depth + 1, device)
    norms = _makers("norm_kwargs", norm, depth + activate_last_layer, device)
    activations = _makers("activation_kwargs", activation, depth + activate_last_layer, device)
    layers: list[nn.Module] = []
    for i, (n_in, n_out) in enumerate(pairwise([n_inputs, *hidden, n_flat])):
        bias = linears[i].keywords.get("bias", bias_last_layer or i < depth)
        single_bias = bias and single_bias_last_layer and i == depth
        layers.append(linears[i](n_in, n_out, bias=bias and not single_bias))
        if single_bias:
            layers.append(SharedBias(device))
        if i < depth or activate_last_layer:
            if dropout is not None:
                layers.append(nn.Dropout(dropout))
            layers += [make[i]() for make in (norms, activations) if make]
    if isinstance(n_outputs, Sequence):
        layers.append(nn.Unflatten(-1, tuple(n_outputs)))
    return nn.Sequential(*layers)


def conv_net(
    n_channels: int, convolutions: Sequence[tuple[int, Size, Size, Size]], *,
    activation: Kind, norm: Kind, aggregator: Kind, squeeze_output: bool, device: torch.device | str | None,
) -> nn.Sequential:  # fmt: skip
    """Convolutions, after each activation and norm, then the aggregator; [B, n_channels, H, W] to [B, ...].

    convolutions: the output channels, kernel size, stride and padding of each.
    """
    norms = _makers("norm_kwargs", norm, len(convolutions), device)
    activations = _makers("activation_kwargs", activation, len(convolutions), device)
    layers: list[nn.Module] = []
    for i, (n_out, kernel, stride, padding) in enumerate(convolutions):
        layers.append(nn.Conv2d(n_channels, n_out, kernel, stride, padding, device=device))
        n_channels = n_out
        layers += [make[i]() for make in (activations, norms) if make]
    layers += [make() for make in _makers("aggregator_kwargs", aggregator, 1, device)]
    if squeeze_output:
        layers.append(SqueezePixel())
    return nn.Sequential(*layers)


class SharedBias(nn.Module):
    """One bias for all features."""

    def __init__(self, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1, device=device))

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


class SqueezePixel(nn.Module):
    """Leaves out the last two axes, which must be of size 1."""

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim < 2 or x.shape[-2:] != (1, 1):
            raise SpecMismatch(f"squeeze_output=True needs images of one pixel at the end, got {list(x.shape)}")
        return x.squeeze(-1).squeeze(-1)


class Calling(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)

    def extra_repr(self) -> str:
        return str(self.function)


def _makers(name: str, kind: Kind, count: int, device: torch.device | str | None) -> list[partial[nn.Module]]:
    """The functions that make ``count`` layers, one for each; none without a class. Raises ConfigError."""
    layer_class, options = kind
    if options is None or isinstance(options, Mapping):
        options = [options or {}] * count
    if len(options) != count:
        raise ConfigError(f"{name} has {len(options)} entries for {count} layers; give as many, or one dict for all")
    return [] if layer_class is None else [partial(_made, layer_class, device, **one) for one in options]


def _made(kind: LayerClass, device: torch.device | str | None, *args: Any, **options: Any) -> nn.Module:
    takes_it = "device" in inspect.signature(kind).parameters
    made = kind(*args, **options, **({"device": device} if takes_it else {}))
    return made.to(device) if isinstance(made, nn.Module) else Calling(made)
