"""Single lines for the user that are no warnings: nothing has to be changed, so no filter may turn them into errors."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_said: set[str] = set()


def say_once(text: str) -> None:
    """Writes a line to stderr; the same line is not written again in this process."""
    if text in _said:
        return
    _said.add(text)
    say(text)


def say(text: str) -> None:
    """Writes a line to stderr, if there is one."""
    with contextlib.suppress(AttributeError, OSError, ValueError):  # stderr is None, closed, or a terminal that is gone
        sys.stderr.write(f"muster: {text}\n")
        sys.stderr.flush()


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
