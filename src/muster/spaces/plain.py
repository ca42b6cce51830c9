"""Spaces as plain data, for JSON, and back: nothing is imported or unpickled to read them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from gymnasium import spaces

from muster.errors import UsageError
from muster.spaces.tree import Space


def to_plain(space: Space) -> dict[str, Any]:
    """A Box, Discrete, MultiDiscrete or MultiBinary, or a Dict or Tuple of them, as strings, numbers, lists and dicts.

    Raises UsageError for others.
    """
    if isinstance(space, spaces.Box):
        bounds = {"low": _numbers(space.low), "high": _numbers(space.high)}
        return {"kind": "Box", "shape": list(space.shape), "dtype": np.dtype(space.dtype).name, **bounds}
    if isinstance(space, spaces.Discrete):
        return {"kind": "Discrete", "n": int(space.n), "start": int(space.start), "dtype": np.dtype(space.dtype).name}
    if isinstance(space, spaces.MultiDiscrete):
        choices = {"nvec": space.nvec.tolist(), "start": space.start.tolist()}
        return {"kind": "MultiDiscrete", **choices, "dtype": np.dtype(space.dtype).name}
    if isinstance(space, spaces.MultiBinary):
        return {"kind": "MultiBinary", "n": np.array(space.n).tolist()}
    if isinstance(space, spaces.Dict):
        return {"kind": "Dict", "spaces": {name: to_plain(part) for name, part in space.spaces.items()}}
    if isinstance(space, spaces.Tuple):
        return {"kind": "Tuple", "spaces": {str(i): to_plain(part) for i, part in enumerate(space.spaces)}}
    raise UsageError(f"a {type(space).__name__} cannot be kept as plain data; Box, Discrete, MultiDiscrete, "
                     "MultiBinary, and Dict and Tuple of them can")  # fmt: skip


def from_plain(plain: Mapping[str, Any]) -> Space:
    """The space that `to_plain` has described. Raises UsageError for anything else."""
    try:
        match plain["kind"]:
            case "Box":
                dtype, shape = np.dtype(plain["dtype"]), tuple(plain["shape"])
                low, high = (_bound(plain[name], dtype, shape) for name in ("low", "high"))
                return spaces.Box(low, high, shape, dtype.type)
            case "Discrete":
                return spaces.Discrete(plain["n"], start=plain["start"], **_dtype_in(plain))
            case "MultiDiscrete":
                nvec, start = np.array(plain["nvec"]), np.array(plain["start"])
                return spaces.MultiDiscrete(nvec, start=start, **_dtype_in(plain))
            case "MultiBinary":
                return spaces.MultiBinary(plain["n"])
            case "Dict":
                return spaces.Dict({name: from_plain(part) for name, part in plain["spaces"].items()})
            case "Tuple":
                return spaces.Tuple([from_plain(part) for part in plain["spaces"].values()])
        reason = "its kind is unknown"
    except Exception as error:  # Gymnasium's checks raise all sorts, assertions too
        reason = f"{type(error).__name__}: {error}"
    raise UsageError(f"{plain!r} describes no space: {reason}")


def _numbers(bound: np.ndarray[Any, Any]) -> Any:
    """The bound as one number where all are equal, else a flat list. JSON has no infinity: a string is one."""
    numbers = [x if math.isfinite(x) else str(x) for x in bound.ravel().tolist()]
    return numbers[0] if len(set(numbers)) == 1 else numbers


def _bound(numbers: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    bound = np.array(numbers, dtype)
    return np.broadcast_to(bound.reshape(shape if bound.ndim else ()), shape)


def _dtype_in(plain: Mapping[str, Any]) -> dict[str, Any]:
    """The dtype of choices, as an argument; not int64, as Gymnasium 1.1 has no other for Discrete spaces."""
    return {} if plain["dtype"] == "int64" else {"dtype": np.dtype(plain["dtype"]).type}
