"""The leaves of tensordicts: as flat dicts by path, and back, and written into columns with a check of each.

What a loop writes at each step takes no tensordict.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase  # type: ignore[import-untyped]  # it ships no py.typed
from torch import Size, Tensor

from muster.errors import SpecMismatch
from muster.interop.torchrl.columns import has_stacks
from muster.rollout.fields import describe
from muster.rollout.plain_modules import as_key

Path = tuple[str, ...]
Key = str | Path
Keys = tuple[Key, ...]
Leaves = dict[Path, Any]  # tensors, as a rule


class Nesting:
    """The nesting of `tree`, with the batch sizes of its tensordicts. device: theirs.

    Tensordicts that come later are like those of the same name without ``next``, else like those around them.
    """

    def __init__(self, tree: TensorDictBase, device: torch.device | None) -> None:
        self.device = device
        held = {as_key(key): value for key, value in tree.items(True) if isinstance(value, TensorDictBase)}
        # Those that hold others come before these.
        self._sizes = {(): tree.batch_size} | {path: held[path].batch_size for path in sorted(held, key=len)}
        self._kept = frozenset(self._sizes)

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
        needed = {as_key(key) for key in required}
        # The leaves by the tensordict that holds them: an entry of a plain tensordict takes less time than a path.
        self._groups: dict[Path, list[tuple[str, Path, Tensor, bool]]] = {}
        for key, leaf in () if self._has_stacks else columns.items(True, True):
            path = as_key(key)
            self._groups.setdefault(path[:-1], []).append((path[-1], path, leaf, path in needed))

    def __call__(self, values: TensorDictBase) -> None:
        """Checks all leaves, then writes them. Raises SpecMismatch for a leaf that is missing or laid out otherwise."""
        if self._has_stacks:
            self._columns.update_(values.select(*self._columns.keys(True), strict=False))
            return
        found, odd = [], {}
        for path, column, required, value in self._pairs(values):
            if value is not None:
                found.append((column, value))
                if not _fits(value, column):
                    odd[path] = self._misfit(values, path, value, column)
            elif required:
                raise self._misfit(values, path, None, column)
        if odd:  # of the leaf that the env has set first: others may have been made of it
            raise next(odd[path] for path in map(as_key, values.keys(True)) if path in odd)
        _write(found)

    def misfit(self, values: TensorDictBase, made: Collection[Path]) -> SpecMismatch | None:
        """The error for the first leaf that nothing can make fit: one that is missing, or of another size.

        made: those that are made where they are missing.
        """
        for path, column, required, value in self._pairs(values):
            is_missing = value is None and required and path not in made
            if is_missing or (isinstance(value, Tensor) and value.numel() != column.numel()):
                return self._misfit(values, path, value, column)
        return None

    def write_if_whole(self, values: TensorDictBase) -> bool:
        """Writes all leaves if each is there and laid out as its column; returns whether it has."""
        found = []
        for _, column, _, value in self._pairs(values):
            if value is None or not _fits(value, column):
                return False
            found.append((column, value))
        _write(found)
        return True

    def _pairs(self, values: TensorDictBase) -> Iterator[tuple[Path, Tensor, bool, Any]]:
        """Each column: its path, itself, whether it is required, and the leaf of `values` for it, or None."""
        for path, leaves in self._groups.items():
            holder = values.get(path, None) if path else values
            entries = {} if holder is None else dict(holder.items())
            for name, whole, column, required in leaves:
                yield whole, column, required, entries.get(name)

    def _misfit(self, values: TensorDictBase, path: Path, value: Any, column: Tensor) -> SpecMismatch:
        """The error for a leaf that `values` lack, or that has another shape or dtype."""
        what, expected = f"{self._what} {describe(path)} is {_brief(value)}", f"expected {_brief(column)}"
        if value is None:
            its = sorted(map(str, values.keys(True, True)))
            what = f"{self._what} tensordict has no {describe(path)}"
            return SpecMismatch(f"{what}, {expected}; it has {its}. Make the env's specs and its results agree")
        ways_out = "check_env_specs(env) of torchrl.envs.utils shows all that differs"
        return SpecMismatch(f"{what}, {expected}, as its spec says; {ways_out}")


def _brief(value: Any) -> str:
    """Shape and dtype of a tensor; the class of anything else."""
    return f"{list(value.shape)} {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _fits(value: Tensor, column: Tensor) -> bool:
    return value.shape == column.shape and value.dtype == column.dtype


def _write(found: Iterable[tuple[Tensor, Tensor]]) -> None:
    for column, value in found:
        if column is not value:
            column.copy_(value)
