"""Shared memory for the batches of several processes: a block for each batch, which replicas write; never copied."""

from __future__ import annotations

import math
import mmap
import os
import weakref
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from muster._core import CACHE_LINE, is_shared, map_fd
from muster.rollout.fields import Array, Field
from muster.rollout.storage import Storage
from muster.transport.big_arrays import memfd

Block = npt.NDArray[np.uint8]
"""The memory of one batch."""

# A block starts with the flag that ends a batch early.
_HEADER = CACHE_LINE


@dataclass(frozen=True)
class BatchLayout:
    """The layout of a block of batch memory: T steps of N envs. output_fields: what the policy provides."""

    T: int
    N: int
    observation_fields: tuple[Field, ...]
    reward_fields: tuple[Field, ...]
    output_fields: tuple[Field, ...]
    compact: bool

    def storage(self, block: Block, envs: slice = slice(None)) -> Storage:
        """A storage over `envs` of a block; every process that maps it finds them at the same place."""
        place = _HEADER

        def allocate(lead: tuple[int, ...], field: Field) -> Array:
            nonlocal place
            shape = (self.N, *lead, *field.shape)
            whole: Array = np.ndarray(shape, field.dtype, block, place)
            place += _size(shape, field)
            return whole[envs]

        width = len(range(*envs.indices(self.N)))
        storage = Storage(
            self.T, width, self.observation_fields, self.reward_fields, compact=self.compact, allocate=allocate
        )
        storage.outputs = {
            field.key: torch.from_numpy(allocate((self.T,), field).swapaxes(0, 1)) for field in self.output_fields
        }
        return storage

    @property
    def block_bytes(self) -> int:
        """Size of a block: whole pages, so that each block can be mapped by itself."""
        after = () if self.compact else self.observation_fields
        rows = (*self.observation_fields, *after, *self.reward_fields, *Storage.FLAGS, *self.output_fields)
        size = sum(_size((self.N, self.T, *field.shape), field) for field in rows)
        size += sum(_size((self.N, *field.shape), field) for field in self.observation_fields)  # the last ones
        return -(-(_HEADER + size) // mmap.PAGESIZE) * mmap.PAGESIZE


class BatchMemory:
    """One file in memory, cut into blocks. A block is used again, at its size, once nothing refers to its arrays.

    `_core.own` makes a block that replicas are done with the caller's: a child that is forked then has a copy.
    """

    def __init__(self) -> None:
        self.fd = memfd("batches")
        self._free: defaultdict[int, list[int]] = defaultdict(list)  # offsets by size
        self._end = 0
        self._finalizer = weakref.finalize(self, os.close, self.fd)

    def take_block(self, size: int) -> tuple[int, Block]:
        """The offset of a block that nobody uses, and its memory."""
        free = self._free[size]
        if not free:
            free.append(self._end)
            self._end += size
            os.ftruncate(self.fd, self._end)
        offset = free.pop()
        block = map_fd(fd=self.fd, size=size, offset=offset)
        # The mapping ends with the last tensor of a batch.
        weakref.finalize(block, _free, block.base, free, offset).atexit = False
        return offset, block


def _free(mapping: object, free: list[int], offset: int) -> None:
    if not is_shared(mapping):  # with a forked child
        free.append(offset)


def stop_flag(block: Block) -> Array:
    """The flag of a block, int64 ``[1]``: not 0 once the replicas have to end this batch early."""
    return block[:8].view(np.int64)


def _size(shape: Sequence[int], field: Field) -> int:
    return -(-math.prod(shape) * field.dtype.itemsize // CACHE_LINE) * CACHE_LINE
