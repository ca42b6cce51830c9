"""Spaces with leading axes."""

from __future__ import annotations

import numpy as np
from gymnasium import spaces

from muster.errors import SpecMismatch
from muster.spaces.one_hot import OneHot
from muster.spaces.tree import Space


def stacked_space(space: Space, lead: tuple[int, ...]) -> Space:
    """`space` with the leading axes `lead`; discrete spaces stay discrete."""
    if not lead:
        return space
    if isinstance(space, spaces.Discrete):
        start = np.full(lead, space.start, space.dtype)
        return spaces.MultiDiscrete(np.full(lead, space.n), dtype=space.dtype, start=start)
    if isinstance(space, spaces.MultiDiscrete):
        whole = lead + space.shape
        start = np.broadcast_to(space.start, whole).copy()
        return spaces.MultiDiscrete(np.broadcast_to(space.nvec, whole).copy(), dtype=space.dtype, start=start)
    if isinstance(space, spaces.MultiBinary):
        return spaces.MultiBinary(lead + space.shape)
    if isinstance(space, OneHot):
        return OneHot(space.counts, lead + space.shape[:-1], space.dtype.type)
    if isinstance(space, spaces.Box):
        low, high = (np.broadcast_to(bound, lead + space.shape) for bound in (space.low, space.high))
        return spaces.Box(low, high, dtype=space.dtype.type)
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: stacked_space(one, lead) for key, one in space.items()})
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple(tuple(stacked_space(one, lead) for one in space.spaces))
    raise SpecMismatch(f"agents' spaces must have a fixed layout, got {space}")
