"""Wrappers of the field whose methods are known to the letter.

Whoever goes past a wrapper has to know what it does, not what it is called: a class that was patched, or comes from a
release that does otherwise, is not known.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import sys
import textwrap
from types import CodeType, FunctionType
from typing import Any

from muster.introspection import class_name

_GYMNASIUM = "gymnasium.wrappers.common."
_PETTINGZOO = "pettingzoo.utils."
_MELTING_POT = "meltingpot.utils.substrates."
_OF_AEC = ("__getattr__", "last", "observe", "step")
_OF_PLAYERS = ("_get_timestep", "_get_rewards", "_get_observations", "_get_action", "_player_observations")
# What counts in each class, and digests of what its releases say there: Gymnasium 1.3 and 1.4, PettingZoo 1.25 to 1.27,
# Melting Pot 2.4.
_KNOWN: dict[str, tuple[tuple[str, ...], frozenset[str]]] = {
    f"{_GYMNASIUM}TimeLimit": (("step",), frozenset({"fdeffe6697da0f64"})),
    f"{_GYMNASIUM}OrderEnforcing": (("step",), frozenset({"56669f78131a5958"})),
    f"{_GYMNASIUM}PassiveEnvChecker": (("step",), frozenset({"ebd086db87278928", "bdee19d29c5a68db"})),
    f"{_PETTINGZOO}conversions.aec_to_parallel_wrapper": (
        ("step",),
        frozenset({"4e375edcdfd53e21", "1f487e47e800d164"}),
    ),
    f"{_PETTINGZOO}wrappers.order_enforcing.OrderEnforcingWrapper": (
        _OF_AEC,
        frozenset({"14d9078b29cbd44c", "c19c35223af52dd8"}),
    ),
    f"{_PETTINGZOO}wrappers.assert_out_of_bounds.AssertOutOfBoundsWrapper": (
        _OF_AEC,
        frozenset({"85d657f0e6fc7306", "053a74ed69315d52"}),
    ),
    f"{_PETTINGZOO}wrappers.clip_out_of_bounds.ClipOutOfBoundsWrapper": (
        _OF_AEC,
        frozenset({"c3c3092e65401038", "4f0a10181e888efd"}),
    ),
    f"{_MELTING_POT}substrate.Substrate": (("events", "step"), frozenset({"8b07115756c2bafc"})),
    f"{_MELTING_POT}wrappers.collective_reward_wrapper.CollectiveRewardWrapper": (
        ("events", "step", "_get_timestep"),
        frozenset({"eea9be7cf33f13ff"}),
    ),
    f"{_MELTING_POT}wrappers.discrete_action_wrapper.Wrapper": (("events", "step"), frozenset({"3aca47d23b7dbe95"})),
    f"{_MELTING_POT}wrappers.multiplayer_wrapper.Wrapper": (
        ("events", "step", *_OF_PLAYERS),
        frozenset({"4b57374888800fe9"}),
    ),
    f"{_MELTING_POT}wrappers.observables_wrapper.ObservablesWrapper": (
        ("events", "step"),
        frozenset({"8b07115756c2bafc"}),
    ),
    f"{_MELTING_POT}wrappers.reset_wrapper.ResetWrapper": (("events", "step"), frozenset({"ce227bb3e022f7cd"})),
    "dmlab2d.Environment": (("events", "step", "observation", "_read_action"), frozenset({"04603b1eec9ec537"})),
}


def is_known(wrapper: Any, name: str) -> bool:
    """Whether `wrapper` is of the class `name`, ``module.Class``, itself, and works as one of its known releases."""
    cls = type(wrapper)
    if class_name(cls) != name:
        return False
    methods, digests = _KNOWN[name]
    codes = _codes(cls, methods)
    return bool(codes) and vars(wrapper).keys().isdisjoint(methods) and _digest(codes) in digests


def _codes(cls: type, names: tuple[str, ...]) -> tuple[CodeType, ...]:
    """Of the methods, in the class, its bases, and as functions of its module; none if one is no plain function."""
    module = sys.modules.get(cls.__module__)
    places = [vars(base) for base in cls.__mro__] + ([] if module is None else [vars(module)])
    found = [place[name] for name in names for place in places if name in place]
    return tuple(one.__code__ for one in found) if all(type(one) is FunctionType for one in found) else ()


@functools.lru_cache(maxsize=64)
def _digest(codes: tuple[CodeType, ...]) -> str:
    """Of what the functions say; empty where that cannot be seen."""
    try:
        return hashlib.sha256("\n".join(map(_text, codes)).encode()).hexdigest()[:16]
    except Exception:
        return ""


def _text(code: CodeType) -> str:
    """The function's source without its docstring, comments and annotations. Raises what comes of there being none."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(code))).body[0]
    if not isinstance(tree, ast.FunctionDef):
        raise TypeError
    if ast.get_docstring(tree) is not None:
        del tree.body[0]
    tree.returns = None
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
    # Python's releases differ in the quotes that they write.
    return ast.unparse(tree).replace('"', "'")
