"""What users hand over, checked before anything is done with it. Every check returns what is to be used."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from muster.errors import ConfigError


def as_whole(value: Any) -> int | None:
    """`value` as an int, None where it is no whole number; a bool is none."""
    try:
        return None if isinstance(value, (bool, np.bool_)) else operator.index(value)
    except TypeError:
        return None


def whole(name: str, value: Any, least: int, what: str = "an int") -> int:
    """A whole number of at least `least`. Raises ConfigError."""
    number = as_whole(value)
    if number is None or number < least:
        raise ConfigError(f"{name} must be {what} of at least {least}, got {value!r}")
    return number


def at_least(name: str, value: int, least: int, end: str = "") -> int:
    """A number that is known to be one. end: of the sentence. Raises ConfigError."""
    if value < least:
        raise ConfigError(f"{name} must be at least {least}, got {value!r}{end}")
    return value


def seconds(name: str, value: Any) -> float:
    """A time to wait. Raises ConfigError."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or not value > 0:
        raise ConfigError(f"{name} must be a number of seconds greater than 0, got {value!r}")
    return value  # type: ignore[return-value]  # NumPy's numbers are as good


def flags(**given: Any) -> list[bool]:
    """Raises ConfigError for what is only taken for True or False."""
    for name, value in given.items():
        if not isinstance(value, (bool, np.bool_)):
            raise ConfigError(f"{name} must be True or False, got {value!r}")
    return [bool(value) for value in given.values()]


def one_of(name: str, value: Any, names: Sequence[str]) -> str:
    """One of several words. Raises ConfigError."""
    if value not in names:
        expected = f'"{names[0]}" or "{names[1]}"' if len(names) == 2 else f"one of {', '.join(map(repr, names))}"
        raise ConfigError(f"{name} must be {expected}, got {value!r}")
    return str(value)
