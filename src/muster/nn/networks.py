"""Multi-agent networks of the usual layers, with TorchRL's argument names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from muster.arguments import as_whole, with_ints
from muster.errors import ConfigError, WrongType
from muster.nn.lazy_inputs import take_size_from_input
from muster.nn.multi_agent_net import MultiAgentNet
from muster.nn.single_nets import LayerClass, Options, Size, conv_net, mlp
from muster.nn.stacked import channels_last


class MultiAgentMLP(MultiAgentNet):
    """A multi-layer perceptron for each agent, or one for all.

    Input ``[*B, A, n_agent_inputs]``, output ``[*B, A, n_agent_outputs]``.

    n_agent_inputs: size of one agent's input; if ``centralised`` each network takes ``A`` times as many. None takes it
        from the first input, or from the weights that are loaded first.
    n_agent_outputs: size of one agent's output, or its shape.
    n_agents: ``A``.
    centralised, centralized: every agent sees all agents' inputs; one of the two names.
    share_params: one network for all agents.
    depth, num_cells: hidden layers and their sizes. Without both there is none; ``depth`` alone gives layers of 32.
    layer_class, norm_class, activation_class: the layers' classes. Norm and activation follow each hidden layer.
    layer_kwargs, norm_kwargs, activation_kwargs: their arguments, one dict for all layers, or a list of one for each.
    activate_last_layer: whether norm and activation follow the last layer, too.
    dropout: a probability; goes before norm and activation.
    bias_last_layer, single_bias_last_layer: whether the last layer has a bias, and whether one for all its outputs.
    device: where the parameters lie.
    vmap_randomness: see `MultiAgentNet`.
    use_td_params: no effect; where TorchRL keeps the parameters.

    Raises ConfigError and WrongType for bad arguments, SpecMismatch for inputs that do not fit. See `MultiAgentNet` for
    the parameters' layout and the methods.

    >>> import torch
    >>> from muster.nn import MultiAgentMLP
    >>> net = MultiAgentMLP(4, 2, 3, centralised=False, share_params=False, num_cells=[16])
    >>> net(torch.zeros(8, 3, 4)).shape, net.net[0].weight.shape
    (torch.Size([8, 3, 2]), torch.Size([3, 4, 16]))
    """

    def __init__(
        self,
        n_agent_inputs: int | None,
        n_agent_outputs: int | Sequence[int],
        n_agents: int,
        *,
        share_params: bool,
        centralised: bool | None = None,
        depth: int | None = None,
        num_cells: int | Sequence[int] | None = None,
        activation_class: LayerClass = nn.Tanh,
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
        centralized: bool | None = None,
        vmap_randomness: str = "different",
        use_td_params: bool = True,
    ) -> None:
        n_agents, n_agent_inputs, n_agent_outputs = map(with_ints, (n_agents, n_agent_inputs, n_agent_outputs))
        _require_sizes(n_agents=n_agents, n_agent_inputs=1 if n_agent_inputs is None else n_agent_inputs)
        for size in n_agent_outputs if isinstance(n_agent_outputs, Sequence) else [n_agent_outputs]:
            _require_sizes(n_agent_outputs=size)
        build = partial(
            mlp,
            n_outputs=n_agent_outputs,
            hidden=_hidden_sizes(with_ints(depth), with_ints(num_cells)),
            layer=(layer_class, layer_kwargs),
            norm=(norm_class, norm_kwargs),
            activation=(activation_class, activation_kwargs),
            dropout=dropout,
            bias_last_layer=bias_last_layer,
            single_bias_last_layer=single_bias_last_layer,
            activate_last_layer=activate_last_layer,
            device=device,
        )
        options = _options(n_agents, share_params, centralised, centralized, vmap_randomness)
        super().__init__(_at_size(build, n_agent_inputs or 1, options), **options)
        if n_agent_inputs is None:
            take_size_from_input(self, partial(_whole, build, options), -1)


class MultiAgentConvNet(MultiAgentNet):
    """A convolutional network for each agent, or one for all.

    Input ``[*B, A, in_features, H, W]``, output ``[*B, A, num_cells[-1] * H' * W']``.

    n_agents: ``A``.
    centralised, centralized: every agent sees all agents' channels; one of the two names.
    share_params: one network for all agents.
    in_features: channels of one agent's image. None takes them from the first input, or from the weights loaded first.
    num_cells: output channels of each layer.
    kernel_sizes, strides, paddings: one for all layers, or one for each, a number or (vertical, horizontal) in pixels.
    depth: the number of layers, where none of these gives it.
    activation_class, norm_class: the classes of what follows each layer, the norm last.
    activation_kwargs, norm_kwargs: their arguments, one dict for all layers, or a list of one for each.
    aggregator_class, aggregator_kwargs: flattens what the layers give; None leaves it out.
    squeeze_output: leave out the axes of images that have become one pixel.
    bias_last_layer: no effect, as in TorchRL 0.14: the layers have biases.
    device: where the parameters lie.
    vmap_randomness: see `MultiAgentNet`.
    use_td_params: no effect; where TorchRL keeps the parameters.

    Raises ConfigError and WrongType for bad arguments, SpecMismatch for inputs that do not fit. See `MultiAgentNet` for
    the parameters' layout and the methods.

    >>> import torch
    >>> from muster.nn import MultiAgentConvNet
    >>> net = MultiAgentConvNet(3, False, True, in_features=3, num_cells=[8, 8], kernel_sizes=3)
    >>> net(torch.zeros(2, 3, 3, 15, 15)).shape
    torch.Size([2, 3, 72])
    """

    def __init__(
        self,
        n_agents: int,
        centralised: bool | None = None,
        share_params: bool | None = None,
        *,
        in_features: int | None = None,
        num_cells: int | Sequence[int] | None = None,
        kernel_sizes: int | Sequence[Size] = 5,
        strides: int | Sequence[Size] = 2,
        paddings: int | Sequence[Size] = 0,
        depth: int | None = None,
        activation_class: LayerClass = nn.ELU,
        activation_kwargs: Options = None,
        norm_class: LayerClass | None = None,
        norm_kwargs: Options = None,
        aggregator_class: LayerClass | None = nn.Flatten,
        aggregator_kwargs: Mapping[str, Any] | None = None,
        squeeze_output: bool = False,
        bias_last_layer: bool = True,
        device: torch.device | str | None = None,
        centralized: bool | None = None,
        vmap_randomness: str = "different",
        use_td_params: bool = True,
    ) -> None:
        n_agents, in_features, num_cells, depth = map(with_ints, (n_agents, in_features, num_cells, depth))
        kernel_sizes, strides, paddings = map(with_ints, (kernel_sizes, strides, paddings))
        options = _options(n_agents, share_params, centralised, centralized, vmap_randomness)
        _require_sizes(n_agents=n_agents, in_features=1 if in_features is None else in_features)
        cells = (32, 32, 32) if num_cells is None else num_cells
        sizes = {"num_cells": cells, "kernel_sizes": kernel_sizes, "strides": strides, "paddings": paddings}
        depth = _depth_of(depth, *sizes.values())
        if depth == 0:
            raise ConfigError("num_cells=() has no layer; give the channels of at least one")
        columns = [_per_layer(name, size, depth) for name, size in sizes.items()]
        build = partial(
            conv_net,
            convolutions=list(zip(*columns, strict=True)),
            activation=(activation_class, activation_kwargs),
            norm=(norm_class, norm_kwargs),
            aggregator=(aggregator_class, aggregator_kwargs),
            squeeze_output=squeeze_output,
            device=device,
        )
        options["agent_dim"] = -4
        super().__init__(_at_size(build, in_features or 1, options), **options)
        if in_features is None:
            take_size_from_input(self, partial(_whole, build, options), -3)

    def _call_shared(self, net: nn.Module, *inputs: Tensor) -> Tensor:
        x = inputs[0]
        # Gradients of convolutions are up to 25 % faster on CPUs this way, outputs alone are not: docs/adr/0009.
        if torch.is_grad_enabled() and x.device.type == "cpu":
            x = channels_last(x)
        return super()._call_shared(net, x)


def _options(
    n_agents: int, share_params: bool | None, centralised: bool | None, centralized: bool | None, vmap_randomness: str
) -> dict[str, Any]:
    """The options of a MultiAgentNet. Raises WrongType for those that are missing, ConfigError."""
    if share_params is None:
        raise WrongType("share_params is missing: True for one network for all agents, False for one for each")
    if vmap_randomness not in ("different", "same", "error"):
        raise ConfigError(f'vmap_randomness={vmap_randomness!r}; expected "different", "same" or "error"')
    if (centralised is None) == (centralized is None):
        raise WrongType(
            f"give one of centralised and centralized, got {centralised} and {centralized}: True if every agent sees "
            "all agents' inputs, False if only its own"
        )
    options = {"n_agents": n_agents, "share_params": share_params, "centralised": bool(centralised or centralized)}
    return {**options, "vmap_randomness": vmap_randomness}


def _at_size(build: Callable[[int], nn.Module], size: int, options: Mapping[str, Any]) -> Callable[[], nn.Module]:
    return partial(build, size * (options["n_agents"] if options["centralised"] else 1))


def _whole(build: Callable[[int], nn.Module], options: Mapping[str, Any], size: int) -> MultiAgentNet:
    return MultiAgentNet(_at_size(build, size, options), **options)


def _require_sizes(**sizes: int | None) -> None:
    for name, size in sizes.items():
        if (as_whole(size) or 0) < 1:
            raise ConfigError(f"{name}={size!r} is not a positive integer")


def _hidden_sizes(depth: int | None, num_cells: int | Sequence[int] | None) -> list[int]:
    if num_cells is None:
        return [32] * (depth or 0)
    return _per_layer("num_cells", num_cells, _depth_of(depth, num_cells))


def _depth_of(depth: int | None, *options: int | Sequence[Any]) -> int:
    """The number of layers: as it is given, or that of the first option with one value for each layer."""
    lengths = [len(option) for option in options if isinstance(option, Sequence)]
    if depth is None and not lengths:
        raise ConfigError(f"num_cells={options[0]} is one size for all layers; give depth, their number, too")
    return lengths[0] if depth is None else depth


def _per_layer(name: str, value: int | Sequence[Any], depth: int) -> list[Any]:
    if not isinstance(value, Sequence):
        return [value] * depth
    if len(value) != depth:
        raise ConfigError(f"{name}={list(value)} has {len(value)} entries for the {depth} layers")
    return list(value)
