"""Layers called without the time that ``nn.Module.__call__`` takes where it only calls ``forward``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.modules.module as torch_module
from torch import Tensor, nn
from torch.nn import functional as F

_CALL = nn.Module.__call__


def run_layers(layers: nn.Sequential, x: Tensor, call: Callable[[Tensor], Tensor]) -> Tensor:
    """Output of ``call(x)``, which calls the layers one by one; those that only compute run without their ``__call__``.

    Calls and the look-up of parameters take a quarter of the time of a small network: docs/adr/0009.
    """
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() or layers_do_more(layers):
        return call(x)
    for layer in layers._modules.values():
        assert layer is not None
        if type(layer) is nn.Linear:
            parameters: dict[str, Any] = layer._parameters
            try:
                x = F.linear(x, parameters["weight"], parameters["bias"])
            except KeyError:  # plain tensors have taken the place of the parameters
                x = layer.forward(x)
        else:
            x = layer.forward(x)
    return x


def layers_do_more(layers: nn.Sequential) -> bool:
    """Returns whether a call of one of the layers does more than the ``forward`` of its class."""
    return all_modules_are_hooked() or any(map(does_more, layers._modules.values()))


def does_more(module: nn.Module) -> bool:
    """Returns whether a call of the module does more than the ``forward`` of its class, such as calling a hook."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or module._compiled_call_impl
        or "forward" in module.__dict__
        or type(module).__call__ is not _CALL
    )


def all_modules_are_hooked() -> bool:
    """Returns whether a hook is called for every module that there is."""
    return bool(
        torch_module._global_forward_hooks
        or torch_module._global_forward_pre_hooks
        or torch_module._global_backward_hooks
        or torch_module._global_backward_pre_hooks
    )


def has_backward_hooks(net: nn.Module) -> bool:
    """Returns whether hooks are called in the backward pass through ``net`` or through a module inside it."""
    if torch_module._global_backward_hooks or torch_module._global_backward_pre_hooks:
        return True
    return any(part._backward_hooks or part._backward_pre_hooks for part in net.modules())
