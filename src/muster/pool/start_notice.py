"""A line on the terminal about a start that takes long."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from muster.pool.notices import say

_QUICK_S = 1.0
_UNSAID = ContextVar("unsaid", default=False)


class StartNotice:
    """Says on stderr, once, what a start is doing, if it takes longer than a second and stderr is a terminal."""

    def __init__(self, doing: str) -> None:
        self._doing = doing
        self._due = time.monotonic() + _QUICK_S
        self._is_silent = _UNSAID.get() or not _has_terminal()

    def check(self) -> None:
        """Says it if it is time."""
        if self._is_silent or time.monotonic() < self._due:
            return
        self._is_silent = True
        say(self._doing)


@contextmanager
def starts_unsaid() -> Iterator[None]:
    """Keeps starts from being said in a ``with`` block, whose author says them elsewhere."""
    token = _UNSAID.set(True)
    try:
        yield
    finally:
        _UNSAID.reset(token)


def _has_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, OSError, ValueError):  # none, closed, or an object that the user has put in its place
        return False
