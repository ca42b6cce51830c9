"""Checks of what users pass in, made before anything else is done with it. Every check returns the value to use.

An `option` is a field of a dataclass that knows its help and its bounds, for Python, files and command lines alike.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import math
import operator
import os
import reprlib
import textwrap
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

import numpy as np

from muster.errors import ConfigError, WrongType

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

_KINDS: dict[Any, str] = {
    bool: "True or False",
    str: "text",
    Path: "a path",
    types.NoneType: "None",
    Mapping: "a dict, in JSON such as '{\"size\": 5}'",
}


def as_whole(value: Any) -> int | None:
    """`value` as an int; None where it is not a whole number. A bool does not count as a number."""
    try:
        return None if isinstance(value, (bool, np.bool_)) else operator.index(value)
    except TypeError:
        return None


def with_ints(value: Any) -> Any:
    """`value` with ints for whole numbers of other types, such as NumPy's; also those in a list or a tuple."""
    if isinstance(value, (list, tuple, np.ndarray)):
        return tuple(with_ints(one) for one in value) if isinstance(value, tuple) else [with_ints(one) for one in value]
    number = as_whole(value)
    return value if number is None else number


def whole(name: str, value: Any, least: int) -> int:
    """`value` as a whole number of at least `least`. Raises ConfigError."""
    number = as_whole(value)
    if number is None or number < least:
        raise ConfigError(name, f"a whole number of at least {least}", value)
    return number


def seconds(name: str, value: Any) -> float:
    """`value`, if it is a number of seconds greater than 0. Raises ConfigError."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or not value > 0:
        raise ConfigError(name, "a number of seconds greater than 0", value)
    return value  # type: ignore[return-value]  # NumPy's numbers are as good


def flags(**provided: Any) -> list[bool]:
    """The values as bools. Raises ConfigError for a value that is neither True nor False."""
    for name, value in provided.items():
        if not isinstance(value, (bool, np.bool_)):
            raise ConfigError(name, "True or False", value)
    return [bool(value) for value in provided.values()]


def one_of(name: str, value: Any, names: Sequence[str]) -> str:
    """`value`, if it is one of `names`. Raises ConfigError."""
    if value not in names:
        expected = f'"{names[0]}" or "{names[1]}"' if len(names) == 2 else f"one of {', '.join(map(repr, names))}"
        raise ConfigError(name, expected, value)
    return str(value)


def option(
    default: T,
    about: str,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    alias: str | None = None,
    positional: bool = False,
    repeated: bool = False,
) -> T:
    """A field of a dataclass of options: in Python, in a file and of a command.

    about: its line in a command's help.  least, above, most: the bounds of a number. Without `most` it is finite, and a
        whole one below 2**64.
    alias: another name on a command line.  positional: a command line has its value without its name.
    repeated: each of several values has the name before it.
    """
    facts = {"about": about, "least": least, "above": above, "most": most}
    facts |= {"alias": alias, "positional": positional, "repeated": repeated}
    if isinstance(default, dict):
        return typing.cast(T, dataclasses.field(default_factory=default.copy, metadata=facts))
    return dataclasses.field(default=default, metadata=facts)


def option_of(name: str) -> str:
    """The option of a command line that sets the field `name`."""
    return name.upper() if name in ("env", "run", "runs", "pid") else f"--{name.replace('_', '-')}"


_BOUNDS = {"least": "at least", "above": "above", "most": "at most"}


def explained(owner: type[T]) -> type[T]:
    """A decorator for dataclasses: a line for each `option` behind the docstring's first paragraph."""
    first, *rest = inspect.cleandoc(owner.__doc__ or "").split("\n\n")
    fields: Any = dataclasses.fields(owner)  # type: ignore[arg-type]  # no type says that it is a dataclass
    whole = []
    for one in fields:
        bounds = [(word, one.metadata[key]) for key, word in _BOUNDS.items()]
        facts = [f"default: {one.default!r}", *(f"{word} {at}" for word, at in bounds if at not in (None, math.inf))]
        whole.append(f"{one.name}: {one.metadata['about']} ({', '.join(facts)})")
    lines = "\n".join(textwrap.fill(line, 116, subsequent_indent="    ") for line in whole)
    owner.__doc__ = "\n\n".join([first, lines, *rest])
    return owner


def check_options(options: Any) -> None:
    """Gives each `option` of a dataclass the value of `checked_option`; for its ``__post_init__``. Raises ConfigError.

    Fields that a user's own subclass adds stay as they are.
    """
    owner: type = type(options)
    for name, (_, facts) in fields_of(owner).items():
        if facts:
            object.__setattr__(options, name, checked_option(owner, name, getattr(options, name)))


