"""Checks that one network can run with the tensors of others: all are alike, no tensor is shared or kept twice."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from types import FunctionType, MethodType
from typing import Any

from tensordict import TensorDictBase  # type: ignore[import-untyped]  # ships no types
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from muster.errors import SpecMismatch, UsageError
from muster.nn.functional import all_names, named_tensors, ties

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_REGISTERED = {"_parameters", "_buffers", "_modules"}
_OF_RECURRENT_LAYERS = {"_flat_weights", "_flat_weight_refs"}  # a layer's parameters, kept up to date by it


def require_alike(modules: Sequence[nn.Module]) -> None:
    """Raises SpecMismatch where two modules differ in more than their values, UsageError where they share a tensor.

    Compared are the classes, modes and hooks of their parts, their ``repr``, and the names, shapes, dtypes and devices
    of their tensors, frozen or not, tied or not. A parametrized layer counts as the layer that it was before.
    """
    _require_own_tensors(modules)
    first = _description(modules[0])
    for index, module in enumerate(modules[1:], start=1):
        other = _description(module)
        for where in sorted(first | other, key=lambda where: where in first and where in other):  # absent ones first
            mine, its = first.get(where, "absent"), other.get(where, "absent")
            if mine != its:
                raise SpecMismatch(
                    f"modules 0 and {index} differ in {where}: {mine} and {its}. Networks with stacked parameters must "
                    "be alike in all but their values: let one function build them all, MultiAgentNet(make_net, "
                    "n_agents), or make one MultiAgentNet for each group of agents with networks that are alike"
                )


def require_no_references(modules: Sequence[nn.Module]) -> None:
    """Raises UsageError where a module keeps its parameters and buffers in more places than under their names.

    Such places are lists, tuples, dicts, TensorDicts and functions: a call with other tensors would use the module's
    own tensors there. Recurrent layers may keep a list of their parameters, which they keep up to date.
    """
    own = {id(tensor): name for module in modules for name, tensor in all_names(module)}
    for index, module in enumerate(modules):
        seen: set[tuple[int, bool]] = set()
        for path, part in module.named_modules():
            known = _REGISTERED | _OF_RECURRENT_LAYERS if isinstance(part, nn.RNNBase) else _REGISTERED
            for attribute, value in vars(part).items():
                if attribute in known:
                    continue
                for where, tensor in _tensors_in(f"{path}.{attribute}".lstrip("."), value, seen):
                    if id(tensor) in own:
                        raise UsageError(
                            f"module {index} refers to its tensor {own[id(tensor)]!r} in {where} too, where stacked "
                            "parameters do not take its place; look it up by its name when it is needed, or keep a "
                            "list of the names, an nn.ParameterList or an nn.ParameterDict"
                        )


def _tensors_in(
    where: str, value: Any, seen: set[tuple[int, bool]], in_function: bool = False
) -> Iterator[tuple[str, Tensor]]:
    if in_function and isinstance(value, MethodType):
        value = value.__self__
    if isinstance(value, Tensor):
        yield where, value
    elif in_function and isinstance(value, nn.Module):  # A copy of the network keeps the function, and so this module.
        yield from ((f"{where}.{name}", tensor) for name, tensor in all_names(value))
    elif (
        isinstance(value, (list, tuple, Mapping, TensorDictBase, FunctionType)) and (id(value), in_function) not in seen
    ):
        seen.add((id(value), in_function))
        for name, part in _parts(value):
            yield from _tensors_in(where + name, part, seen, in_function or isinstance(value, FunctionType))


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, FunctionType):
        yield ".__defaults__", value.__defaults__
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with suppress(ValueError):  # an empty cell
                yield f".<locals>.{name}", cell.cell_contents
    elif isinstance(value, (Mapping, TensorDictBase)):
        items = value.items(True, True) if isinstance(value, TensorDictBase) else value.items()
        yield from ((f"[{key!r}]", part) for key, part in items)
    else:
        yield from ((f"[{index}]", part) for index, part in enumerate(value))


def _description(module: nn.Module) -> dict[str, str]:
    """The facts that may not differ between networks: name of each in a message -> its value as shown there."""
    facts: dict[str, str] = {}
    for path, part in module.named_modules():
        at = path or "the module"
        facts[f"the class of {at}"] = _name(type_before_parametrizations(part))  # make_net may define it at each call
        facts[f"the mode of {at}"] = "train" if part.training else "eval"
        facts[f"the forward of {at}"] = "its own" if "forward" in vars(part) else "that of its class"
        for kind in _HOOKS:
            hooks = [_name(hook) for hook in getattr(part, kind).values()]
            facts[f"the {kind[1:].replace('_', ' ')} of {at}"] = ", ".join(hooks) or "none"
    for number, line in enumerate(repr(module).splitlines(), start=1):
        facts[f"line {number} of their repr"] = re.sub(r" at 0x[0-9a-f]+", "", line).strip()
    for name, tensor in all_names(module):
        shown = f"{list(tensor.shape)}, {tensor.dtype} on {tensor.device}, requires_grad={tensor.requires_grad}"
        facts[f"the tensor {name}"] = shown
    facts["which tensors are tied"] = str(list(ties(module).values()))
    return facts


def _name(value: object) -> str:
    return getattr(value, "__qualname__", type(value).__qualname__)


def _require_own_tensors(modules: Sequence[nn.Module]) -> None:
    owners: dict[int, tuple[int, str]] = {}
    for index, module in enumerate(modules):
        for name, tensor in named_tensors(module).items():
            owner, owner_name = owners.setdefault(id(tensor), (index, name))
            if owner != index:
                raise UsageError(
                    f"modules {owner} and {index} share the tensor {owner_name!r}; stacking would separate them. Let "
                    "the function that builds them make a new one at each call; for one network for all agents use "
                    "share_params=True; a part that they share can be a module of its own in front of this one"
                )
