"""dm_env's specs as Gymnasium's spaces. Specs are recognised by their attributes: dm_env itself is not needed."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from muster.errors import SpecMismatch
from muster.spaces.tree import Space

# New in Gymnasium 1.3.
_DISCRETE_TAKES_DTYPE = "dtype" in inspect.signature(spaces.Discrete).parameters


def space_of(spec: Any, path: str) -> Space:
    """The space of a spec, or of a nested structure of specs; keys of dicts are sorted.

    DiscreteArray -> Discrete; BoundedArray and Array -> Box of the spec's shape, dtype and bounds; a spec without
    bounds has those of its dtype. Raises SpecMismatch for strings and for objects that are no specs.
    """
    if isinstance(spec, Mapping):
        return spaces.Dict([(key, space_of(spec[key], f"{path}[{key!r}]")) for key in sorted(spec, key=str)])
    if isinstance(spec, (list, tuple)):
        return spaces.Tuple(tuple(space_of(one, f"{path}[{i}]") for i, one in enumerate(spec)))
    shape, dtype = getattr(spec, "shape", None), getattr(spec, "dtype", None)
    if shape is None or dtype is None or np.dtype(dtype).kind not in "biuf":
        raise SpecMismatch(
            f"{path} has the spec {spec!r}; expected a dm_env spec of numbers, or a dict or list of these"
        )
    dtype, shape = np.dtype(dtype), tuple(shape)
    if hasattr(spec, "num_values") and shape == () and dtype.kind in "iu":
        return _discrete(int(spec.num_values), dtype)
    low, high = _limits(dtype)
    minimum, maximum = getattr(spec, "minimum", low), getattr(spec, "maximum", high)
    bounds = [np.broadcast_to(np.asarray(bound, dtype), shape) for bound in (minimum, maximum)]
    return spaces.Box(bounds[0], bounds[1], shape, dtype=dtype.type)


def _discrete(n: int, dtype: np.dtype[Any]) -> spaces.Discrete:
    if _DISCRETE_TAKES_DTYPE:
        return spaces.Discrete(n, dtype=dtype.type)
    space = spaces.Discrete(n)
    space.dtype = dtype  # what batches of it, and Muster's rows, go by
    return space


def _limits(dtype: np.dtype[Any]) -> tuple[float | int | bool, float | int | bool]:
    if dtype.kind == "f":
        return -np.inf, np.inf
    if dtype.kind == "b":
        return False, True
    return int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
