"""The kinds of envs among recipes: what one env of a kind does to others in its process, all of the kind do."""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Iterator, Sequence
from typing import Any

from gymnasium.envs.registration import EnvSpec, WrapperSpec

from muster.lazy_values import Lazy
from muster.pickling import is_plain
from muster.recipes.known_envs import OfKnownLibrary
from muster.recipes.recipe import Recipe

_ENV_ID = re.compile(r"[\w./:-]*-v\d+|(?:pettingzoo|meltingpot)/[\w./-]+")
# In these a string names code, except among the arguments.
_NAMING_CODE = (EnvSpec, WrapperSpec, OfKnownLibrary)


def kinds_of(recipes: Sequence[Recipe], most: int) -> list[list[Recipe]] | None:
    """The recipes by their kinds; None where there are more than `most`.

    Recipes are of one kind if one code builds them and wraps them, by arguments that differ in numbers and strings
    alone: seeds, ports, levels, paths. Another function, class or env id makes another kind.
    """
    kinds: list[list[Recipe]] = []
    for recipe in recipes:
        kind = next((kind for kind in kinds if _same_kind(kind[0], recipe)), None)
        if kind is not None:
            kind.append(recipe)
        elif len(kinds) < most:
            kinds.append([recipe])
        else:
            return None
    return kinds


def _same_kind(one: Recipe, other: Recipe) -> bool:
    try:
        return _alike_in(one, other, "factory", "kwargs", "wrappers", "may_reuse")
    except Exception:  # comparing a user's objects may raise anything; nested too deeply, RecursionError
        return False


def _alike(one: Any, other: Any) -> bool:
    """Returns whether two objects are the same, or hold the same code with other numbers and strings."""
    if one is other:
        return True
    if is_plain(one) and is_plain(other):
        return list(_env_ids(one)) == list(_env_ids(other))
    kind = type(one)
    if kind is not type(other):
        return False
    if kind is dict:
        return one.keys() == other.keys() and all(_alike(value, other[key]) for key, value in one.items())
    if kind in (list, tuple):
        return len(one) == len(other) and all(map(_alike, one, other))
    if kind is types.CellType:
        return _alike(one.cell_contents, other.cell_contents)
    if kind is types.FunctionType:
        same = one.__code__ is other.__code__ and one.__globals__ is other.__globals__
        return same and _alike_in(one, other, "__closure__", "__defaults__", "__kwdefaults__", "__dict__")
    if kind is types.MethodType:
        return _alike_in(one, other, "__func__", "__self__")
    if kind is functools.partial:
        return _alike_in(one, other, "func", "args", "keywords")
    if kind is Lazy:
        return _alike_in(one, other, "fn", "args", "kwargs")
    if issubclass(kind, (type, types.ModuleType)) or not hasattr(one, "__dict__"):
        return False
    if issubclass(kind, _NAMING_CODE):
        return all(getattr(other, name) == value for name, value in vars(one).items() if name != "kwargs") and _alike(
            getattr(one, "kwargs", None), getattr(other, "kwargs", None)
        )
    return _alike(vars(one), vars(other))


def _alike_in(one: Any, other: Any, *names: str) -> bool:
    return all(_alike(getattr(one, name), getattr(other, name)) for name in names)


def _env_ids(plain: Any) -> Iterator[str]:
    """The strings in plain data that look like ids of envs."""
    if isinstance(plain, str):
        if _ENV_ID.fullmatch(plain):
            yield plain
    elif isinstance(plain, dict):
        for item in plain.items():
            yield from _env_ids(item)
    elif isinstance(plain, (list, tuple)):
        for value in plain:
            yield from _env_ids(value)
