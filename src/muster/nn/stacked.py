"""Networks of known layers for A agents, computed together: every parameter has the agents in front, [A, ...]."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from muster.nn.fast_call import does_more, layers_do_more, run_layers

# Layers without parameters that treat every element by itself, whatever the layout of the tensor.
ELEMENTWISE: frozenset[type[nn.Module]] = frozenset(
    {nn.Tanh, nn.ReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Sigmoid, nn.LeakyReLU, nn.Softplus, nn.SELU, nn.CELU, nn.Mish}
    | {nn.ReLU6, nn.Hardtanh, nn.Hardswish, nn.Softsign, nn.LogSigmoid, nn.Identity, nn.Dropout}
)

# Above these sizes one agent after the other is faster on a CPU: its activations stay in the cache from layer to layer.
# Measured by benchmarks/bench_multi_agent_nets.py --products; docs/adr/0009-multi-agent-networks.md has the numbers.
LOOP_ABOVE_HIDDEN = 2**19  # agents * batch * widest layer, elements
LOOP_ABOVE_PIXELS = 2**19  # agents * batch * channels * height * width of the input, elements

L = TypeVar("L", nn.Linear, nn.Conv2d)


class StackedLayer(nn.Module, Generic[L]):
    """The layers of A agents, all of one kind and size.

    weight: [A, ...].  bias: [A, out] or None.
    """

    def __init__(self, weight: Tensor, layers: Sequence[L]) -> None:
        super().__init__()
        self.n_agents = len(layers)
        self.weight = nn.Parameter(weight, requires_grad=layers[0].weight.requires_grad)
        self.bias: nn.Parameter | None = None
        biases = [layer.bias for layer in layers if layer.bias is not None]
        if biases:
            self.bias = nn.Parameter(torch.stack([b.detach() for b in biases]), requires_grad=biases[0].requires_grad)

    def slices(self) -> list[tuple[Tensor, Tensor | None]]:
        """Each agent's weight and bias: views through which gradients flow."""
        biases = [None] * self.n_agents if self.bias is None else self.bias.unbind()
        return list(zip(self.weight.unbind(), biases, strict=True))

    def apply_one(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Output of one agent's layer: weight and bias are that agent's slices, and ``x`` its input."""
        raise NotImplementedError

    def plain(self) -> L:
        """One agent's layer, without values: on "meta" nothing is drawn from the global generator."""
        raise NotImplementedError

    def split(self) -> list[L]:
        """A plain layer for each agent, with copies of its weights."""
        layers = [self.plain() for _ in range(self.n_agents)]
        for layer, (weight, bias) in zip(layers, self.slices(), strict=True):
            own = weight.t() if isinstance(layer, nn.Linear) else weight
            own = own.detach().clone(memory_format=torch.contiguous_format)
            layer.weight = nn.Parameter(own, self.weight.requires_grad)
            if bias is not None and self.bias is not None:
                layer.bias = nn.Parameter(bias.detach().clone(), self.bias.requires_grad)
        return layers


class StackedLinear(StackedLayer[nn.Linear]):
    """The linear layers of A agents. weight: [A, in, out], laid out for products.  bias: [A, out] or None."""

    def __init__(self, layers: Sequence[nn.Linear]) -> None:
        super().__init__(torch.stack([layer.weight.detach().t() for layer in layers]), layers)

    def forward(self, x: Tensor) -> Tensor:
        """Output [A, B, out] for x [A, B, in]."""
        if self.bias is None:
            return torch.bmm(x, self.weight)
        return torch.baddbmm(self.bias.unsqueeze(1), x, self.weight)

    def apply_one(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight.t(), bias)

    def plain(self) -> nn.Linear:
        _, n_in, n_out = self.weight.shape
        return nn.Linear(n_in, n_out, bias=self.bias is not None, device="meta")

    def extra_repr(self) -> str:
        n_agents, n_in, n_out = self.weight.shape
        return f"n_agents={n_agents}, in_features={n_in}, out_features={n_out}, bias={self.bias is not None}"


class StackedConv2d(StackedLayer[nn.Conv2d]):
    """The 2-d convolutions of A agents. weight: [A, out, in, kh, kw].  bias: [A, out] or None."""

    def __init__(self, layers: Sequence[nn.Conv2d]) -> None:
        super().__init__(torch.stack([layer.weight.detach() for layer in layers]), layers)
        first = layers[0]
        self.options: dict[str, Any] = {"stride": first.stride, "padding": first.padding, "dilation": first.dilation}

    def forward(self, x: Tensor) -> Tensor:
        """Output [B, A * out, H', W'] for x [B, A * in, H, W], or for x [B, in, H, W] that all agents see."""
        groups = 1 if x.shape[1] == self.weight.shape[2] else self.n_agents
        bias = None if self.bias is None else self.bias.flatten()
        return F.conv2d(x, self.weight.flatten(0, 1), bias, groups=groups, **self.options)

    def apply_one(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.conv2d(x, weight, bias, **self.options)

    def plain(self) -> nn.Conv2d:
        _, n_out, n_in, height, width = self.weight.shape
        return nn.Conv2d(n_in, n_out, (height, width), **self.options, bias=self.bias is not None, device="meta")

    def extra_repr(self) -> str:
        n_agents, n_out, n_in, *kernel = self.weight.shape
        options = ", ".join(f"{name}={value}" for name, value in self.options.items())
        return f"n_agents={n_agents}, {n_in}, {n_out}, kernel_size={kernel}, {options}, bias={self.bias is not None}"


class StackedFlatten(nn.Flatten):
    """Flattens images to vectors, per agent."""

    def __init__(self, n_agents: int) -> None:
        super().__init__()
        self.n_agents = n_agents

    def forward(self, x: Tensor) -> Tensor:
        """Output [A, B, C * H * W] for x [B, A * C, H, W]."""
        return _by_agent(x, self.n_agents).flatten(2).transpose(0, 1)


class StackedSequential(nn.Sequential):
    """The sequences of known layers of A agents, computed together or one by one, whichever is faster for the size.

    The layers' names are those of the single networks.
    """

    def __init__(self, layers: Sequence[nn.Module], n_agents: int) -> None:
        super().__init__(*layers)
        self.n_agents = n_agents
        self.on_images = any(isinstance(layer, StackedConv2d) for layer in self)
        self.widest = max((layer.weight.shape[-1] for layer in self if isinstance(layer, StackedLinear)), default=0)

    def forward(self, x: Tensor, common: bool = False) -> Tensor:
        """Output [B, A, ...] for x [B, A, F] or [B, A, C, H, W]; without A if ``common``: all agents see x."""
        if self._loop_is_faster(x):
            return self._one_by_one(x, common)
        if self.on_images:
            y = x if common else x.flatten(1, 2)
            # Grouped convolutions, and gradients of any, are 10 to 50 % faster on CPUs this way: docs/adr/0009.
            if y.device.type == "cpu" and (torch.is_grad_enabled() or not common):
                y = channels_last(y)
        else:
            y = x.expand(self.n_agents, *x.shape) if common else x.transpose(0, 1)
        y = run_layers(self, y, super().forward)
        return y.transpose(0, 1) if y.ndim == 3 else _by_agent(y, self.n_agents).contiguous()

    def one(self, x: Tensor, agent: int) -> Tensor:
        """Output [B, ...] of one agent. x: what that agent sees, [B, ...]."""
        if does_more(self) or layers_do_more(self):  # hooks are for all agents: x is the input of all
            return cast(Tensor, self(x, True))[:, agent]
        return self._chain(x, self._slices(), agent)

    def split(self) -> list[nn.Sequential]:
        """A plain network for each agent, with copies of its weights."""
        columns = [_split_layer(layer, self.n_agents) for layer in self]
        networks = [nn.Sequential(*layers) for layers in zip(*columns, strict=True)]
        return [network.train(self.training) for network in networks]

    def _loop_is_faster(self, x: Tensor) -> bool:
        # A compiled graph fuses the layers by itself, and other devices want few large kernels.
        if x.device.type != "cpu" or torch.compiler.is_compiling():
            return False
        if self.on_images:
            is_large = x.numel() > LOOP_ABOVE_PIXELS
        else:
            is_large = self.n_agents * x.shape[0] * self.widest > LOOP_ABOVE_HIDDEN
        return is_large and not layers_do_more(self)

    def _one_by_one(self, x: Tensor, common: bool) -> Tensor:
        slices = self._slices()
        inputs = [x] * self.n_agents if common else x.unbind(1)
        return torch.stack([self._chain(one, slices, agent) for agent, one in enumerate(inputs)], 1)

    def _slices(self) -> list[list[tuple[Tensor, Tensor | None]]]:
        return [layer.slices() if isinstance(layer, StackedLayer) else [] for layer in self]

    def _chain(self, x: Tensor, slices: list[list[tuple[Tensor, Tensor | None]]], agent: int) -> Tensor:
        for layer, params in zip(self, slices, strict=True):
            if isinstance(layer, StackedLayer):
                x = layer.apply_one(x, *params[agent])
            else:
                x = x.flatten(1) if isinstance(layer, StackedFlatten) else layer(x)
        return x


def stack_known(modules: Sequence[nn.Module], agent_dim: int) -> StackedSequential | None:
    """The modules, which must be alike, as one StackedSequential; None where a layer is not known.

    Known layers are, for vectors (``agent_dim=-2``), linear and elementwise ones; for images (-4), convolutions and
    elementwise layers, then a flatten, then as for vectors.
    """
    whole = modules[0]
    if agent_dim not in (-2, -4) or type(whole) is not nn.Sequential or does_more(whole):
        return None
    layers: list[nn.Module] = []
    seen_parameters: set[int] = set()
    on_images = agent_dim == -4
    for column in zip(*(cast(nn.Sequential, module) for module in modules), strict=True):
        first = column[0]
        own = {id(parameter) for parameter in first.parameters()}
        if own & seen_parameters or does_more(first) or first.training != whole.training:
            return None
        seen_parameters |= own
        layer = _stack_column(column, on_images)
        if layer is None:
            return None
        on_images = on_images and not isinstance(layer, StackedFlatten)
        layers.append(layer)
    if not seen_parameters or (agent_dim == -4 and not isinstance(layers[0], StackedConv2d)):
        return None
    return StackedSequential(layers, len(modules)).train(whole.training)


def _stack_column(column: tuple[nn.Module, ...], on_images: bool) -> nn.Module | None:
    first = column[0]
    if type(first) in ELEMENTWISE:
        return deepcopy(first)
    if on_images and type(first) is nn.Flatten and (first.start_dim, first.end_dim) == (1, -1):
        return StackedFlatten(len(column))
    if on_images and type(first) is nn.Conv2d and first.groups == 1 and first.padding_mode == "zeros":
        return StackedConv2d(cast("Sequence[nn.Conv2d]", column))
    if not on_images and type(first) is nn.Linear:
        return StackedLinear(cast("Sequence[nn.Linear]", column))
    return None


def _split_layer(layer: nn.Module, n_agents: int) -> list[nn.Module]:
    if isinstance(layer, StackedLayer):
        return list(layer.split())
    return [nn.Flatten() if isinstance(layer, StackedFlatten) else deepcopy(layer) for _ in range(n_agents)]


def channels_last(x: Tensor) -> Tensor:
    """The tensor x, [B, C, H, W], laid out in memory with the channels last."""
    # contiguous(memory_format=torch.channels_last) does so too, but fails under torch.vmap, where x has more axes.
    return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


def _by_agent(x: Tensor, n_agents: int) -> Tensor:
    """The channels of x, [B, A * C, H, W], by agent: [B, A, C, H, W]."""
    return x.reshape(x.shape[0], n_agents, x.shape[1] // n_agents, *x.shape[2:])
