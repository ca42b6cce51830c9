"""Checks of what users pass in, made before anything else is done with it. Every check returns the value to use."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from muster.errors import ConfigError


def as_whole(value: Any) -> int | None:
    """`value` as an int; None where it is not a whole number. A bool does not count as a number."""
    try:
        return None if isinstance(value, (bool, np.bool_)) else operator.index(value)
    except TypeError:
        return None


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
