"""What hangs until the test has ended: nobody can end a thread that does. In another process it hangs for ever."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

go_on = threading.Event()


def hang(*_: object) -> None:
    """Does not return before `go_on` is set."""
    while not go_on.is_set():
        time.sleep(0.01)


def worker_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("muster-worker")]


@contextlib.contextmanager
def released() -> Iterator[None]:
    """A ``with`` block at whose end all go on, and end."""
    try:
        yield
    finally:
        go_on.set()
        for thread in worker_threads():
            thread.join(10.0)
        go_on.clear()
