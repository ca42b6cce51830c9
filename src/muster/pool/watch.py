"""The watch over long waits: what an env is in at each place of a pool, and the line on the logger that says so."""

from __future__ import annotations

import bisect
import os
import struct
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import numpy as np

from muster._core import HOST_BYTES, HOST_DOING_AT, Doing, map_fd, ticks
from muster.pool.logs import hand_over, of_wait

AFTER_S = [10.0, 60.0, 600.0, 3600.0]
_LOOKS = 20  # until the first of these
_MOST_LINES = 8
_STARTED = time.monotonic_ns(), ticks()
_FIELDS = struct.Struct("<IIQ")
NO_ENV = (1 << 32) - 1
"""The index of an env where the worker is in code of none, or of nobody knows which."""

WORDS = {
    Doing.BUILDING: "in build",
    Doing.RESETTING: "in reset",
    Doing.STEPPING: "in step",
    Doing.TALKING: "in a call",
    Doing.NOTHING: "about to step or reset",
}
_MUSTER = os.path.dirname(os.path.dirname(__file__)) + os.sep


State = tuple[int, int, int]
"""A `Doing`, the env that a worker is in, and since when by the core's clock. NOTHING where it only owes that."""

About = tuple[str, str, Sequence[str]]
"""What to say of a wait: the env's name, a sentence, and the stack of the thread that steps it."""


class Activity:
    """The state of a worker, which it writes itself: the core's record of a host, in memory that its owner reads.

    memory: uint8, of the record; None for memory of this process alone.
    """

    def __init__(self, memory: Any = None) -> None:
        self.memory = np.zeros(HOST_BYTES, np.uint8) if memory is None else memory

    def put(self, doing: int, env: int = NO_ENV) -> None:
        """Says what this worker is in from now on."""
        _FIELDS.pack_into(self.memory.data, HOST_DOING_AT, doing, env, ticks())

    @contextmanager
    def of(self, doing: int, env: int = NO_ENV) -> Iterator[None]:
        """Says so for a ``with`` block."""
        doing_before, env_before, _ = self.read()
        self.put(doing, env)
        try:
            yield
        finally:
            self.put(doing_before, env_before)

    def read(self) -> State:
        doing, env, since = _FIELDS.unpack_from(self.memory.data, HOST_DOING_AT)
        return doing, env, since


def activity_in(fd: int, place: int) -> Activity:
    """The activity of one place of a pool, in a file that all its workers have."""
    at = place * HOST_BYTES
    return Activity(map_fd(fd=fd, size=at + HOST_BYTES)[at:])


class Watch:
    """Says what a pool's owner waits for, once for each phase and time of `AFTER_S`, however many envs hang.

    take_logs: see `LogInbox`.
    """

    def __init__(self, take_logs: Callable[[bytes, int], None] = hand_over) -> None:
        self._take_logs = take_logs
        self._due = 0.0
        self._seen: dict[int, tuple[State, float]] = {}  # by place, and since when
        self._said: dict[str, int] = {}  # by phase, the number of times that have passed

    def look(self, states: Callable[[], list[tuple[int, State]]], about: Callable[[int, int], About]) -> None:
        """Looks, if it is time. states: by place.  about: what to say of an env in a place."""
        if (now := time.monotonic()) < self._due:
            return
        self._due, seen, self._seen = now + AFTER_S[0] / _LOOKS, self._seen, {}
        late: dict[str, list[tuple[float, int, int]]] = {}
        for place, state in states():
            (doing, env, since), known = state, place in seen and seen[place][0] == state
            self._seen[place] = seen[place] if known else (state, now)
            for_s = now - self._seen[place][1] if doing == Doing.NOTHING else seconds_since(since)
            # Seen twice: who was stopped together with its owner goes on before the second look.
            if known and for_s >= AFTER_S[0]:
                words = "starting" if env == NO_ENV else WORDS[doing]
                late.setdefault(words, []).append((for_s, -place, env))
        for words, waits in late.items():
            for_s, place, env = max(waits)
            passed = bisect.bisect(AFTER_S, for_s)
            if passed > self._said.get(words, 0):
                self._said[words] = passed
                self._say(words, for_s, len(waits) - 1, *about(-place, env))

    def _say(self, words: str, for_s: float, others: int, name: str, hint: str, stack: Sequence[str]) -> None:
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - for_s))
        so = f", and {others} more {'are' if others > 1 else 'is'} there, too" if others else ""
        where = ["\nIt is here, most recent call first:", *env_lines(stack)] if stack else []
        said = f"{name} has been {words} for {for_s:.1f} s, since {since}{so}.{hint}" + "\n".join(where)
        self._take_logs(of_wait(said), 0)


def lines_of(frames: Iterable[tuple[FrameType, int]]) -> list[str]:
    """The lines of a stack, as faulthandler prints it. frames: most recent call first, with their lines."""
    return [f'  File "{frame.f_code.co_filename}", line {line} in {frame.f_code.co_name}' for frame, line in frames]


def env_lines(stack: Sequence[str]) -> list[str]:
    """The part of a stack that an env's own code has begun, 8 lines at most; all of it where that is none.

    stack: as faulthandler prints it, most recent call first.
    """
    lines = [line for line in stack if line.startswith("  File ")]
    files = [line.split('"')[1] for line in lines]
    own = lines[: next((i for i, file in enumerate(files) if file.startswith(_MUSTER)), len(lines))] or lines
    while len(own) > 1 and (files[len(own) - 1].startswith("<") or "/wrappers/" in files[len(own) - 1]):
        own.pop()
    return own if len(own) <= _MOST_LINES else [own[0], *own[1 - _MOST_LINES :]]


def seconds_since(moment: int) -> float:
    """Seconds since a moment of the core's clock."""
    return seconds(ticks() - moment)


def seconds(of_ticks: float) -> float:
    """Seconds of the core's clock."""
    now_ns, now = time.monotonic_ns(), ticks()
    per_second = (now - _STARTED[1]) / max(1, now_ns - _STARTED[0]) * 1e9
    return of_ticks / max(1.0, per_second)
