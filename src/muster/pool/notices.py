"""Single lines for the user that are no warnings: nothing has to be changed, so no filter may turn them into errors."""

from __future__ import annotations

import contextlib
import sys

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
