"""Spaces with leading axes, and choices as vectors of zeros and ones, as TorchRL's envs take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from muster.errors import SpecMismatch
from muster.spaces.tree import Space


class OneHot(spaces.Box):
    """Vectors with a single 1 in each of their parts.

    counts: the length of each part.  lead: the axes before the vectors.
    """

    def __init__(self, counts: Sequence[int], lead: tuple[int, ...] = (), dtype: type = np.int64) -> None:
        self.counts = tuple(counts)
        super().__init__(0, 1, (*lead, sum(counts)), dtype)

    def draw(self, lead: tuple[int, ...], rng: np.random.Generator) -> npt.NDArray[Any]:
        """Random elements ``[*lead, *shape]``."""
        before = (*lead, *self.shape[:-1])
        parts = [np.eye(count, dtype=self.dtype)[rng.integers(count, size=before)] for count in self.counts]
        return np.concatenate(parts, axis=-1)

    def sample(self, mask: None = None, probability: None = None) -> npt.NDArray[Any]:
        return self.draw((), self.np_random)


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
