"""The big parts of what workers are built from, written once into a file in memory, instead of a copy for each.

Arrays are used where they lie. Pickles that are big themselves, by bytes and dicts in them, are only read from there.
A worker maps the file privately: all workers read the same memory, and a page that a worker writes to becomes its own.
"""

from __future__ import annotations

import mmap
import os
import pickle
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from muster._core import give_back, map_fd

Place = tuple[int, int, bool]
"""Offset in the file, size in bytes, and whether the buffer is read-only."""


class BigArrays:
    """The caller's end: stores the buffers of all workers in a file, and maps them.

    buffers: for each worker the buffers that it gets; a buffer that several workers get is stored once. Those over
        bytes are pickles.
    places: for each worker the places of its buffers.
    """

    def __init__(self, fd: int, buffers: Sequence[Sequence[pickle.PickleBuffer]]) -> None:
        known: dict[tuple[int, int, bool], Place] = {}
        end, sources = 0, list[tuple[int, memoryview]]()
        for raw in (buffer.raw() for own in buffers for buffer in own):
            if (key := memory_of(raw)) not in known:
                known[key] = (end, raw.nbytes, raw.readonly)
                sources.append((end, raw))
                end = -(-(end + raw.nbytes) // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        self.places = [tuple(known[memory_of(buffer.raw())] for buffer in own) for own in buffers]
        self._pickles = [(offset, raw.nbytes) for offset, raw in sources if isinstance(raw.obj, bytes)]
        # Kept mapped, so that what workers map does not count as memory that each of them holds alone.
        self._memory: npt.NDArray[np.uint8] | None = None
        if sources:
            os.ftruncate(fd, end)
            self._memory = map_fd(fd=fd, size=end)
            for offset, raw in sources:
                self._memory[offset:][: raw.nbytes] = np.frombuffer(raw, np.uint8)

    def drop_pickles(self) -> None:
        """Gives back the memory of pickles, which all workers have read: none will be started in another's place."""
        if self._memory is not None:
            for offset, size in self._pickles:
                give_back(self._memory[offset:][:size])
        self._pickles = []

    def close(self) -> None:
        """Unmaps all; workers keep what they have mapped."""
        self._memory = None


def map_big_arrays(fd: int, places: Sequence[Place]) -> list[memoryview]:
    """Maps a worker's buffers; returns them in the order of their places.

    Two at one place are memory of their own each: what an env writes into its array is none of a policy's.
    """
    if not places:
        return []
    start = min(offset for offset, _, _ in places)
    end = max(offset + size for offset, size, _ in places)
    memory = map_fd(fd=fd, size=end - start, offset=start, is_private=True).data
    views, seen = [], set[Place]()
    for place in places:
        offset, size, readonly = place
        view = memory[offset - start : offset - start + size]
        if place in seen:
            view = map_fd(fd=fd, size=size, offset=offset, is_private=True).data
        views.append(view.toreadonly() if readonly else view)
        seen.add(place)
    return views


def memory_of(raw: memoryview) -> tuple[int, int, bool]:
    """Address, size and whether it is read-only: equal for the buffers of one array, which may be different objects."""
    return np.frombuffer(raw, np.uint8).ctypes.data, raw.nbytes, raw.readonly


def memfd(name: str) -> int:
    """A file in memory that vanishes with the last process that has it open."""
    return os.memfd_create(f"muster-{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
