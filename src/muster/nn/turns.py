"""Threads take turns at torch's global generators, which are the process's: each finds them as it has left them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_locks: dict[int, threading.RLock] = {}


def turn() -> threading.RLock:
    """The lock that a thread holds while it draws from torch's global generators in states of its own.

    A forked process has another one: nobody there would release one that a thread of its parent held.
    """
    return _locks.setdefault(os.getpid(), threading.RLock())


@contextmanager
def generators_kept(device: torch.device | None = None) -> Iterator[None]:
    """Leaves torch's generators, that of the CPU and a GPU's, as they were before the ``with`` block. Takes a turn."""
    with turn(), torch.random.fork_rng([device] if device is not None and device.type == "cuda" else []):
        yield
