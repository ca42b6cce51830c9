"""Envs that are known to share nothing with others in their process, so that several may be stepped in one."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gymnasium.envs.registration import EnvSpec

from muster.introspection import module_name
from muster.recipes.gymnasium_ids import MakeGym
from muster.recipes.recipe import Recipe

_PACKAGES = ("gymnasium", "ale_py", "pettingzoo", "mpe2", "minigrid", "dm_control", "meltingpot", "muster")
# Wraps many libraries for Gymnasium; each has a namespace of ids.
_BRIDGE, _BRIDGED = "shimmy", "dm_control"


class OfKnownLibrary:
    """A base for Muster's own factories of envs whose code is of one of these libraries, whatever their arguments."""


def is_known(recipe: Recipe) -> bool:
    """Whether the recipe makes an env of an id whose code, and all of whose wrappers' code, is of known libraries.

    A factory may do anything, and is never known: not even one that calls ``gymnasium.make`` with such an id.
    """
    return _makes_known(recipe.factory) and all(map(_is_of_known, recipe.wrappers))


def is_of_known_library(path: str) -> bool:
    """Whether ``package.module``, or ``package.module:Id-v0``, is of one of these libraries."""
    return _package(path) in _PACKAGES


def advise_apart(recipes: Sequence[Recipe]) -> str:
    """The sentence that says how each of several envs in one process gets its own; empty where that cannot help."""
    if len(recipes) < 2 or all(map(is_known, recipes)):
        return ""
    one_each = recipes[0].call.one_each
    return f"If a library behind the envs works only once in a process, give each env its own: {one_each}."


def _makes_known(factory: Callable[..., Any]) -> bool:
    if type(factory) is not MakeGym:
        return isinstance(factory, OfKnownLibrary)
    target = factory.target
    if isinstance(target, str):  # an id of a module that only the worker imports
        return _package(target) in _PACKAGES
    return (
        _entry_is_known(target.entry_point, target)
        and all(_entry_is_known(one.entry_point) and _are_known(one.kwargs or {}) for one in target.additional_wrappers)
        and all(_is_of_known(wrapper) and _are_known(kwargs) for wrapper, kwargs in factory.late_wrappers)
    )


def _entry_is_known(entry_point: Any, spec: EnvSpec | None = None) -> bool:
    package = _package(entry_point) if isinstance(entry_point, str) else _package_of(entry_point)
    return package in _PACKAGES or (package == _BRIDGE and spec is not None and spec.namespace == _BRIDGED)


def _are_known(kwargs: Mapping[str, Any]) -> bool:
    """Whether a wrapper's arguments hold no code of anybody else."""
    return all(_is_of_known(value) for value in kwargs.values() if callable(value))


def _is_of_known(function: Any) -> bool:
    if type(function) is functools.partial:
        functions = (function.func, *function.args, *function.keywords.values())
        return all(_is_of_known(one) for one in functions if callable(one))
    return _package_of(function) in _PACKAGES


def _package_of(function: Any) -> str:
    if isinstance(function, types.FunctionType):  # what functools.wraps has copied names another function's module
        return _package(str(function.__globals__.get("__name__", "")))
    code = isinstance(function, (type, types.BuiltinFunctionType))
    return _package(module_name(function if code else type(function)))


def _package(path: str) -> str:
    """The topmost package of ``package.module`` or ``package.module:name``."""
    return path.partition(":")[0].partition(".")[0]
