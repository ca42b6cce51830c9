"""A learner's weights in shared memory."""

from __future__ import annotations

import fcntl
import os
import struct
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from muster._core import CACHE_LINE, map_fd
from muster.rollout.weights import require_fitting

_LENGTH = struct.Struct("<Q")
WeightShapes = dict[str, tuple[tuple[int, ...], str]]


def shapes_of(weights: Mapping[str, Tensor]) -> WeightShapes:
    """Shape and dtype by name: equal for weights that can replace one another."""
    return {name: (tuple(tensor.shape), str(tensor.dtype)) for name, tensor in weights.items()}


class SharedWeights:
    """One learner's weights in shared memory, for replicas in other processes; a version counts the updates.

    A lock of the kernel keeps readers and writers apart, and ends with the process that holds it: no reader sees half
    an update, and a process that dies leaves nobody locked out. Threads of one process share that lock; a second lock
    keeps them apart.

    like: the tensors, by name; the same names, shapes and dtypes at both ends.  fd: the file in memory that both map.
    """

    def __init__(self, like: Mapping[str, Tensor], fd: int) -> None:
        like = dict(sorted(like.items()))  # modules that register the same weights in another order fit, too
        places: dict[str, int] = {}
        size = CACHE_LINE  # the version's
        for name, tensor in like.items():
            places[name] = size
            size += (tensor.numel() * tensor.element_size() + CACHE_LINE - 1) // CACHE_LINE * CACHE_LINE
        self.fd = fd
        self._end = size
        self._threads = threading.Lock()
        if os.fstat(self.fd).st_size < size:
            os.ftruncate(self.fd, size)
        block = map_fd(fd=self.fd, size=size)
        self._version = block[:8].view(np.int64)
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
        return int(self._version[0])

    @torch.no_grad()
    def write(self, weights: Mapping[str, Tensor], beside: bytes = b"") -> int:
        """Publishes `weights` as a whole, and what travels beside them; returns their version.

        Raises SpecMismatch where they differ in kind.
        """
        require_fitting(weights, self._tensors)
        with self._locked(fcntl.LOCK_EX):
            if self._tensors:
                # In one call, which Ctrl-C cannot end halfway.
                torch._foreach_copy_(list(self._tensors.values()), [weights[name] for name in self._tensors])
            os.pwrite(self.fd, _LENGTH.pack(len(beside)) + beside, self._end)
            self._version[0] += 1
            return self.version

    def read(self) -> dict[str, Tensor]:
        """Copies of the latest version, by name."""
        with self._locked(fcntl.LOCK_SH):
            return {name: shared.clone() for name, shared in self._tensors.items()}

    @torch.no_grad()
    def read_into(self, weights: Mapping[str, Tensor], known: int) -> tuple[int, bytes]:
        """Copies the latest version into `weights`, unless that is the `known` one.

        Returns its number, and what was published beside it; nothing for the `known` one.
        """
        if self.version == known:
            return known, b""
        with self._locked(fcntl.LOCK_SH):
            for name, shared in self._tensors.items():
                weights[name].copy_(shared)
            (length,) = _LENGTH.unpack(os.pread(self.fd, _LENGTH.size, self._end))
            return self.version, os.pread(self.fd, length, self._end + _LENGTH.size)

    @contextmanager
    def _locked(self, kind: int) -> Iterator[None]:
        with self._threads:
            fcntl.lockf(self.fd, kind)
            try:
                yield
            finally:
                fcntl.lockf(self.fd, fcntl.LOCK_UN)
