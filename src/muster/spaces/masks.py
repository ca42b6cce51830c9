"""Action masks, which say what choices of a discrete action are allowed: one flag for each, part after part."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterator
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
    """The error for masks that are none of the action space. expected: instead of the shape. Else as for `usable`.

    masks: None for one that was given as no array.
    """
    if masks is None:
        return _mismatch(f"{of} is no array", space, lead, expected)
    given = _array(masks)
    return _mismatch(f"{of} has shape {given.shape}", space, lead, expected, f"; got {reprlib.repr(given.tolist())}")


def require_obeyable(seen: Space, acts: Space, shape: tuple[int, ...] | None = None, *, of: str = "") -> None:
    """Raises SpecMismatch where observations hold a mask that nobody can obey: below another key, of another shape.

    shape: of a mask that observations of the env have, and that `seen` lacks.  of: the owner of the observation.
    """
    for path, found in [*_masks_in(seen), *([] if shape is None else [((MASK,), shape)])]:
        length = mask_length(acts)
        if path != (MASK,) or found != (length,) or not length:
            expected = f"({length},) of 0 and 1, not below another key" if path != (MASK,) and length else ""
            raise _mismatch(f"the observation's {list(path)}{of} has shape {found}", acts, expected=expected)


def _masks_in(space: Space, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The places of action masks in a space of observations, and their shapes."""
    parts = space.items() if isinstance(space, spaces.Dict) else enumerate(getattr(space, "spaces", ()))
    for key, part in parts:
        if key == MASK:
            yield (*path, key), part.shape
        else:
            yield from _masks_in(part, (*path, key))


def _mismatch(found: str, space: Space, lead: tuple[int, ...] = (), expected: str = "", got: str = "") -> SpecMismatch:
    length = mask_length(space)
    fitting = f"{(*lead, length)} of 0 and 1" if length else "none, which is for Discrete, MultiDiscrete, MultiBinary"
    return SpecMismatch(
        f"{found}, expected {expected or fitting}, for the actions {' '.join(str(space).split())}{got}. "
        "Mend it, or rename what is no mask in a wrapper"
    )


def obey(actions: Array, space: Space, masks: Any, rng: np.random.Generator, *, of: str = "the action mask") -> Array:
    """`actions` ``[..., *shape]``, contiguous; parts that `masks`, ``[..., n]``, forbid are drawn again, in place."""
    flags = usable(masks, space, *np.shape(masks)[:-1], of=of)
    parts = choices_of(space)
    assert parts is not None  # `usable` has refused masks of other spaces
    columns = actions.reshape(*flags.shape[:-1], len(parts[0]))
    pieces = np.split(flags, np.cumsum(parts[0])[:-1], -1)
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