def checked_option(owner: type, name: str, value: Any) -> Any:
    """`value` as the field of the dataclass `owner` has it: NumPy's numbers and lists become Python's and tuples.

    Raises ConfigError for a value of another type than the field's, or out of its bounds.
    """
    kind, bounds = fields_of(owner)[name]
    for one in alternatives(kind):
        converted = _as_kind(one, value)
        if _is_of(one, converted, bounds):
            return converted
    *others, last = [words for one in alternatives(kind) for words in _described(one, bounds)]
    raise ConfigError(name, f"{', '.join(others)} or {last}" if others else last, value)


@functools.cache
def fields_of(owner: type) -> dict[str, tuple[Any, Mapping[str, Any]]]:
    """Type and metadata of the fields of a dataclass, by their names."""
    kinds = typing.get_type_hints(owner)
    return {field.name: (kinds[field.name], field.metadata) for field in dataclasses.fields(owner)}


def alternatives(kind: Any) -> tuple[Any, ...]:
    """The types that a union is of; of another type, that one."""
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


def _as_kind(kind: Any, value: Any) -> Any:
    if typing.get_origin(kind) is tuple and isinstance(value, (list, tuple)):
        return tuple(_as_kind(typing.get_args(kind)[0], one) for one in value)
    if kind is bool and isinstance(value, np.bool_):
        return bool(value)
    if kind is str and isinstance(value, Path):
        return str(value)
    if kind is Path and isinstance(value, (str, os.PathLike)) and value:
        return Path(value)
    if kind is int:
        value = int(value) if isinstance(value, float) and value.is_integer() else value  # 1e6 is fine
        return value if (number := as_whole(value)) is None else number
    if kind is float and isinstance(value, (int, float, np.number)) and not isinstance(value, bool):
        return float(value)
    return value


def _is_of(kind: Any, value: Any, bounds: Mapping[str, Any]) -> bool:
    origin = typing.get_origin(kind)
    if origin is Literal:
        return value in typing.get_args(kind)
    if origin is tuple:
        return isinstance(value, tuple) and all(_is_of(typing.get_args(kind)[0], one, bounds) for one in value)
    if kind not in (int, float):
        return isinstance(value, origin or kind)
    least, above, most = bounds["least"], bounds["above"], bounds["most"]
    return type(value) is kind and (
        (least is None or value >= least)
        and (above is None or value > above)
        and (abs(value) < (2**64 if kind is int else math.inf) if most is None else value <= most)
    )


def _described(kind: Any, bounds: Mapping[str, Any]) -> list[str]:
    """The values that are allowed, in words."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        return list(map(repr, parts))
    if origin is tuple:
        return [f"a list, each entry {' or '.join(_described(parts[0], bounds))}"]
    if kind not in (int, float):
        return [_KINDS[origin or kind]]
    least, above, most = bounds["least"], bounds["above"], bounds["most"]
    number = "a whole number" if kind is int else "a number"
    if least is not None and most is not None:
        return [f"{number} from {least} to {most}"]
    return [number + (f" of at least {least}" if above is None else f" above {above}")]


def explains_keywords(
    env_kwargs: str = "env_kwargs={}", options: Collection[str] = (), in_options: str = ""
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator for makers of envs: an unknown keyword raises WrongType that says where it may belong.

    env_kwargs: how the env's own keywords are passed, with {} for their dict.  options: of keywords that are passed on
    inside another argument, in_options: how, with {} for their dict.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        known = inspect.signature(function).parameters
        name = function.__qualname__.removesuffix(".__init__")

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            for keyword in kwargs:
                if keyword not in known:
                    place = in_options if keyword in options else env_kwargs
                    written = place.format(f'{{"{keyword}": {reprlib.repr(kwargs[keyword])}}}')
                    near = difflib.get_close_matches(keyword, known, n=1, cutoff=0.75)
                    meant = f"Did you mean {near[0]}? " if near else ""
                    if keyword in ("cluster", "num_collectors"):
                        meant = f"Collectors have it: muster.MultiCollector(envs, policy, {keyword}=...). "
                    owner = "make_vec" if keyword in options else "the env itself"
                    raise WrongType(
                        f"{name}() got an unexpected keyword argument {keyword!r}. {meant}A keyword of {owner} is "
                        f"passed as {written}."
                    )
            return function(*args, **kwargs)

        return checked

    return decorate
