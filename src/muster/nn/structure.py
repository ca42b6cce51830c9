"""Whether modules are alike, so that one can run with the parameters of another."""

from __future__ import annotations

import copyreg
import weakref
from collections.abc import Iterator, Sequence
from functools import partial
from random import Random
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from muster.errors import SpecMismatch, UsageError
from muster.nn.functional import named_tensors

_PLAIN = (bool, int, float, complex, str, bytes, set, frozenset, type(None), type)
_RANDOM = (torch.Generator, np.random.Generator, np.random.RandomState, Random)
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_EVERY_MODULE = (vars(nn.Module()).keys() - {"training"}) | {"_compiled_call_impl"}
_LEARNERS = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)  # refer to what they change, not to compute
_OF_RECURRENT_LAYERS = {"_flat_weights", "_flat_weight_refs"}  # their parameters again, which they keep up to date
_FUNCTION = ("__module__", "__code__", "__defaults__", "__kwdefaults__")
_CODE = ("co_code", "co_consts", "co_names", "co_varnames", "co_argcount")

# Pairs that are known to be alike, or are being compared, by their ids and whether a function holds them.
Alike = dict[tuple[int, int, bool], tuple[object, object]]


class Difference(NamedTuple):
    where: str
    mine: object
    its: object


def require_alike(modules: Sequence[nn.Module]) -> None:
    """Returns if the modules differ in nothing but the values of their tensors.

    Raises SpecMismatch that names the first difference: classes, attributes, functions, hooks, names and their order,
    shapes, dtypes, devices, frozen or not, tied or not. Parametrized layers count as what they were before, sources of
    random numbers as alike. Raises UsageError where two of them share a tensor, which stacking would separate.
    """
    for index, module in enumerate(modules[1:], start=1):
        difference = _first_difference(modules[0], module)
        if difference is not None:
            where, mine, its = difference
            raise SpecMismatch(
                f"modules 0 and {index} differ in {where}: {_shown(mine)} and {_shown(its)}. Networks with stacked "
                "parameters must be alike in all but their values; make one MultiAgentNet for each group of agents "
                "that are"
            )
    _require_own_tensors(modules)


def require_no_references(modules: Sequence[nn.Module]) -> None:
    """Returns if the modules hold their own parameters and buffers nowhere but under their names.

    Raises UsageError that names the first other place, in a list say: there a call with other tensors goes on with the
    module's own. Recurrent layers may, since they keep their list up to date.
    """
    own = {id(tensor): name for module in modules for name, tensor in _all_tensors(module)}
    seen: dict[int, object] = {id(part): part for module in modules for part in module.modules()}
    for index, module in enumerate(modules):
        for place, value in _description(module):
            for where, tensor in _tensors_in(place, value, seen):
                if id(tensor) in own:
                    raise UsageError(
                        f"module {index} refers to its tensor {own[id(tensor)]!r} in {where} too, where stacked "
                        "parameters do not take its place; look it up by its name when it is needed, or keep a list "
                        "of the names, an nn.ParameterList or an nn.ParameterDict"
                    )


