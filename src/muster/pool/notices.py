"""Single lines for the user that are no warnings: nothing has to be changed, so no filter may turn them into errors."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_said: set[str] = set()
_say_elsewhere: Callable[[str], None] | None = None


def say_by(say: Callable[[str], None]) -> None:
    """Has lines of this process go to `say`, which has them written where the user looks."""
    global _say_elsewhere
    _say_elsewhere = say


def say_once(text: str) -> None:
    """Writes a line to stderr; the same line is not written again in this process."""
    if text in _said:
        return
    _said.add(text)
    say(text)


def say(text: str) -> None:
    """Writes a line to stderr, if there is one."""
    if _say_elsewhere is not None:
        _say_elsewhere(text)
        return
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

    def check(self, more: Callable[[], str] = str) -> None:
        """Says it if it is time. more: gives a sentence, or nothing, that follows."""
        if self._is_silent or time.monotonic() < self._due:
            return
        self._is_silent = True
        say(f"{self._doing}.{said}" if (said := more()) else self._doing)


@contextmanager
def starts_unsaid() -> Iterator[None]:
    """Keeps starts from being said in a ``with`` block: who writes it says them elsewhere."""
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
