"""Vector envs that a Ctrl-C ends at a random moment of `make_vec` or `close`: they leave nothing."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from pathlib import Path
from random import Random
from typing import Any

from vector_programs import Difference, Tally, draw_backend

import muster
from interrupting import Interruption
from sample_envs import Counter

PATIENCE_S = 10.0
_num_moments: dict[str, int] = {}  # of a life, by its options


def run(draw: Random, tally: Tally, backends: list[str]) -> None:
    """Draws options and a moment of the life of a vector env. Raises Difference where that leaves something."""
    options = draw_backend(draw, backends, 2)
    if draw.random() < 0.5 and not options.get("caller_steps"):
        options["on_failure"] = "restart"
    if str(options) not in _num_moments:
        _live(options)  # with all that is imported and kept at the first time
        counting = Interruption(1 << 60)
        counting.run(_live, options)
        _num_moments[str(options)] = counting.num_moments
    before, interruption = _held(), Interruption(draw.randrange(_num_moments[str(options)]))
    interruption.run(_live, options)
    late = time.monotonic() + PATIENCE_S
    while (left := _held()) != before:
        if time.monotonic() > late:
            raise Difference(f"{options}: (fds, children, threads) {before} became {left}: {interruption.where}")
        time.sleep(0.02)
    tally.programs += 1
    tally.faults += 1


def _live(options: dict[str, Any]) -> None:
    muster.make_vec(Counter, 2, **options).close()


def _held() -> tuple[int, int, int]:
    gc.collect()
    children = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the thread has ended meanwhile
            children += len((task / "children").read_text().split())
    return len(os.listdir("/proc/self/fd")), children, threading.active_count()
