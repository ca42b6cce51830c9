"""Action masks, which say what of n choices is allowed."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from muster.spaces.tree import Array, Space

MASK = "action_mask"
"""The key of a mask in infos and in Dict observations."""


def are_masks(masks: Any, space: Space) -> bool:
    """Whether an array ``[..., n]`` is of masks of an action space: of a Discrete one of n choices. None is not."""
    return masks is not None and isinstance(space, spaces.Discrete) and np.shape(masks)[-1:] == (space.n,)


def usable(masks: Any) -> Array:
    """The masks ``[..., n]`` as bool; one that allows nothing allows everything."""
    masks = np.asarray(masks, np.bool_)
    return masks | ~masks.any(-1, keepdims=True)  # type: ignore[no-any-return]  # of NumPy's


def obey(actions: Array, start: Any, masks: Any, rng: np.random.Generator) -> Array:
    """`actions`, ints ``[...]`` from `start` on; those that `masks`, ``[..., n]``, forbid are drawn again, in place."""
    masks, start = usable(masks), np.broadcast_to(start, actions.shape)
    wrong = ~np.take_along_axis(masks, (actions - start)[..., None], -1)[..., 0]
    if wrong.any():
        drawn = (rng.random(masks[wrong].shape) * masks[wrong]).argmax(-1)
        actions[wrong] = drawn + start[wrong]
    return actions
