"""Spaces as users get them: copies, since some edit what they get, and what they edit must not be what is compared."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from gymnasium import spaces

S = TypeVar("S", bound="spaces.Space[Any]")


def handed_out(space: S) -> S:
    """A copy of the space; the space itself where it cannot be copied."""
    try:
        return copy.deepcopy(space)
    except Exception:
        return space
