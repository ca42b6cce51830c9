"""A learner's weights in shared memory."""

from __future__ import annotations

import fcntl
import functools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from muster._core import CACHE_LINE, map_fd
from muster.rollout.weights import Copies, copy_all, require_fitting

Result = TypeVar("Result")
WeightShapes = dict[str, tuple[tuple[int, ...], str]]


def shapes_of(weights: Mapping[str, Tensor]) -> WeightShapes:
    """Shape and dtype by name: equal for weights that can replace one another."""
    return {name: (tuple(tensor.shape), str(tensor.dtype)) for name, tensor in weights.items()}


class SharedWeights:
    """One learner's weights in shared memory, for replicas in other processes; a version counts the updates.

    Weights, version, and the place of their extras change in one copy: an update that a signal's handler ends changes
    all of them, or nothing.
    A lock of the kernel keeps readers and writers apart, and ends with the process that holds it: no reader sees half
    an update, and a process that dies leaves nobody locked out. Threads of one process share that lock; a second lock
    keeps them apart.

    like: the tensors, by name; the same names, shapes and dtypes at both ends.  fd: the file in memory that both map.
    """

    def __init__(self, like: Mapping[str, Tensor], fd: int) -> None:
        like = dict(sorted(like.items()))  # modules that register the same weights in another order fit, too
        places: dict[str, int] = {}
        size = CACHE_LINE  # of the version, and of place and length of the extras
        for name, tensor in like.items():
            places[name] = size
            size += (tensor.numel() * tensor.element_size() + CACHE_LINE - 1) // CACHE_LINE * CACHE_LINE
        self.fd = fd
        self._end = size
        self._threads = threading.Lock()
        if os.fstat(self.fd).st_size < size:
            os.ftruncate(self.fd, size)
        block = map_fd(fd=self.fd, size=size)
        self._head = block[:24].view(np.int64)
        self._tensors: dict[str, Tensor] = {}
        for name, tensor in like.items():
            if tensor.numel():
                flat = torch.frombuffer(block, dtype=tensor.dtype, count=tensor.numel(), offset=places[name])
                self._tensors[name] = flat.view(tensor.shape)

    @property
    def names(self) -> frozenset[str]:
        """Names of the tensors that have at least one element."""
        return frozenset(self._tensors)

    @property
    def version(self) -> int:
        """Number of calls of `write` so far, at any end."""
        return int(self._head[0])

    def write(
        self,
        weights: Mapping[str, Tensor],
        beside: bytes = b"",
        copies: Copies = (),
        make: Callable[[Copies], None] = copy_all,
    ) -> int:
        """Publishes `weights` as a whole, with their extras; returns their version.

        copies: others, to be made together with these, into tensors that `weights` may lie in.  make: makes all.
        Raises SpecMismatch where weights differ in kind.
        """
        require_fitting(weights, self._tensors)

        def act() -> int:
            version, place, length = self._head.tolist()
            # Not where the last one lies: that holds until the copy.
            free = self._end if self._end + len(beside) <= place else max(self._end, place + length)
            os.pwrite(self.fd, beside, free)
            head = torch.tensor([version + 1, free, len(beside)])
            own = [(shared, weights[name]) for name, shared in self._tensors.items()]
            make([*own, (torch.from_numpy(self._head), head), *copies])
            return self.version

        return self._locked(fcntl.LOCK_EX, act)

    def read(self) -> dict[str, Tensor]:
        """Copies of the latest version, by name."""
        return self._locked(fcntl.LOCK_SH, lambda: {name: shared.clone() for name, shared in self._tensors.items()})

    def beside(self) -> bytes:
        """The extras of the latest version."""
        return self._locked(fcntl.LOCK_SH, self._beside)

    def image(self) -> tuple[int, bytes]:
        """The latest version's number, and all that the file holds of it, for `install` on another machine."""

        def act() -> tuple[int, bytes]:
            version, place, length = self._head.tolist()
            return version, os.pread(self.fd, max(self._end, place + length), 0)

        return self._locked(fcntl.LOCK_SH, act)

    def read_into(self, weights: Mapping[str, Tensor], known: int) -> tuple[int, bytes]:
        """Copies the latest version into `weights`, unless that is the `known` one.

        Returns its number, and its extras; nothing for the `known` one.
        """

        def act() -> tuple[int, bytes]:
            copy_all([(weights[name], shared) for name, shared in self._tensors.items()])
            return self.version, self._beside()

        return (known, b"") if self.version == known else self._locked(fcntl.LOCK_SH, act)

    def _beside(self) -> bytes:
        _, place, length = self._head.tolist()
        return os.pread(self.fd, length, place)

    def _locked(self, kind: int, act: Callable[[], Result]) -> Result:
        with self._threads:
            try:
                fcntl.lockf(self.fd, kind)
                return act()
            finally:  # no context manager: a handler that raises where one begins or ends would leave the lock held
                fcntl.lockf(self.fd, fcntl.LOCK_UN)


def install(fd: int, image: bytes | memoryview) -> None:
    """Makes a file that replicas follow what another one was, see `SharedWeights.image`. One thread at a time."""
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX)
        done = 0
        while done < len(image):  # the kernel writes 2 GB at a time
            done += os.pwrite(fd, memoryview(image)[done:], done)
    finally:
        fcntl.lockf(fd, fcntl.LOCK_UN)


Publication = tuple[SharedWeights, Mapping[str, Tensor], bytes]
"""Weights, their destinations, and their extras."""


def write_all(publications: Sequence[Publication], copies: Copies = ()) -> None:
    """Publishes at several places, and makes `copies`: all of it, or nothing, as `SharedWeights.write` does at one."""
    if not publications:
        copy_all(copies)
        return
    (shared, weights, beside), *others = publications
    shared.write(weights, beside, copies, functools.partial(write_all, others))
