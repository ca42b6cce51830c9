"""Checks of what users pass in, made before anything else is done with it. Every check returns the value to use."""

from __future__ import annotations

import difflib
import functools
import inspect
import operator
import reprlib
from collections.abc import Callable, Collection, Sequence
from typing import Any, ParamSpec, TypeVar

import numpy as np

from muster.errors import ConfigError, WrongType

P = ParamSpec("P")
R = TypeVar("R")


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


def whole(name: str, value: Any, least: int, what: str = "an int") -> int:
    """`value` as a whole number of at least `least`. what: the expected kind, for the message. Raises ConfigError."""
    number = as_whole(value)
    if number is None or number < least:
        raise ConfigError(f"{name} must be {what} of at least {least}, got {value!r}")
    return number


def at_least(name: str, value: Any, least: int, end: str = "") -> int:
    """`value` as a whole number of at least `least`. end: the end of the message. Raises ConfigError.

    Unlike that of `whole`, the message for a whole number that is too small names no kind.
    """
    number = as_whole(value)
    kind = "a whole number of " if number is None else ""
    if number is None or number < least:
        raise ConfigError(f"{name} must be {kind}at least {least}, got {value!r}{end}")
    return number


def seconds(name: str, value: Any) -> float:
    """`value`, if it is a number of seconds greater than 0. Raises ConfigError."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or not value > 0:
        raise ConfigError(f"{name} must be a number of seconds greater than 0, got {value!r}")
    return value  # type: ignore[return-value]  # NumPy's numbers are as good


def flags(**provided: Any) -> list[bool]:
    """The values as bools. Raises ConfigError for a value that is neither True nor False."""
    for name, value in provided.items():
        if not isinstance(value, (bool, np.bool_)):
            raise ConfigError(f"{name} must be True or False, got {value!r}")
    return [bool(value) for value in provided.values()]


def one_of(name: str, value: Any, names: Sequence[str]) -> str:
    """`value`, if it is one of `names`. Raises ConfigError."""
    if value not in names:
        expected = f'"{names[0]}" or "{names[1]}"' if len(names) == 2 else f"one of {', '.join(map(repr, names))}"
        raise ConfigError(f"{name} must be {expected}, got {value!r}")
    return str(value)


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
                    whose = "make_vec" if keyword in options else "the env itself"
                    raise WrongType(
                        f"{name}() got an unexpected keyword argument {keyword!r}. {meant}A keyword of {whose} is "
                        f"passed as {written}."
                    )
            return function(*args, **kwargs)

        return checked

    return decorate
