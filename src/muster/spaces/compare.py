"""The first difference between two spaces, with its path; and spaces as users get them, to edit without effect."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple, TypeVar

import numpy as np
from gymnasium import spaces

from muster.spaces.tree import Space

S = TypeVar("S", bound="spaces.Space[Any]")
# The attributes that make up a space's layout, and those that are its bounds.
_FIELDS: dict[type[Space], tuple[tuple[str, ...], tuple[str, ...]]] = {
    spaces.Box: (("shape", "dtype"), ("low", "high")),
    spaces.Discrete: (("dtype",), ("n", "start")),
    spaces.MultiDiscrete: (("shape", "dtype"), ("nvec", "start")),
    spaces.MultiBinary: (("shape", "dtype"), ()),
    spaces.Text: (("max_length",), ("min_length", "character_set")),
}


class Difference(NamedTuple):
    """A place where two spaces disagree: `path` and `field`, and both values."""

    path: str
    field: str
    expected: object
    got: object


def first_difference(expected: Space, got: Space, path: str, *, bounds: bool) -> Difference | None:
    """The first place where two spaces differ in layout, or with `bounds` also in bounds; None if there is none.

    Dict keys are compared by value, in any order.
    """
    if type(expected) is not type(got):
        return Difference(path, "type", type(expected).__name__, type(got).__name__)
    if isinstance(expected, spaces.Dict) and isinstance(got, spaces.Dict):
        if set(expected.spaces) != set(got.spaces):
            return Difference(path, "keys", list(expected.spaces), list(got.spaces))
        pairs = [(f"{path}[{key!r}]", expected[key], got[key]) for key in expected.spaces]
    elif isinstance(expected, (spaces.Tuple, spaces.OneOf)) and isinstance(got, (spaces.Tuple, spaces.OneOf)):
        if len(expected.spaces) != len(got.spaces):
            return Difference(path, "length", len(expected.spaces), len(got.spaces))
        pairs = [(f"{path}[{i}]", a, b) for i, (a, b) in enumerate(zip(expected.spaces, got.spaces, strict=True))]
    else:
        layout, limits = next((one for kind, one in _FIELDS.items() if isinstance(expected, kind)), ((), ()))
        for field in layout + (limits if bounds else ()):
            a, b = getattr(expected, field), getattr(got, field)
            if not (np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b):
                return Difference(path, field, a, b)
        if not layout and expected != got:
            return Difference(path, "space", expected, got)
        return None
    for child_path, a, b in pairs:
        if found := first_difference(a, b, child_path, bounds=bounds):
            return found
    return None


def handed_out(space: S) -> S:
    """A copy of the space; the space itself where it cannot be copied."""
    try:
        return copy.deepcopy(space)
    except Exception:
        return space
