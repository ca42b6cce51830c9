"""Multi-agent networks of the usual layers, with TorchRL's argument names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from muster.arguments import as_whole
from muster.errors import ConfigError, WrongType
from muster.nn.multi_agent_net import MultiAgentNet
from muster.nn.stacked import channels_last

Size = int | tuple[int, int]


class MultiAgentMLP(MultiAgentNet):
    """A multi-layer perceptron for each agent, or one for all.

    Input ``[*B, A, n_agent_inputs]``, output ``[*B, A, n_agent_outputs]``.

    n_agent_inputs: size of one agent's input; if ``centralised`` each network takes ``A`` times as many.
    centralised: every agent sees all agents' inputs.  ``centralized`` is the same.
    share_params: one network for all agents.
    depth, num_cells: hidden layers and their sizes. Without both there is none; ``depth`` alone gives layers of 32.
    activation_class: called with ``activation_kwargs`` for each hidden layer.

    Raises ConfigError and WrongType for bad arguments, SpecMismatch for inputs that do not fit. See MultiAgentNet for
    the parameters' layout and the methods.
    """

    def __init__(
        self,
        n_agent_inputs: int,
        n_agent_outputs: int,
        n_agents: int,
        *,
        share_params: bool,
        centralised: bool | None = None,
        depth: int | None = None,
        num_cells: int | Sequence[int] | None = None,
        activation_class: Callable[..., nn.Module] = nn.Tanh,
        activation_kwargs: Mapping[str, Any] | None = None,
        device: torch.device | str | None = None,
        centralized: bool | None = None,
    ) -> None:
        centralised = _one_spelling(centralised, centralized)
        _require_sizes(n_agents=n_agents, n_agent_inputs=n_agent_inputs, n_agent_outputs=n_agent_outputs)
        hidden = _hidden_sizes(depth, num_cells)
        sizes = [n_agent_inputs * (n_agents if centralised else 1), *hidden, n_agent_outputs]
        activation = partial(activation_class, **(activation_kwargs or {}))

        def build() -> nn.Sequential:
            layers: list[nn.Module] = []
            for n_in, n_out in pairwise(sizes):
                layers += [nn.Linear(n_in, n_out, device=device), activation()]
            return nn.Sequential(*layers[:-1])  # the last layer is linear

        super().__init__(build, n_agents, centralised=centralised, share_params=share_params)


class MultiAgentConvNet(MultiAgentNet):
    """A convolutional network for each agent, or one for all.

    Input ``[*B, A, in_features, H, W]``, output ``[*B, A, num_cells[-1] * H' * W']``.

    centralised: every agent sees all agents' channels.  ``centralized`` is the same.
    share_params: one network for all agents.
    in_features: channels of one agent's image; required.
    num_cells: output channels of each layer.  kernel_sizes, strides, paddings: one for all layers, or one for each,
        which is a number or (vertical, horizontal).
    activation_class: called with ``activation_kwargs`` after each layer.

    Raises ConfigError and WrongType for bad arguments, SpecMismatch for inputs that do not fit. See MultiAgentNet for
    the parameters' layout and the methods.
    """

    def __init__(
        self,
        n_agents: int,
        centralised: bool | None = None,
        share_params: bool | None = None,
        *,
        in_features: int | None = None,
        num_cells: Sequence[int] = (32, 32, 32),
        kernel_sizes: int | Sequence[Size] = 5,
        strides: int | Sequence[Size] = 2,
        paddings: int | Sequence[Size] = 0,
        activation_class: Callable[..., nn.Module] = nn.ELU,
        activation_kwargs: Mapping[str, Any] | None = None,
        device: torch.device | str | None = None,
        centralized: bool | None = None,
    ) -> None:
        centralised = _one_spelling(centralised, centralized)
        if share_params is None:
            raise WrongType("share_params is missing: True for one network for all agents, False for one for each")
        _require_sizes(n_agents=n_agents, in_features=in_features)
        assert in_features is not None
        channels = [in_features * (n_agents if centralised else 1), *num_cells]
        depth = len(num_cells)
        if depth == 0:
            raise ConfigError("num_cells=() has no layer; give the channels of at least one")
        kernels = _per_layer("kernel_sizes", kernel_sizes, depth)
        steps = _per_layer("strides", strides, depth)
        pads = _per_layer("paddings", paddings, depth)
        activation = partial(activation_class, **(activation_kwargs or {}))

        def build() -> nn.Sequential:
            layers: list[nn.Module] = []
            for n_in, n_out, kernel, step, pad in zip(channels, num_cells, kernels, steps, pads, strict=False):
                layers += [nn.Conv2d(n_in, n_out, kernel, step, pad, device=device), activation()]
            return nn.Sequential(*layers, nn.Flatten())

        super().__init__(build, n_agents, centralised=centralised, share_params=share_params, agent_dim=-4)

    def _call_shared(self, net: nn.Module, *inputs: Tensor) -> Tensor:
        x = inputs[0]
        # Gradients of convolutions are up to 25 % faster on CPUs this way, outputs alone are not: docs/adr/0009.
        if torch.is_grad_enabled() and x.device.type == "cpu":
            x = channels_last(x)
        return super()._call_shared(net, x)


def _one_spelling(centralised: bool | None, centralized: bool | None) -> bool:
    if (centralised is None) == (centralized is None):
        raise WrongType(
            f"give one of centralised and centralized, got {centralised} and {centralized}: True if every agent sees "
            "all agents' inputs, False if only its own"
        )
    return bool(centralised or centralized)


def _require_sizes(**sizes: int | None) -> None:
    for name, size in sizes.items():
        if (as_whole(size) or 0) < 1:
            raise ConfigError(
                f"{name}={size!r} is not a positive integer; sizes are not taken from the first input, so that the "
                "parameters can be copied, moved and shared from the start"
            )


def _hidden_sizes(depth: int | None, num_cells: int | Sequence[int] | None) -> list[int]:
    if num_cells is None:
        return [32] * (depth or 0)
    if isinstance(num_cells, int):
        if depth is None:
            raise ConfigError(f"num_cells={num_cells} is one size for all hidden layers; give depth, their number, too")
        return [num_cells] * depth
    if depth is not None and depth != len(num_cells):
        raise ConfigError(f"depth={depth}, but num_cells={list(num_cells)} is for {len(num_cells)}; leave depth out")
    return list(num_cells)


def _per_layer(name: str, value: int | Sequence[Size], depth: int) -> list[Size]:
    if not isinstance(value, Sequence):
        return [value] * depth
    if len(value) != depth:
        raise ConfigError(f"{name}={list(value)} has {len(value)} entries for the {depth} layers of num_cells")
    return list(value)
