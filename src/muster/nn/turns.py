"""Threads take turns at torch's global generators, which are the process's: each finds them as it has left them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from muster.pickling.interrupts import new_in_child

_logger = logging.getLogger("muster")
_LATE_S = 30.0
TURN = new_in_child(threading.RLock())


@contextmanager
def turn() -> Iterator[None]:
    """Encloses what draws from torch's global generators in states of its own. A line says if the turn comes late.

    It never comes where the envs of two collectors wait for each other.
    """
    if not TURN.acquire(timeout=_LATE_S):
        _logger.warning(
            "a collector has waited for %d s for another thread's, which draws from torch's global generator until its "
            "batch is done. If their envs wait for each other, collect without seed=, or in processes of their own",
            _LATE_S,
        )
        TURN.acquire()
    try:
        yield
    finally:
        TURN.release()


@contextmanager
def generators_kept(device: torch.device | None = None) -> Iterator[None]:
    """Leaves torch's generators, that of the CPU and a GPU's, as they were before the ``with`` block. Takes a turn."""
    with turn(), torch.random.fork_rng([device] if device is not None and device.type == "cuda" else []):
        yield