def _tensors_in(where: str, value: Any, seen: dict[int, object]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield where, value
    elif id(value) not in seen and not isinstance(value, (*_PLAIN, *_RANDOM, *_LEARNERS, np.ndarray)):
        seen[id(value)] = value
        for name, part in _parts(value).items():
            yield from _tensors_in(where + name, part, seen)


def _first_difference(mine: nn.Module, its: nn.Module) -> Difference | None:
    own, others = dict(_description(mine)), dict(_description(its))
    parts = {**dict(mine.named_modules()), **dict(_all_tensors(mine))}
    counterparts = {**dict(its.named_modules()), **dict(_all_tensors(its))}
    pairs = [(part, counterparts[name]) for name, part in parts.items() if name in counterparts]
    alike: Alike = {(id(part), id(counterpart), False): (part, counterpart) for part, counterpart in pairs}
    for where in own | others:
        if where not in own or where not in others:
            return Difference(where, own.get(where, "absent"), others.get(where, "absent"))
        difference = _difference(where, own[where], others[where], alike)
        if difference is not None:
            return difference
    for name, counterpart in zip(parts, counterparts, strict=True):
        if name != counterpart:
            return Difference("the order of their parts", name, counterpart)
    return None


def _description(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        yield f"the class of {path or 'the module'}", type_before_parametrizations(part)
        derived = _OF_RECURRENT_LAYERS if isinstance(part, nn.RNNBase) else set()
        for name, value in vars(part).items():
            if name not in _OF_EVERY_MODULE and name not in derived:
                yield f"{prefix}{name}", value
        for name in _HOOKS:  # kept under numbers that count the hooks of all modules
            hooks = getattr(part, name)
            yield f"{prefix}{name}", list(hooks.values())
            for option in (f"{name}_with_kwargs", f"{name}_always_called"):
                yield f"{prefix}{option}", [number in getattr(part, option, ()) for number in hooks]
    names: dict[int, str] = {}
    for name, tensor in _all_tensors(module):
        yield f"the tensor {name}", str(_layout(tensor))
        yield f"what {name} is tied to", names.setdefault(id(tensor), name)


def _difference(where: str, mine: Any, its: Any, alike: Alike, in_function: bool = False) -> Difference | None:
    """Where two values, or what they consist of, differ; None if they do not."""
    pair = (id(mine), id(its), in_function)
    if mine is its or pair in alike:
        return None
    if type(mine) is not type(its):
        return Difference(where, mine, its)
    if isinstance(mine, _PLAIN):
        return None if _same(mine, its) else Difference(where, mine, its)
    if in_function and isinstance(mine, nn.Module | nn.Parameter):
        return Difference(f"{where} (functions are not copied with what they refer to; methods are)", mine, its)
    if isinstance(mine, Tensor):
        return None if _equal(mine, its) else Difference(f"{where} (neither parameter nor buffer)", mine, its)
    if isinstance(mine, _RANDOM):
        return None
    alike[pair] = mine, its
    parts, others = _parts(mine), _parts(its)
    in_order = type(mine) is dict and "()" not in where  # not in what __reduce__ gives, which copies may reorder
    if (list(parts) != list(others)) if in_order else (parts.keys() != others.keys()):
        return Difference(where, mine, its)
    for name, part in parts.items():
        inside = in_function or isinstance(mine, FunctionType)
        difference = _difference(where + name, part, others[name], alike, inside)
        if difference is not None:
            return difference
    return None


def _parts(value: Any) -> dict[str, Any]:
    """What a value consists of, by what to write behind its own name for it."""
    if isinstance(value, list | tuple):
        return {f"[{index}]": part for index, part in enumerate(value)}
    if isinstance(value, dict):
        at = enumerate(value.items())
        return dict((f"[{k!r}]", v) if isinstance(k, _PLAIN) else (f" at {n}", (k, v)) for n, (k, v) in at)
    if isinstance(value, FunctionType):
        variables = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        return {
            **{f".{name}": getattr(value, name) for name in _FUNCTION},
            **{f".<locals>.{name}": cell for name, cell in variables},
            **{f".{name}": attribute for name, attribute in vars(value).items()},
        }
    if isinstance(value, CodeType):
        return {f".{name}": getattr(value, name) for name in _CODE}
    if isinstance(value, CellType):
        try:
            return {"": value.cell_contents}
        except ValueError:  # empty
            return {}
    if isinstance(value, BuiltinFunctionType):
        return {"": value.__qualname__, ".__self__": value.__self__}
    if isinstance(value, MethodType):
        return {".__func__": value.__func__, ".__self__": value.__self__}
    if isinstance(value, partial):
        return {".func": value.func, ".args": value.args, ".keywords": value.keywords}
    reduce = copyreg.dispatch_table.get(type(value))
    try:
        reduced = reduce(value) if reduce else value.__reduce_ex__(2)
    except Exception:
        if hasattr(type(value), "__deepcopy__") or isinstance(value, weakref.ref):
            return {" (which cannot be looked into)": object.__repr__(value)}
        return {}  # locks, files: they cannot be copied either, which stacking tells where it has to
    if isinstance(reduced, str):
        return {"": reduced, **{f".{name}": part for name, part in getattr(value, "__dict__", {}).items()}}
    constructor, arguments, state, *items = (*reduced, None, None, None)[:5]
    named = state if isinstance(state, dict) else {"state": state}
    return {
        **{f".{name}": part for name, part in named.items()},
        "()": (constructor, arguments, *[None if part is None else list(part) for part in items]),
    }


def _same(mine: Any, its: Any) -> bool:
    # Numbers as they are written: -0.0 equals 0.0, though 1 / x tells them apart, and nan does not equal itself.
    return repr(mine) == repr(its) if isinstance(mine, float | complex) else bool(mine == its)


def _equal(mine: Tensor, its: Tensor) -> bool:
    if _layout(mine) != _layout(its) or mine.is_meta:
        return _layout(mine) == _layout(its)
    mine, its = (tensor.detach().to_dense().resolve_conj().resolve_neg() for tensor in (mine, its))
    if mine.is_floating_point() or mine.is_complex():
        mine, its = (tensor.contiguous().flatten().view(torch.uint8) for tensor in (mine, its))
    return torch.equal(mine, its)


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return list(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad


def _shown(value: object) -> str:
    if isinstance(value, nn.Module):
        return type(value).__qualname__
    return " ".join(str(getattr(value, "__qualname__", value)).split())[:200]


def _require_own_tensors(modules: Sequence[nn.Module]) -> None:
    owners: dict[int, tuple[int, str]] = {}
    for index, module in enumerate(modules):
        for name, tensor in named_tensors(module).items():
            owner, owner_name = owners.setdefault(id(tensor), (index, name))
            if owner != index:
                raise UsageError(
                    f"modules {owner} and {index} share the tensor {owner_name!r}; stacking would separate them. For "
                    "one network for all agents use MultiAgentNet([module], n_agents, share_params=True); a part that "
                    "they share can be a module of its own in front of this one"
                )


def _all_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
