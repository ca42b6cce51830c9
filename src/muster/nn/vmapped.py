"""Networks of any layers for A agents: one of them with stacked parameters [A, ...], called under ``torch.vmap``.

The module that holds the stacked parameters is an ordinary one, but only the functions below can call it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from muster.errors import CannotTravel
from muster.nn.alike import require_no_references
from muster.nn.functional import call_with, named_tensors, sole_use, tensor_owners, ties

Output = TypeVar("Output")


def stack_any(modules: Sequence[nn.Module]) -> nn.Module:
    """A copy of the first module, with the tensors of all the modules, stacked.

    modules: alike, see ``require_alike``. Raises CannotTravel, UsageError where they refer to tensors of their own.
    """
    require_no_references(modules)
    tensors = [named_tensors(module) for module in modules]
    replaced: dict[int, Any] = {}
    for name, first in tensors[0].items():
        replaced[id(first)] = _like(torch.stack([each[name].detach() for each in tensors]), first)
    return copy_module(modules[0], replaced)


def split_any(net: nn.Module, n_agents: int) -> list[nn.Module]:
    """A plain module for each agent, with copies of its tensors."""
    tensors = named_tensors(net)
    return [
        copy_module(net, {id(stacked): _like(stacked.detach()[agent].clone(), stacked) for stacked in tensors.values()})
        for agent in range(n_agents)
    ]


def call_each(net: nn.Module, xs: Sequence[Tensor], common: bool, randomness: str = "different") -> Tensor:
    """Output [B, A, ...] of all agents, computed in one call under ``torch.vmap``.

    xs: the inputs, [B, A, ...] each, or [B, ...] that all agents see if ``common``.  randomness: of ``torch.vmap``.
    """
    tensors = named_tensors(net)
    in_dims = (0, *[None if common else 1] * len(xs))
    vmapped = torch.vmap(partial(_call, net), in_dims=in_dims, out_dims=(1, 0), randomness=randomness)
    try:
        y, replaced = _alone(net, vmapped, tensors, xs)
    except RuntimeError as error:
        error.add_note("If torch.vmap cannot run this network, build the MultiAgentNet with use_vmap=False")
        raise
    _write_back(tensors, replaced)
    return y


def call_one_by_one(net: nn.Module, xs: Sequence[Tensor], common: bool, n_agents: int) -> Tensor:
    """Output [B, A, ...] of all agents, computed in ``n_agents`` separate calls. xs, common: as in ``call_each``."""
    # One unbind for all agents: its gradient is one stack; each slice's gradient would have the whole size.
    slices = {name: stacked.unbind() for name, stacked in named_tensors(net).items()}
    inputs = [xs] * n_agents if common else list(zip(*(x.unbind(1) for x in xs), strict=True))
    outputs = [_call_slices(net, {n: s[i] for n, s in slices.items()}, own) for i, own in enumerate(inputs)]
    return torch.stack(outputs, 1)


def call_one(net: nn.Module, xs: Sequence[Tensor], agent: int) -> Tensor:
    """Output [B, ...] of one agent. xs: what that agent sees, [B, ...] each."""
    return _call_slices(net, {name: stacked[agent] for name, stacked in named_tensors(net).items()}, xs)


def _call_slices(net: nn.Module, slices: dict[str, Tensor], xs: Sequence[Tensor]) -> Tensor:
    y, replaced = _alone(net, partial(_call, net), slices, xs)
    _write_back(slices, replaced)
    return y


def _call(net: nn.Module, tensors: dict[str, Tensor], *xs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    return call_with(net, tensors, ties(net), xs)


def _alone(net: nn.Module, function: Callable[..., Output], tensors: dict[str, Tensor], xs: Sequence[Tensor]) -> Output:
    if torch.compiler.is_compiling():  # as in functionalize
        return function(tensors, *xs)
    with sole_use(net, tensor_owners(net)):
        return function(tensors, *xs)


@torch.no_grad()
def _write_back(tensors: dict[str, Tensor], replaced: dict[str, Tensor]) -> None:
    for name, tensor in replaced.items():
        tensors[name].copy_(tensor)


def _like(tensor: Tensor, original: Tensor) -> Tensor:
    return nn.Parameter(tensor, original.requires_grad) if isinstance(original, nn.Parameter) else tensor


def copy_module(module: nn.Module, replaced: dict[int, Any]) -> nn.Module:
    """A deep copy with other objects in the place of those in ``replaced``, by id. Raises CannotTravel."""
    # deepcopy takes what its memo holds for an id as the copy: every reference to a tensor, whichever its name, is
    # replaced, and none is copied twice.
    try:
        return deepcopy(module, replaced)
    except Exception as error:
        raise CannotTravel(
            f"{type(module).__qualname__} cannot be copied ({type(error).__name__}: {error}), so that it cannot become "
            "one network with stacked parameters, nor be taken out of it. Move the part that cannot be copied out of "
            "the network, or keep the networks in a torch.nn.ModuleList"
        ) from error
