"""Choices as vectors of zeros and ones, as TorchRL's envs take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium import spaces


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
