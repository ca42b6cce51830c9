"""Tensordicts as flat dicts of their leaves, by path, and back: what a loop writes at each step takes no tensordict."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase  # type: ignore[import-untyped]  # it ships no py.typed
from torch import Size

Path = tuple[str, ...]
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
