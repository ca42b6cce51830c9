"""Action masks, which say what choices of a discrete action are allowed: one flag for each, part after part."""

from __future__ import annotations

import math
import reprlib
from typing import Any

import numpy as np
from gymnasium import spaces

from muster.errors import SpecMismatch
from muster.spaces.tree import Array, Space

MASK = "action_mask"
"""The key of a mask in infos and in Dict observations."""


def choices_of(space: Space) -> tuple[Array, Array] | None:
    """The number of choices in each part of an action ``[K]``, and the first of each; None for other spaces.

    A MultiDiscrete action has a part for each of its numbers, a MultiBinary one for each of its bits.
    """
    if isinstance(space, spaces.Discrete):
        return np.array([space.n]), np.array([space.start])
    if isinstance(space, spaces.MultiDiscrete):
        return space.nvec.reshape(-1), space.start.reshape(-1)
    if isinstance(space, spaces.MultiBinary):
        return np.full(math.prod(space.shape), 2), np.zeros(math.prod(space.shape), np.int64)
    return None


def mask_length(space: Space) -> int:
    """The number of flags in a mask of an action space; 0 where it takes none."""
    parts = choices_of(space)
    return 0 if parts is None else int(parts[0].sum())


def usable(masks: Any, space: Space, *lead: int, of: str = "the action mask") -> Array:
    """The masks of an action space as bool ``[*lead, n]``; a part that allows nothing allows everything.

    The masks of a batch of one may be ``[*lead[1:], n]``.  of: what an error calls them.
    Raises SpecMismatch for other shapes and other spaces, and for anything but 0 and 1.
    """
    parts, given = choices_of(space), _array(masks)
    if lead[:1] == (1,) and given.ndim == len(lead):
        given = given[None]
    fits = parts is not None and given.shape == (*lead, parts[0].sum()) and given.dtype.kind in "biuf"
    if parts is None or not fits or (given != (flags := given.astype(np.bool_))).any():
        raise unusable(given, space, *lead, of=of)
    counts = parts[0]
    nothing = ~np.logical_or.reduceat(flags, np.cumsum(counts) - counts, -1)
    return flags | np.repeat(nothing, counts, -1)  # type: ignore[no-any-return]  # of NumPy's


def unusable(masks: Any, space: Space, *lead: int, of: str = "the action mask", expected: str = "") -> SpecMismatch:
    """The error for masks that are none of the action space. expected: instead of the shape. Else as for `usable`."""
    given, length = _array(masks), mask_length(space)
    fitting = f"{(*lead, length)} of 0 and 1" if length else "none, which is for Discrete, MultiDiscrete, MultiBinary"
    return SpecMismatch(
        f"{of} has shape {given.shape}, expected {expected or fitting}, for the actions "
        f"{' '.join(str(space).split())}; got {reprlib.repr(given.tolist())}. Mend it, or rename what is no mask in a "
        "wrapper"
    )


def obey(actions: Array, space: Space, masks: Any, rng: np.random.Generator, *, of: str = "the action mask") -> Array:
    """`actions` ``[..., *shape]``, contiguous; parts that `masks`, ``[..., n]``, forbid are drawn again, in place."""
    parts, masks = choices_of(space), np.asarray(masks)
    assert parts is not None
    columns = actions.reshape(*masks.shape[:-1], len(parts[0]))
    pieces = np.split(usable(masks, space, *masks.shape[:-1], of=of), np.cumsum(parts[0])[:-1], -1)
    for chosen, start, allowed in zip(np.moveaxis(columns, -1, 0), parts[1], pieces, strict=True):
        wrong = ~np.take_along_axis(allowed, (chosen - start)[..., None], -1)[..., 0]
        if wrong.any():
            chosen[wrong] = (rng.random(allowed[wrong].shape) * allowed[wrong]).argmax(-1) + start
    return actions


def _array(masks: Any) -> Array:
    """`masks` as an array, lists in an array of objects too; one of objects where NumPy makes no other of them."""
    try:
        return np.asarray(masks.tolist() if isinstance(masks, np.ndarray) and masks.dtype.hasobject else masks)
    except ValueError:  # of several lengths
        return np.asarray(masks, object)
