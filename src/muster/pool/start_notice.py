"""A line on the terminal about a start that takes long."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from muster.pool.deaths import Nouns
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


def starting(nouns: Nouns, num_envs: int, num_workers: int, *, caller_steps: bool) -> str:
    """Words such as ``starting 8 envs in 8 processes``."""
    if nouns.envs:
        num_envs = sum(map(len, nouns.envs))
    kind = "" if nouns.worker == Nouns().worker else f"{nouns.worker} "
    envs = f"{num_envs} env{'' if num_envs == 1 else 's'}"
    processes = f"{num_workers} {kind}process{'' if num_workers == 1 else 'es'}"
    return f"starting {envs} in {processes}{' and in this one' if caller_steps else ''}"


def _has_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, OSError, ValueError):  # none, closed, or an object that the user has put in its place
        return False
