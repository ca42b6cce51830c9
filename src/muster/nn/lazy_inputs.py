"""Networks that take their input size from the first input, or from the weights that they load."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter, is_lazy
from torch.utils.hooks import RemovableHandle

from muster.nn.turns import generators_kept

Net = Any  # a MultiAgentNet; nothing of it is needed here but that its layers are in `net`


@dataclass
class LazyInputs:
    """The facts that complete a network.

    make: builds the whole network for one agent's input size.  axis: of the features in an input, counted from the end.
    tensor, tensor_axis: a tensor of the network, and its axis that is ``per_unit`` long for inputs of size 1.
    """

    make: Callable[[int], Net]
    axis: int
    tensor: str
    tensor_axis: int
    per_unit: int
    handle: RemovableHandle | None = None

    def size_in(self, state: Mapping[str, Any], prefix: str) -> int | None:
        """The input size that the weights in ``state`` are for; None where they are not there."""
        weight = state.get(f"{prefix}{self.tensor}")
        if not isinstance(weight, Tensor) or is_lazy(weight) or weight.ndim < -self.tensor_axis:
            return None
        return weight.shape[self.tensor_axis] // self.per_unit

    @torch.no_grad()
    def complete(self, net: Net, size: int) -> None:
        """Gives the tensors their shapes, and values as in a new network for inputs of ``size``."""
        for part, new in zip(net.modules(), self.make(size).modules(), strict=True):
            tensors = {name: tensor for name, tensor in _tensors(part).items() if tensor is not None}
            if not any(map(is_lazy, tensors.values())):
                continue
            for name, tensor in tensors.items():
                source = getattr(new, name)
                if is_lazy(tensor):
                    tensor.materialize(source.shape)
                elif tensor.shape != source.shape:  # a buffer
                    tensor.data = torch.empty_like(source, device=tensor.device, dtype=tensor.dtype)
                tensor.copy_(source)
            sizes = {name: value for name, value in vars(new).items() if type(value) is int}  # in_features and the like
            vars(part).update(sizes)
        net.n_agent_inputs = size
        net.lazy_inputs = None
        assert self.handle is not None
        self.handle.remove()


def take_size_from_input(net: Net, make: Callable[[int], Net], axis: int) -> None:
    """Leaves the tensors of ``net`` that depend on its input size without shape and values until its first call.

    They remain the same objects then: optimizers and losses may already have them.  make, axis: see `LazyInputs`;
    ``net`` is what ``make(1)`` returns.
    """
    with generators_kept():
        larger = make(2)
    found = None
    for (path, part), other in zip(net.named_modules(), larger.modules(), strict=True):
        for name, tensor in _tensors(part).items():
            if tensor is None or tensor.shape == getattr(other, name).shape:
                continue
            if found is None:
                its = getattr(other, name).shape
                axes = [i for i in range(-tensor.ndim, 0) if tensor.shape[i] != its[i]]
                found = LazyInputs(make, axis, f"{path}.{name}", axes[0], tensor.shape[axes[0]])
            if name in part._parameters:  # buffers stay as they are until then: lazy ones cannot be copied
                kind: Any = UninitializedParameter
                options = {"device": tensor.device, "dtype": tensor.dtype}
                part._parameters[name] = kind(requires_grad=tensor.requires_grad, **options)
    assert found is not None  # a network that takes inputs of any size has a size
    found.handle = net.register_forward_pre_hook(_complete)
    net.n_agent_inputs, net.lazy_inputs = None, found


def _complete(net: Net, inputs: tuple[Tensor, ...]) -> None:
    sizes = [x.shape[net.lazy_inputs.axis] for x in inputs]
    # Several inputs are joined along the last axis.
    net.lazy_inputs.complete(net, sum(sizes) if net.lazy_inputs.axis == -1 else sizes[0])


def _tensors(part: nn.Module) -> dict[str, Tensor | None]:
    return {**part._parameters, **part._buffers}
