"""Spaces as trees of leaves: what lies in the slab, where, and how values get in and out.

A `SpaceNode` mirrors a Gymnasium space. Its leaves have a fixed shape and dtype and lie in the slab as ``[N, *shape]``;
values without a fixed layout (Text, OneOf, Graph, Sequence, custom spaces) are objects and travel through the mail.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from gymnasium import spaces

from muster._core import ActionNode, BatchNode, Branch, ObsNode
from muster.errors import ActionError, SpecMismatch

Array = npt.NDArray[Any]
Space = spaces.Space[Any]
Casting = Literal["unsafe", "same_kind"]

# Kinds of dtypes in order: a cast may go to the right, never to the left, so that no kind of value is lost.
_KINDS = "biufc"
# Actions of discrete spaces up to this size are passed to envs as NumPy scalars that are made once.
_CACHED_SCALARS = 4096
# NumPy 1 wraps ints that a dtype does not hold; NumPy 2 raises OverflowError.
_WRAPS = int(np.__version__.partition(".")[0]) < 2


class SpaceNode:
    """One space of the tree.

    path: the node's name in messages, e.g. ``observation['camera'][0]``.
    leaves: the leaves at and below the node, in the order in which the slab numbers them.
    has_objects: whether a value at or below the node travels through the mail.
    """

    leaves: tuple[Leaf, ...] = ()
    has_objects = False

    def __init__(self, space: Space, path: str) -> None:
        self.space = space
        self.path = path

    def obs_node(self, rows: Rows, final: Rows) -> ObsNode:
        """The node for the core's writer, see _core/space_tree.hpp."""
        raise NotImplementedError

    def action_node(self, rows: Rows) -> ActionNode:
        """The node for the core's reader."""
        raise NotImplementedError

    def batch_node(self, rows: Rows, *, checked: bool = False) -> BatchNode | None:
        """The node for the core's batches of all envs, see _core/batches.hpp; None where Python makes them.

        checked: whether the core refuses values outside the space's bounds.
        """
        raise NotImplementedError

    def batch(self, rows: Rows, take: Take, objects: Sequence[Iterator[Any]]) -> Any:
        """The values of several envs, batched as Gymnasium batches them."""
        raise NotImplementedError

    def single(self, rows: Rows, env: int, objects: Iterator[Any], *, ints: Iterator[bool]) -> Any:
        """One env's value, in memory of its own. ints: for each Discrete space whether its value is an int."""
        raise NotImplementedError

    def write_batch(self, value: Any, rows: Rows, ids: Array | slice, count: int, objects: list[list[Any]]) -> None:
        """Checks a batch of actions and writes it. Raises ActionError before anything of this node is written."""
        raise NotImplementedError

    def mismatch(self, value: Any) -> None:
        """Raises SpecMismatch for a value that is not of this node's structure."""
        raise NotImplementedError


class Rows:
    """The leaves' arrays in one slab: ``arrays[leaf.index]`` is ``[N, *shape]`` at ``offsets[leaf.index]``.

    lent: whether the leaf's rows may lie in another block than the first, see transport/slab.py.
    """

    def __init__(self, arrays: list[Array], offsets: list[int], lent: Sequence[bool] | None = None) -> None:
        self.arrays = arrays
        self.offsets = offsets
        self.lent = [False] * len(offsets) if lent is None else lent


Take = Callable[[Array], Array]


