"""One agent's network of the usual layers, with the options of TorchRL's ``MLP`` and ``ConvNet``."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from muster.errors import ConfigError, SpecMismatch

Size = int | tuple[int, int]
LayerClass = Callable[..., Any]
Options = Mapping[str, Any] | Sequence[Mapping[str, Any]] | None


def mlp(
    n_inputs: int,
    n_outputs: int | Sequence[int],
    hidden: Sequence[int],
    *,
    activation_class: LayerClass,
    activation_kwargs: Options = None,
    norm_class: LayerClass | None = None,
    norm_kwargs: Options = None,
    dropout: float | None = None,
    bias_last_layer: bool = True,
    single_bias_last_layer: bool = False,
    layer_class: LayerClass = nn.Linear,
    layer_kwargs: Options = None,
    activate_last_layer: bool = False,
    device: torch.device | str | None = None,
) -> nn.Sequential:
    """Linear layers, after each but the last dropout, norm and activation; [B, n_inputs] to [B, *n_outputs]."""
    depth = len(hidden)
    n_flat = math.prod(n_outputs) if isinstance(n_outputs, Sequence) else n_outputs
    linear_options = _each("layer_kwargs", layer_kwargs, depth + 1)
    norm_options = _each("norm_kwargs", norm_kwargs, depth + activate_last_layer)
    activation_options = _each("activation_kwargs", activation_kwargs, depth + activate_last_layer)
    layers: list[nn.Module] = []
    for i, (n_in, n_out) in enumerate(pairwise([n_inputs, *hidden, n_flat])):
        bias = linear_options[i].pop("bias", bias_last_layer or i < depth)
        single_bias = bias and single_bias_last_layer and i == depth
        layers.append(_made(layer_class, device, n_in, n_out, bias=bias and not single_bias, **linear_options[i]))
        if single_bias:
            layers.append(SharedBias(device))
        if i < depth or activate_last_layer:
            if dropout is not None:
                layers.append(nn.Dropout(dropout))
            if norm_class is not None:
                layers.append(_made(norm_class, device, **norm_options[i]))
            layers.append(_made(activation_class, device, **activation_options[i]))
    if isinstance(n_outputs, Sequence):
        layers.append(nn.Unflatten(-1, tuple(n_outputs)))
    return nn.Sequential(*layers)


def conv_net(
    n_channels: int,
    num_cells: Sequence[int],
    kernel_sizes: Sequence[Size],
    strides: Sequence[Size],
    paddings: Sequence[Size],
    *,
    activation_class: LayerClass,
    activation_kwargs: Options = None,
    norm_class: LayerClass | None = None,
    norm_kwargs: Options = None,
    aggregator_class: LayerClass | None = nn.Flatten,
    aggregator_kwargs: Mapping[str, Any] | None = None,
    squeeze_output: bool = False,
    device: torch.device | str | None = None,
) -> nn.Sequential:
    """Convolutions, after each activation and norm, then the aggregator; [B, n_channels, H, W] to [B, ...]."""
    norm_options = _each("norm_kwargs", norm_kwargs, len(num_cells))
    activation_options = _each("activation_kwargs", activation_kwargs, len(num_cells))
    layers: list[nn.Module] = []
    channels = pairwise([n_channels, *num_cells])
    sizes = zip(channels, kernel_sizes, strides, paddings, strict=True)
    for i, ((n_in, n_out), kernel, stride, padding) in enumerate(sizes):
        layers.append(nn.Conv2d(n_in, n_out, kernel, stride, padding, device=device))
        layers.append(_made(activation_class, device, **activation_options[i]))
        if norm_class is not None:
            layers.append(_made(norm_class, device, **norm_options[i]))
    if aggregator_class is not None:
        layers.append(_made(aggregator_class, device, **(aggregator_kwargs or {})))
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


def _each(name: str, options: Options, count: int) -> list[dict[str, Any]]:
    """The options of each of ``count`` layers."""
    if options is None or isinstance(options, Mapping):
        return [dict(options or {}) for _ in range(count)]
    if len(options) != count:
        raise ConfigError(f"{name} has {len(options)} entries for {count} layers; give as many, or one dict for all")
    return [dict(one) for one in options]


def _made(kind: LayerClass, device: torch.device | str | None, *args: Any, **options: Any) -> nn.Module:
    """A layer on ``device``, built there where its class can do that."""
    if "device" in inspect.signature(kind).parameters:
        made = kind(*args, device=device, **options)
    else:
        made = kind(*args, **options)
        made = made.to(device) if isinstance(made, nn.Module) and device is not None else made
    return made if isinstance(made, nn.Module) else Calling(made)
