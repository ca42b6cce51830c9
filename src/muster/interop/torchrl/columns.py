"""Columns: the leaves of the envs' tensordicts in one block of memory that the caller and the workers share.

The trees stay as TorchRL made them: nested tensordicts have batch sizes of their own, and groups of unlike agents are
lazy stacks. So leaves are exchanged in place, and counted in the order in which a tree visits them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase  # type: ignore[import-untyped]  # it ships no py.typed
from torch import Tensor

from muster._core import CACHE_LINE, map_fd
from muster.transport.big_arrays import memfd


@dataclass(frozen=True)
class EnvRows:
    """The leaves of one env, for the worker that steps it.

    tree: the env's tensordict; its leaves have the shapes and dtypes, and hold nothing.
    offsets: of each leaf in the block, in the order in which the tree visits them.  path: the block, as a file.
    """

    tree: TensorDictBase
    offsets: tuple[int, ...]
    path: str
    block_bytes: int

    def mapped(self) -> TensorDictBase:
        """The env's tensordict, its leaves in the shared block."""
        with open(self.path, "r+b", buffering=0) as file:
            block = torch.from_numpy(map_fd(fd=file.fileno(), size=self.block_bytes))
        offsets = iter(self.offsets)
        return exchanged(self.tree, lambda leaf: _view(block, next(offsets), leaf))


class Columns:
    """The block of one pool, and `tree`: a copy of the tensordict of all envs, its leaves in the block."""

    def __init__(self, whole: TensorDictBase) -> None:
        sizes: list[int] = []
        visit(whole, lambda leaf: sizes.append(-(-leaf.numel() * leaf.element_size() // CACHE_LINE) * CACHE_LINE))
        self._bytes = max(sum(sizes), CACHE_LINE)
        self._fd = memfd("columns")
        os.ftruncate(self._fd, self._bytes)
        self._block = torch.from_numpy(map_fd(fd=self._fd, size=self._bytes))
        offsets = accumulate(sizes, initial=0)
        self.tree = exchanged(whole, lambda leaf: _view(self._block, next(offsets), leaf).copy_(leaf))

    def rows(self, of_env: TensorDictBase) -> EnvRows:
        """The rows of one env. of_env: its part of `tree`."""
        offsets: list[int] = []
        first = self._block.data_ptr()
        visit(of_env, lambda leaf: offsets.append(leaf.data_ptr() - first if leaf.numel() else 0))
        tree = exchanged(of_env, lambda leaf: torch.zeros((), dtype=leaf.dtype).expand(leaf.shape))
        return EnvRows(tree, tuple(offsets), f"/proc/{os.getpid()}/fd/{self._fd}", self._bytes)

    def close(self) -> None:
        """Closes the file; who has mapped the block keeps it."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


def exchanged(tree: TensorDictBase, change: Callable[[Tensor], Tensor]) -> TensorDictBase:
    """A copy of `tree` with every leaf changed."""
    return tree.apply(change, filter_empty=False).unlock_()


def visit(tree: TensorDictBase, act: Callable[[Tensor], Any]) -> None:
    """Calls `act` with every leaf of `tree`."""

    def acting(leaf: Tensor) -> None:
        act(leaf)

    tree.apply(acting, filter_empty=True)


def has_stacks(tree: TensorDictBase) -> bool:
    """True if `tree` is, or holds, a lazy stack with members of the same keys."""
    held = (value for value in tree.values(True) if isinstance(value, TensorDictBase))
    return isinstance(tree, LazyStackedTensorDict) or any(isinstance(one, LazyStackedTensorDict) for one in held)


def _view(block: Tensor, offset: int, leaf: Tensor) -> Tensor:
    size = leaf.numel() * leaf.element_size()
    return block[offset : offset + size].view(leaf.dtype).view(leaf.shape)
