"""Sequences of layers, called without the time that ``nn.Module.__call__`` takes where it only calls ``forward``.

A small layer computes for 3 us; ``__call__`` and the look-up of its parameters take as long. Autograd, ``torch.func``
and autocast see the same operations; layers with hooks, compiled layers and those with a ``__call__`` or ``forward`` of
their own are called as ever.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.modules.module as torch_module
from torch import Tensor, nn
from torch.nn import functional as F

_CALL = nn.Module.__call__


def call_layers(net: nn.Module, *inputs: Tensor) -> Tensor:
    """What ``net(*inputs)`` returns; where it is a plain ``nn.Sequential``, sooner."""
    if type(net) is not nn.Sequential or len(inputs) != 1 or _is_watched(net) or "forward" in net.__dict__:
        return cast(Tensor, net(*inputs))
    return call_in_turn(net, inputs[0])


def call_in_turn(layers: nn.Sequential, x: Tensor) -> Tensor:
    """One layer after the other on ``x``. What hangs on the sequence itself, such as its hooks, is left out."""
    if _any_call_is_watched():
        for layer in layers:
            x = layer(x)
        return x
    for layer in layers._modules.values():
        if _is_watched(layer):
            x = layer(x)
        elif type(layer) is nn.Linear and "forward" not in layer.__dict__:
            parameters: dict[str, Any] = layer._parameters
            try:
                x = F.linear(x, parameters["weight"], parameters["bias"])
            except KeyError:  # plain tensors are set in their place
                x = layer.forward(x)
        else:
            x = layer.forward(x)
    return x


def does_more(module: nn.Module) -> bool:
    """Whether a call of it does anything but the ``forward`` of its class."""
    return bool(_is_watched(module)) or "forward" in module.__dict__


def _is_watched(module: nn.Module) -> object:
    """True in effect where more is to happen in a call of it than ``forward``."""
    return (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or module._compiled_call_impl
        or type(module).__call__ is not _CALL
    )


def all_modules_are_hooked() -> bool:
    """Whether a hook is called for every module that there is."""
    return bool(
        torch_module._global_forward_hooks
        or torch_module._global_forward_pre_hooks
        or torch_module._global_backward_hooks
        or torch_module._global_backward_pre_hooks
    )


def has_backward_hooks(net: nn.Module) -> bool:
    """Whether hooks are called in the backward pass through ``net`` or through a module inside it."""
    if torch_module._global_backward_hooks or torch_module._global_backward_pre_hooks:
        return True
    return any(part._backward_hooks or part._backward_pre_hooks for part in net.modules())


def _any_call_is_watched() -> bool:
    return bool(all_modules_are_hooked() or torch.compiler.is_compiling() or torch._C._get_tracing_state())
