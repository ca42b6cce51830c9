"""The leaves of tensordicts: as flat dicts by path, and back, and written into columns with a check of each.

What a loop writes at each step takes no tensordict.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase  # type: ignore[import-untyped]  # it ships no py.typed
from torch import Size, Tensor

from muster.errors import SpecMismatch
from muster.interop.torchrl.columns import has_stacks

Path = tuple[str, ...]
Key = str | Path
Keys = tuple[Key, ...]
Leaves = dict[Path, Any]  # tensors, as a rule


def leaves_of(tree: TensorDictBase, path: Path = ()) -> Leaves:
    """The leaves of `tree` by path; `path`: its own. Objects are leaves, too."""
    found: Leaves = {}
    for name, value in tree.items():
        if isinstance(value, TensorDictBase):
            found |= leaves_of(value, (*path, name))
        else:
            found[(*path, name)] = value
    return found


class Nesting:
    """The nesting of `tree`, whose tensordicts have batch sizes of their own. device: theirs.

    Tensordicts that come later are like those of the same name without ``next``, else like those around them.
    """

    def __init__(self, tree: TensorDictBase, device: torch.device | None) -> None:
        self.device = device
        self._sizes: dict[Path, Size] = {(): tree.batch_size}  # those that hold others before these
        self._visit(tree, ())
        self._kept = frozenset(self._sizes)

    def _visit(self, tree: TensorDictBase, path: Path) -> None:
        for name, value in tree.items():
            if isinstance(value, TensorDictBase):
                self._sizes[(*path, name)] = value.batch_size
                self._visit(value, (*path, name))

    def stretched(self, dim: int, length: int) -> Nesting:
        """The same nesting with one dimension more."""
        copy = object.__new__(Nesting)
        copy.device, copy._kept = self.device, frozenset({()})
        copy._sizes = {path: Size((*size[:dim], length, *size[dim:])) for path, size in self._sizes.items()}
        return copy

    def tensordict(self, leaves: Leaves, place: torch.device | None) -> TensorDict:
        """The tensordict of `leaves`. place: its device."""
        held: dict[Path, dict[str, object]] = {path: {} for path in self._sizes}
        for path, leaf in leaves.items():
            if path[:-1] not in held:
                self._add(path[:-1])
                return self.tensordict(leaves, place)
            held[path[:-1]][path[-1]] = leaf
        for path in reversed(self._sizes):
            if path and (held[path] or path in self._kept):
                held[path[:-1]][path[-1]] = TensorDict(held[path], batch_size=self._sizes[path], device=place)
        return TensorDict(held[()], batch_size=self._sizes[()], device=place)

    def _add(self, path: Path) -> None:
        if path[:-1] not in self._sizes:
            self._add(path[:-1])
        alike = path[1:] if path[0] == "next" else path
        self._sizes[path] = self._sizes.get(alike, self._sizes[path[:-1]])


class Writer:
    """Writes the leaves of tensordicts into columns.

    required: leaves that each tensordict must have.  what: the tensordict's place, for messages.
    """

    def __init__(self, columns: TensorDictBase, what: str, required: Sequence[Key] = ()) -> None:
        self._what = what
        self._columns = columns
        self._has_stacks = has_stacks(columns)
        needed = {path_of(key) for key in required}
        # The leaves by the tensordict that holds them: an entry of a plain tensordict takes less time than a path.
        self._groups: dict[Path, list[tuple[str, Tensor, bool]]] = {}
        for key, leaf in () if self._has_stacks else columns.items(True, True):
            path = path_of(key)
            self._groups.setdefault(path[:-1], []).append((path[-1], leaf, path in needed))

    def __call__(self, values: TensorDictBase) -> None:
        """Checks all leaves, then writes them. Raises SpecMismatch for a leaf that is missing or laid out otherwise."""
        if self._has_stacks:
            self._columns.update_(values.select(*self._columns.keys(True), strict=False))
            return
        found = []
        for path, leaves in self._groups.items():
            entries = _entries(values, path)
            for name, column, required in leaves:
                value = entries.get(name)
                if value is None:
                    if required:
                        raise missing_in(values, self._what, (*path, name), brief(column))
                    continue
                if not _fits(value, column):
                    raise self._first_lie(path, entries, leaves)
                found.append((column, value))
        _write(found)

    def _first_lie(self, path: Path, entries: dict[str, Any], leaves: list[tuple[str, Tensor, bool]]) -> SpecMismatch:
        """The error for the first leaf that the env has set, which others may have been made of."""
        columns = {name: column for name, column, _ in leaves}
        name = next(name for name in entries if name in columns and not _fits(entries[name], columns[name]))
        return laid_out_otherwise(self._what, (*path, name), entries[name], brief(columns[name]))

    def misfit(self, values: TensorDictBase, made: Collection[Path]) -> SpecMismatch | None:
        """The error for the first leaf that nothing can make fit: one that is missing, or of another size.

        made: those that are made where they are missing.
        """
        for path, leaves in self._groups.items():
            entries = _entries(values, path)
            for name, column, required in leaves:
                value, whole = entries.get(name), (*path, name)
                if value is None and required and whole not in made:
                    return missing_in(values, self._what, whole, brief(column))
                if isinstance(value, Tensor) and value.numel() != column.numel():
                    return laid_out_otherwise(self._what, whole, value, brief(column))
        return None

    def write_if_whole(self, values: TensorDictBase) -> bool:
        """Writes all leaves if each is there and laid out as its column; returns whether it has."""
        found = []
        for path, leaves in self._groups.items():
            entries = _entries(values, path)
            for name, column, _ in leaves:
                value = entries.get(name)
                if value is None or not _fits(value, column):
                    return False
                found.append((column, value))
        _write(found)
        return True


def missing_in(values: TensorDictBase, what: str, path: Path, expected: str) -> SpecMismatch:
    """The error for a leaf that `values` lack."""
    return SpecMismatch(
        f"{what} tensordict has no {name_of(path)}, expected {expected}; it has "
        f"{sorted(map(str, values.keys(True, True)))}. Make the env's specs and its results agree"
    )


def laid_out_otherwise(what: str, path: Path, value: Any, expected: str) -> SpecMismatch:
    """The error for a leaf of another shape or dtype."""
    return SpecMismatch(
        f"{what} {name_of(path)} is {brief(value)}, expected {expected}, as its spec says; check_env_specs(env) of "
        "torchrl.envs.utils shows all that differs"
    )


def path_of(key: Key) -> Path:
    """A key as a tuple of names."""
    return (key,) if isinstance(key, str) else tuple(key)


def name_of(path: Path) -> str:
    """A path as users write the key."""
    return repr(path[0] if len(path) == 1 else path)


def brief(value: Any) -> str:
    """Shape and dtype of a tensor; the class of anything else."""
    return f"{list(value.shape)} {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _fits(value: Tensor, column: Tensor) -> bool:
    return value.shape == column.shape and value.dtype == column.dtype


def _entries(values: TensorDictBase, path: Path) -> dict[str, Any]:
    holder = values.get(path, None) if path else values
    return {} if holder is None else dict(holder.items())


def _write(found: Iterable[tuple[Tensor, Tensor]]) -> None:
    for column, value in found:
        if column is not value:
            column.copy_(value)