class Leaf(SpaceNode):
    """A space of values with a fixed shape and dtype."""

    def __init__(self, space: Space, path: str, shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
        super().__init__(space, path)
        self.shape = shape
        self.dtype = np.dtype(dtype).newbyteorder("=")  # the core copies values without swapping their bytes
        self.index = -1  # set by `tree`
        self.casting: Casting | None = None  # set by `tree`
        self.row_bytes = int(np.prod(shape, dtype=np.int64)) * self.dtype.itemsize
        self.leaves = (self,)

    def obs_node(self, rows: Rows, final: Rows) -> ObsNode:
        return ObsNode.leaf(
            is_integer=isinstance(self, IntegerLeaf),
            store=self.store,
            rows=rows.arrays[self.index],
            offset=rows.offsets[self.index],
            final_offset=final.offsets[self.index],
            lent=rows.lent[self.index],
        )

    def action_node(self, rows: Rows) -> ActionNode:
        first, scalars = self._scalars()
        array, offset = rows.arrays[self.index], rows.offsets[self.index]
        return ActionNode.leaf(rows=array, offset=offset, first=first, scalars=scalars)

    def _scalars(self) -> tuple[int, tuple[Any, ...]]:
        return 0, ()

    def batch_node(self, rows: Rows, *, checked: bool = False) -> BatchNode | None:
        bounds = self.bounds() if checked else None
        if bounds is not None and self.dtype != np.int64:
            return None  # the core compares int64 only
        low, high = ([], []) if bounds is None else (np.ravel(bound).tolist() for bound in bounds)
        array, offset, lent = rows.arrays[self.index], rows.offsets[self.index], rows.lent[self.index]
        return BatchNode.leaf(rows=array, offset=offset, lent=lent, low=low, high=high)

    def batch(self, rows: Rows, take: Take, objects: Sequence[Iterator[Any]]) -> Any:
        return take(rows.arrays[self.index])

    def single(self, rows: Rows, env: int, objects: Iterator[Any], *, ints: Iterator[bool]) -> Any:
        return np.array(rows.arrays[self.index][env])

    def store(self, value: Any, row: Array) -> None:
        """Writes a value that the core cannot copy unchanged: casts it, or raises SpecMismatch with the reason."""
        array = self._as_array(value) if self.casting is None else self._cast(value, self.casting)
        if array is None:
            raise SpecMismatch(f"{self.path} is {_brief(value)}, expected {self._expected()}")
        if array.shape != self.shape:
            raise SpecMismatch(f"{self.path} has shape {array.shape}, expected {self._expected()}")
        if not keeps_kind(array, self.dtype):
            raise SpecMismatch(f"{self.path} has dtype {array.dtype}, expected {self._expected()}; a cast would lose")
        row[...] = array

    def write_batch(self, value: Any, rows: Rows, ids: Array | slice, count: int, objects: list[list[Any]]) -> None:
        array = self._as_array(value)
        if array is None:
            raise ActionError(f"{self.path}: expected an array of shape {(count, *self.shape)}, got {_brief(value)}")
        if array.shape[:1] != (count,):
            got = f"{len(array)} row{'s' * (len(array) != 1)}" if array.ndim else "a single number"
            raise ActionError(f"{self.path}: expected {count} actions, one for each env, got {got}")
        if array.shape[1:] != self.shape:
            raise ActionError(f"{self.path}: expected shape {(count, *self.shape)}, got {array.shape}")
        if self.casting and (array.dtype != self.dtype or _is_of_own_kind(value)):
            raise ActionError(f"{self.path}: expected an array of {self.dtype}, got {_brief(value)}")
        if not keeps_kind(array, self.dtype):
            raise ActionError(
                f"{self.path}: expected dtype {self.dtype}, got {array.dtype}; cast the actions if that is meant"
            )
        self._check_range(array)
        rows.arrays[self.index][ids] = array

    def mismatch(self, value: Any) -> None:
        raise SpecMismatch(f"{self.path} is {_brief(value)}, expected {self._expected()}")

    def bounds(self) -> tuple[Array, Array] | None:
        """The lowest and highest allowed value of each element of a discrete space, else None."""
        if self.casting:
            return None
        if isinstance(self.space, spaces.Discrete):
            return np.asarray(self.space.start), np.asarray(self.space.start + self.space.n - 1)
        if isinstance(self.space, spaces.MultiDiscrete):
            return self.space.start, self.space.start + self.space.nvec - 1
        if isinstance(self.space, spaces.MultiBinary):
            return np.zeros(self.shape, self.dtype), np.ones(self.shape, self.dtype)
        return None

    def _check_range(self, array: Array) -> None:
        bounds = self.bounds()
        if bounds is None:
            return
        wrong = (array < bounds[0]) | (array > bounds[1])
        if wrong.any():
            first = tuple(int(i) for i in np.argwhere(wrong)[0])
            low, high = (np.broadcast_to(bound, self.shape)[first[1:]] for bound in bounds)
            raise ActionError(
                f"{self.path}: the action for env {first[0]} is {array[first]}, expected {low} to {high} ({self.space})"
            )

    def _as_array(self, value: Any) -> Array | None:
        try:
            array = np.asarray(value)
        except (ValueError, TypeError, RuntimeError):
            return None
        return array if array.dtype.kind in _KINDS else None

    def _cast(self, value: Any, casting: Casting) -> Array:
        """An array of the leaf's dtype. Arrays are cast by the rule `casting`; the rest raises what NumPy 2 raises."""
        try:
            if isinstance(value, np.generic) and casting == "unsafe":
                value = value.item()
            if not hasattr(value, "dtype"):
                if _WRAPS and self.dtype.kind in "iu":
                    for number in map(int, np.asarray(value, object).flat):
                        number.to_bytes(self.dtype.itemsize, signed=self.dtype.kind == "i")  # raises OverflowError
                value = np.asarray(value, self.dtype)
            return _squeezed(np.asarray(value).astype(self.dtype, casting=casting, copy=False), self.shape)
        except Exception as error:
            error.add_note(f"{self.path} is {_brief(value)}, expected {self._expected()}")
            raise

    def _expected(self) -> str:
        return f"shape {self.shape} of {self.dtype}"


class IntegerLeaf(Leaf):
    """A Discrete space: one number."""

    def _scalars(self) -> tuple[int, tuple[Any, ...]]:
        space = self.space
        assert isinstance(space, spaces.Discrete)
        if self.dtype != np.int64 or space.n > _CACHED_SCALARS:
            return 0, ()
        return int(space.start), tuple(np.arange(space.start, space.start + space.n, dtype=np.int64))

    def single(self, rows: Rows, env: int, objects: Iterator[Any], *, ints: Iterator[bool]) -> Any:
        number = rows.arrays[self.index][env]
        return number.item() if next(ints) else number


class ObjectLeaf(SpaceNode):
    """A space of values without a fixed layout: they travel through the mail, and a batch is a tuple of them."""

    has_objects = True

    def obs_node(self, rows: Rows, final: Rows) -> ObsNode:
        return ObsNode()

    def action_node(self, rows: Rows) -> ActionNode:
        return ActionNode()

    def batch_node(self, rows: Rows, *, checked: bool = False) -> BatchNode | None:
        return None

    def batch(self, rows: Rows, take: Take, objects: Sequence[Iterator[Any]]) -> Any:
        return tuple(next(one) for one in objects)

    def single(self, rows: Rows, env: int, objects: Iterator[Any], *, ints: Iterator[bool]) -> Any:
        return next(objects)

    def write_batch(self, value: Any, rows: Rows, ids: Array | slice, count: int, objects: list[list[Any]]) -> None:
        if not isinstance(value, (tuple, list, np.ndarray)) or len(value) != count:
            raise ActionError(f"{self.path}: expected a tuple of {count} values of {self.space}, got {_brief(value)}")
        for own, item in zip(objects, value, strict=True):
            own.append(item)


class BranchNode(SpaceNode):
    """A Dict or Tuple space."""

    def __init__(self, space: Space, path: str, keys: tuple[Any, ...], children: tuple[SpaceNode, ...]) -> None:
        super().__init__(space, path)
        self.keys = keys
        self.children = children
        self.kind = "dict" if isinstance(space, spaces.Dict) else "tuple"
        self._branch = Branch.DICT if self.kind == "dict" else Branch.TUPLE
        self.leaves = tuple(leaf for child in children for leaf in child.leaves)
        self.has_objects = any(child.has_objects for child in children)

    def obs_node(self, rows: Rows, final: Rows) -> ObsNode:
        children = [child.obs_node(rows, final) for child in self.children]
        return ObsNode.branch(kind=self._branch, keys=self.keys, children=children, mismatch=self.mismatch)

    def action_node(self, rows: Rows) -> ActionNode:
        children = [child.action_node(rows) for child in self.children]
        return ActionNode.branch(kind=self._branch, keys=self.keys, children=children)

    def batch_node(self, rows: Rows, *, checked: bool = False) -> BatchNode | None:
        found = (child.batch_node(rows, checked=checked) for child in self.children)
        children = [node for node in found if node is not None]
        if len(children) < len(self.children):
            return None
        return BatchNode.branch(kind=self._branch, keys=self.keys, children=children)

    def batch(self, rows: Rows, take: Take, objects: Sequence[Iterator[Any]]) -> Any:
        return self._gather(child.batch(rows, take, objects) for child in self.children)

    def single(self, rows: Rows, env: int, objects: Iterator[Any], *, ints: Iterator[bool]) -> Any:
        return self._gather(child.single(rows, env, objects, ints=ints) for child in self.children)

    def write_batch(self, value: Any, rows: Rows, ids: Array | slice, count: int, objects: list[list[Any]]) -> None:
        for child, item in zip(self.children, self.parts(value, ActionError), strict=True):
            child.write_batch(item, rows, ids, count, objects)

    def mismatch(self, value: Any) -> None:
        self.parts(value, SpecMismatch)
        raise SpecMismatch(f"{self.path} is a {type(value).__name__}, expected a plain {self.kind}")

    def parts(self, value: Any, error: type[ActionError | SpecMismatch]) -> list[Any]:
        """The children's values in `value`, in the children's order. Raises `error` where they do not fit."""
        if self.kind == "dict":
            if not isinstance(value, Mapping):
                raise error(f"{self.path}: expected a dict with keys {list(self.keys)}, got {_brief(value)}")
            if set(value) != set(self.keys):
                raise error(f"{self.path}: expected keys {list(self.keys)}, got {list(value)}")
            return [value[key] for key in self.keys]
        if not isinstance(value, (tuple, list)) or len(value) != len(self.children):
            raise error(f"{self.path}: expected a tuple of length {len(self.children)}, got {_brief(value)}")
        return list(value)

    def _gather(self, values: Iterator[Any]) -> Any:
        return dict(zip(self.keys, values, strict=True)) if self.kind == "dict" else tuple(values)


def tree(space: Space, path: str, *, casting: Casting | None = None) -> SpaceNode:
    """The tree of `space`, its leaves numbered from 0.

    casting: NumPy's rule for casting observations that are arrays to the space's dtype; others are cast where it holds
    them, and axes of length 1 may be missing or surplus. Actions may be out of range, but are of the space's dtype:
    other libraries' vector envs pass all others to envs in the caller's own type. None casts nothing.
    """
    root = _node(space, path)
    for index, leaf in enumerate(root.leaves):
        leaf.index = index
        leaf.casting = casting
    return root


def _squeezed(array: Array, shape: tuple[int, ...]) -> Array:
    """`array` reshaped to `shape` if the two differ only in axes of length 1; else `array` unchanged."""
    if [n for n in array.shape if n != 1] == [n for n in shape if n != 1]:
        return array.reshape(shape)
    return array


def _node(space: Space, path: str) -> SpaceNode:
    if isinstance(space, spaces.Discrete):
        return IntegerLeaf(space, path, (), space.dtype)
    if isinstance(space, (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)):
        return Leaf(space, path, tuple(space.shape), space.dtype)
    if isinstance(space, spaces.Dict):
        keys = tuple(space.spaces)
        return BranchNode(space, path, keys, tuple(_node(space[key], f"{path}[{key!r}]") for key in keys))
    if isinstance(space, spaces.Tuple):
        children = tuple(_node(child, f"{path}[{i}]") for i, child in enumerate(space.spaces))
        return BranchNode(space, path, (), children)
    return ObjectLeaf(space, path)


def _is_of_own_kind(value: Any) -> bool:
    return isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and type(value) is not np.ndarray)


def keeps_kind(array: Array, dtype: np.dtype[Any]) -> bool:
    """Returns whether `array` may be cast to `dtype`: bool to int to float to complex, and ints only where they fit."""
    if array.dtype == dtype:
        return True
    source, target = _KINDS.find(array.dtype.kind), _KINDS.find(dtype.kind)
    if source < 0 or target < 0:
        return False
    if array.dtype.kind in "iu" and dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return array.size == 0 or (int(array.min()) >= limits.min and int(array.max()) <= limits.max)
    return source <= target


def _brief(value: Any) -> str:
    """The type and the repr of `value`, and NumPy's error: that of a tensor on a GPU or in a graph says what to do."""
    text = repr(value)
    text = f"{type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
    try:
        np.asarray(value)
    except Exception as error:
        return f"{text} ({error})"
    return text
