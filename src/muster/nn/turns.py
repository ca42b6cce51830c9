"""Threads take turns at torch's global generators, which are the process's: each finds them as it has left them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from muster.pickling.interrupts import new_in_child

TURN = new_in_child(threading.RLock())
"""Held by a thread while it draws from torch's global generators in states of its own."""


@contextmanager
def generators_kept(device: torch.device | None = None) -> Iterator[None]:
    """Leaves torch's generators, that of the CPU and a GPU's, as they were before the ``with`` block. Takes a turn."""
    with TURN, torch.random.fork_rng([device] if device is not None and device.type == "cuda" else []):
        yield
