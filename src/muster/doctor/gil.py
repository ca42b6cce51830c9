"""Whether a function leaves the GIL to other threads while it runs."""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Callable

_NEVER_S = 1000.0
_WATCH_S = 0.05
_MOST_STEPS = 1 << 16
_ROUNDS = 3


def share_without_gil(run: Callable[[int], None]) -> float:
    """The share of its time, 0 to 1, for which ``run(count)`` does not hold the GIL.

    A second thread counts how often it gets the GIL. With the switch interval out of reach, that is only when `run`
    lets go of it; how long it holds it each time, a sleep tells. What `run` then takes longer than alone it has waited
    to have it back, as it does after moments that are too short to be of use to another thread.
    """
    counted, stopped = 0, False

    def count() -> None:
        nonlocal counted
        while not stopped:
            counted += 1
            time.sleep(0)

    def watch(work: Callable[[], None]) -> tuple[int, float]:
        start, before = time.perf_counter(), counted
        work()
        return counted - before, time.perf_counter() - start

    def some() -> None:
        run(steps)

    steps = _steps_that_take(run, _WATCH_S)
    # Medians, for on a busy machine any of them may have waited for a core.
    alone_s = statistics.median(watch(some)[1] for _ in range(_ROUNDS))
    interval = sys.getswitchinterval()
    thread = threading.Thread(target=count, daemon=True)
    thread.start()
    sys.setswitchinterval(_NEVER_S)
    try:
        rounds = [(*watch(lambda: time.sleep(_WATCH_S)), *watch(some)) for _ in range(_ROUNDS)]
    finally:
        sys.setswitchinterval(interval)
        stopped = True
        thread.join()
    held_s = statistics.median(free_s / max(1, most) for most, free_s, _, _ in rounds)
    used_s = statistics.median(counts * held_s - max(0.0, busy_s - alone_s) for _, _, counts, busy_s in rounds)
    return min(1.0, max(0.0, used_s / alone_s))


def _steps_that_take(run: Callable[[int], None], seconds: float) -> int:
    steps = 1
    while steps < _MOST_STEPS:
        start = time.perf_counter()
        run(steps)
        if time.perf_counter() - start > seconds:
            break
        steps *= 2
    return steps
