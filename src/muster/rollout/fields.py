"""The arrays that a rollout holds: the leaves of spaces, each under its TensorDict key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from operator import getitem
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from muster.errors import ConfigError

Array = npt.NDArray[Any]
Key = tuple[str, ...]

# Root keys that the batch uses itself: observations cannot have them.
_TAKEN = ("action", "next", "collector", "reward", "done", "terminated", "truncated", "is_init")
# The dtypes that torch can hold.
_DTYPES = ("?", "b", "B", "h", "H", "i", "I", "l", "L", "q", "Q", "e", "f", "d", "F", "D")


class Field(NamedTuple):
    """One array of a rollout: its key, and shape and dtype of one env's value."""

    key: Key
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def floating_dtype(name: str, dtype: Any) -> np.dtype[Any]:
    """The NumPy dtype of a torch dtype of floating-point numbers. Raises ConfigError for others; `name`: the option."""
    numpy_name = str(dtype).removeprefix("torch.")
    if numpy_name not in ("float16", "float32", "float64"):
        raise ConfigError(f"{name} must be torch.float16, torch.float32 or torch.float64, got {dtype!r}")
    return np.dtype(numpy_name)


class FieldTree:
    """A space's leaves, and the ways to take a batch of its values apart and to put it together.

    fields, spaces: the leaves, in the order of `split` and `join`.  A Dict's keys and a Tuple's positions become parts
    of the keys; a space that is a leaf itself has the key `name`. With ``at_root`` a Dict's keys stand without `name`
    before them. Raises ConfigError for spaces without a fixed shape.
    """

    def __init__(self, space: spaces.Space[Any], name: Key, *, at_root: bool = False) -> None:
        prefix = () if at_root and isinstance(space, spaces.Dict) else name
        leaves = list(_leaves(space, prefix, ()))
        self.fields = [field for field, _, _ in leaves]
        self.spaces = [leaf for _, _, leaf in leaves]
        self._paths = [path for _, path, _ in leaves]
        self._space = space
        self._is_leaf = self._paths == [()]
        if at_root:
            for field in self.fields:
                if field.key[0] in _TAKEN:
                    raise ConfigError(
                        f"the observation has a key {field.key[0]!r}, which a batch uses itself; rename it in a wrapper"
                    )

    def split(self, value: Any) -> list[Any]:
        """The leaves of a value, batched or single."""
        return [value] if self._is_leaf else [reduce(getitem, path, value) for path in self._paths]

    def join(self, leaves: Sequence[Any]) -> Any:
        """The value that has these leaves: dicts and tuples as the space has them."""
        return leaves[0] if self._is_leaf else _joined(self._space, iter(leaves))


def _leaves(
    space: spaces.Space[Any], key: Key, path: tuple[Any, ...]
) -> Iterator[tuple[Field, tuple[Any, ...], spaces.Space[Any]]]:
    if isinstance(space, spaces.Dict):
        for name, child in space.spaces.items():
            yield from _leaves(child, (*key, str(name)), (*path, name))
    elif isinstance(space, spaces.Tuple):
        for i, child in enumerate(space.spaces):
            yield from _leaves(child, (*key, str(i)), (*path, i))
    elif isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        dtype = np.dtype(space.dtype)
        if dtype.char not in _DTYPES:
            raise ConfigError(f"{'.'.join(key)} has dtype {dtype}, which torch does not know; convert it in a wrapper")
        yield Field(key, tuple(space.shape or ()), dtype), path, space
    else:
        raise ConfigError(
            f"{'.'.join(key)} is {space}: without a fixed shape it has no place in a tensor. Encode it in a "
            "wrapper, as Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of them"
        )


def _joined(space: spaces.Space[Any], leaves: Iterator[Any]) -> Any:
    if isinstance(space, spaces.Dict):
        return {name: _joined(child, leaves) for name, child in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_joined(child, leaves) for child in space.spaces)
    return next(leaves)


def describe(key: Key) -> str:
    """A key as messages write it: ``"observation"``, or ``("next", "reward")``."""
    return repr(key[0]) if len(key) == 1 else repr(key)


def flat(tree: dict[Any, Any], prefix: Key = ()) -> dict[Key, Any]:
    """The values of nested dicts in one dict, by key."""
    found: dict[Key, Any] = {}
    for name, value in tree.items():
        key = (*prefix, *name) if isinstance(name, tuple) else (*prefix, name)
        if isinstance(value, dict):
            found |= flat(value, key)
        else:
            found[key] = value
    return found
