"""Whether a function leaves the GIL to other threads while it runs."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

_NEVER_S = 1000.0
_WATCH_S = 0.05


def share_without_gil(run: Callable[[int], None]) -> float:
    """The share of its time, 0 to 1, for which ``run(count)`` does not hold the GIL.

    A second thread counts how often it gets the GIL. With the switch interval out of reach, that is only when `run`
    lets go of it; how often it could have been, a sleep tells.
    """
    counted, stopped = 0, False

    def count() -> None:
        nonlocal counted
        while not stopped:
            counted += 1
            time.sleep(0)

    def rate(work: Callable[[], None]) -> float:
        start, before = time.perf_counter(), counted
        work()
        return (counted - before) / (time.perf_counter() - start)

    steps = _steps_that_take(run, _WATCH_S)
    interval = sys.getswitchinterval()
    thread = threading.Thread(target=count, daemon=True)
    thread.start()
    sys.setswitchinterval(_NEVER_S)
    try:
        free = rate(lambda: time.sleep(_WATCH_S))
        busy = rate(lambda: run(steps))
    finally:
        sys.setswitchinterval(interval)
        stopped = True
        thread.join()
    return min(1.0, busy / free) if free else 0.0


def _steps_that_take(run: Callable[[int], None], seconds: float) -> int:
    steps = 1
    while steps < 1 << 16:
        start = time.perf_counter()
        run(steps)
        if time.perf_counter() - start > seconds:
            break
        steps *= 2
    return steps
