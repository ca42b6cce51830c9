"""How long a close waits for envs, what it says meanwhile, and how it reports what it has cut off."""

from __future__ import annotations

import _thread
import contextlib
import itertools
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from muster.arguments import seconds
from muster.errors import WorkerName
from muster.introspection import caller_stacklevel
from muster.pool.notices import say

CLOSE_S = 60.0
# How long a worker that is in a step, a reset or a call may take before it begins to close its envs.
BUSY_S = 5.0
# The same after a Ctrl-C, which has given up that step already, and for a worker that still builds its envs.
HURRIED_S = 1.0
# The least that `timeout` means: workers begin to close their envs, so that what is cut off can be named.
LEAST_S = 0.1
NOTICE_S = 5.0
ABANDONED_S = 5.0
# A day: whoever sets more wants no limit, and a time of day would not say it.
_FOR_EVER_S = 86400.0


@dataclass(frozen=True)
class CloseLimits:
    """How long a close waits, in seconds; infinity is for ever.

    env_s: for the ``close()`` of each env.  in_all_s: for all of them together.
    busy_s: for a worker that is in a step, a reset or a call, before it begins to close its envs.
    call_s: for all workers to answer what they were asked before; where one does not, all are killed.
    words: the limit as users know it, for messages.
    terminates: nothing is closed, and nothing is said about that.
    """

    env_s: float = CLOSE_S
    in_all_s: float = math.inf
    busy_s: float = field(default_factory=lambda: BUSY_S)
    words: str = f"close_timeout={CLOSE_S:g}"
    terminates: bool = False
    call_s: float = math.inf

    def of_call(self, timeout_s: float | None, *, terminate: bool) -> CloseLimits:
        """These limits, or those that the arguments of one call of ``close()`` set in their place."""
        if terminate:
            return AT_ONCE
        if timeout_s is None:
            return self
        limit_s = max(timeout_s, LEAST_S)
        return CloseLimits(math.inf, limit_s, min(self.busy_s, limit_s), f"timeout={timeout_s:g}")

    def hurried(self, is_hurried: bool = True) -> CloseLimits:
        """These limits where, if `is_hurried`, nobody needs what the workers are busy with."""
        return replace(self, busy_s=min(self.busy_s, HURRIED_S)) if is_hurried else self


AT_ONCE = CloseLimits(0.0, 0.0, 0.0, terminates=True)
FOR_EVER = CloseLimits(math.inf, math.inf, math.inf)


def for_ever_after(timeout_s: float | None) -> CloseLimits:
    """The limits where only what is pending has to end within `timeout_s`; None where that has no limit, either."""
    return FOR_EVER if timeout_s is None else replace(FOR_EVER, call_s=timeout_s, words=f"timeout={timeout_s:g}")


def limits_of(close_timeout: Any, num_envs: int = 1) -> CloseLimits:
    """The limits for the option `close_timeout`. num_envs: envs that are closed as one. Raises ConfigError."""
    if close_timeout is None:
        return CloseLimits(math.inf)
    limit_s = seconds("close_timeout", close_timeout)
    return CloseLimits(limit_s * num_envs, words=f"close_timeout={limit_s:g}" + " for each env" * (num_envs > 1))


def abandoned() -> CloseLimits:
    """The limits where nobody has called ``close()``: on garbage collection and at the interpreter's exit.

    There a Ctrl-C that has ended the program hurries the close, too.
    """
    why = f"the {ABANDONED_S:g} s that garbage collection and Python's exit wait (call close(), which waits longer)"
    limits = CloseLimits(ABANDONED_S, ABANDONED_S, ABANDONED_S, why)
    return limits.hurried(getattr(sys, "last_type", None) is KeyboardInterrupt)


class CloseProgress:
    """One worker's way from the request to close its envs to its end.

    name: the worker's.  envs: its envs, by the indices that users know.  num_closes: the number of closes that it
    reports: one for each env, or one for all of a collector's.
    begun: whether it closes its envs.  left: those that it has not closed.  until: time.monotonic() of the moment until
    which it is waited for.
    """

    def __init__(
        self, name: WorkerName, envs: Sequence[int], limits: CloseLimits, began: float, num_closes: int | None = None
    ) -> None:
        self.name = name
        self.left = self._envs = list(envs)
        self.begun = False
        self._limits = limits
        self._num_closes = len(envs) if num_closes is None else num_closes
        self._closed = 0
        self._latest = began + limits.in_all_s
        self._wait(began, limits.busy_s)

    def goes_on(self) -> None:
        """Notes that the worker has finished a part of what it was busy with."""
        self._wait(time.monotonic(), self._limits.busy_s)

    def begins(self, i: int) -> None:
        """Notes that the worker closes its i-th env now."""
        self.begun, self._closed, self.left = True, i, self._envs[i:]
        self._wait(time.monotonic(), self._limits.env_s)

    def ends(self) -> None:
        """Notes that all envs are closed; the worker has the time of one more env to end."""
        self.begins(len(self._envs))

    def _wait(self, now: float, limit_s: float) -> None:
        self.until = min(now + limit_s, self._latest)

    @property
    def at_the_latest(self) -> float:
        """time.monotonic() of the moment until which the worker may be waited for, if it goes on closing."""
        to_come = max(0, self._num_closes - self._closed - self.begun)
        return min(self.until + (self._limits.env_s * to_come if to_come else 0.0), self._latest)

    def cut(self, verb: str, doing: str, stack: str) -> str:
        """The sentences that report that the worker did not end in time. verb: what was done to it, such as "killed".

        doing: what it was busy with, in words, where it has not begun.
        """
        if not self.begun:
            what = f"before it closed {name_envs(self.left)}: it was {doing}."
        elif not self.left:
            what = f"since it did not end within {self._limits.words}, though its envs were closed."
        else:
            one_each = self._num_closes == len(self._envs)
            closing, waiting = (self.left[:1], self.left[1:]) if one_each else (self.left, [])
            others = f"; {name_envs(waiting)} had not begun" if waiting else ""
            what = (
                f"in close() of {name_envs(closing)}, which did not end within {self._limits.words}{others}. "
                "What was not written yet is lost."
            )
        return f"{self.name} was {verb} {what}\nIts Python stack:\n{stack}"


class CloseNotice:
    """Says once, after `NOTICE_S`, which envs a close waits for and until when, unless it ends by then anyway."""

    def __init__(self, limits: CloseLimits, began: float) -> None:
        self._limits, self._began = limits, began
        self._due = math.inf if limits.in_all_s <= NOTICE_S else began + NOTICE_S

    def check(self, now: float, waited_for: Sequence[CloseProgress], doing: Callable[[int], str]) -> None:
        """Says it if it is time.

        now: time.monotonic() of the moment at which those that are late were cut off: they are not waited for.
        doing: what the worker at this place of `waited_for` is busy with, in words.
        """
        if now < self._due:
            return
        self._due = math.inf
        if parts := list(_still(waited_for, doing)):
            say(f"close(): {'; '.join(parts)}. {self._waits_until(waited_for)}; Ctrl-C ends the wait")

    def _waits_until(self, waited_for: Sequence[CloseProgress]) -> str:
        latest, words = max(one.at_the_latest for one in waited_for), f"at the latest ({self._limits.words})"
        if self._limits.call_s < math.inf and not all(one.begun for one in waited_for):
            latest = self._began + self._limits.call_s
            words = f"for an answer ({self._limits.words}), and then for as long as closing takes"
        left_s = latest - time.monotonic()
        if left_s > _FOR_EVER_S:
            return "Waiting for as long as that takes"
        return f"Waiting until {time.strftime('%H:%M:%S', time.localtime(time.time() + left_s))} {words}"


def _still(waited_for: Sequence[CloseProgress], doing: Callable[[int], str]) -> Iterator[str]:
    if closing := sorted(env for one in waited_for if one.begun for env in one.left):
        yield f"{name_envs(closing)} {'is' if len(closing) == 1 else 'are'} still closing after {NOTICE_S:g} s"
    for place, one in enumerate(waited_for):
        if not one.begun:
            yield f"{one.name} is still {doing(place)}"


class NoticeBeside:
    """Says what `CloseNotice` says, while this thread is busy with closing envs, which nobody can cut off here."""

    def __init__(self, name: WorkerName, envs: Sequence[int]) -> None:
        now = time.monotonic()
        self.progress = CloseProgress(name, envs, FOR_EVER, now)
        self._notice = CloseNotice(FOR_EVER, now)
        self._ended = _thread.allocate_lock()
        self._ended.acquire()

    def start(self, limits: CloseLimits) -> None:
        """Starts a thread for it, if `limits`, of the whole close, are those of a user's call.

        Not by `threading`, whose locks the code may hold that garbage collection stops.
        """
        if limits.in_all_s > NOTICE_S:
            with contextlib.suppress(RuntimeError):  # no thread is left, or the interpreter ends
                _thread.start_new_thread(self._wait, ())

    def stop(self) -> None:
        """Ends that thread."""
        self._ended.release()

    def warn_of_interrupt(self) -> None:
        """Gives a RuntimeWarning about the envs that a Ctrl-C has left unclosed."""
        interrupted, *unclosed = self.progress.left
        others = f"; {name_envs(unclosed)} had not begun" if unclosed else ""
        with contextlib.suppress(RuntimeWarning):  # made an error by a filter, it would hide the Ctrl-C
            warn_of_cuts([f"Ctrl-C ended close() of {name_envs([interrupted])}{others}. What was not written is lost."])

    def _wait(self) -> None:
        if not self._ended.acquire(timeout=NOTICE_S):
            self._notice.check(time.monotonic(), [self.progress], lambda _: "about to close its envs")


def warn_of_cuts(cuts: Sequence[str]) -> None:
    """Gives one RuntimeWarning about all workers that were cut off, if any."""
    if cuts:
        warnings.warn("\n".join(cuts), RuntimeWarning, stacklevel=caller_stacklevel())


def name_envs(envs: Sequence[int]) -> str:
    """Words such as ``env 3`` and ``envs 0 to 3, 7``. envs: in order."""
    runs = []
    for _, run in itertools.groupby(enumerate(envs), lambda one: one[1] - one[0]):
        first, *rest = [env for _, env in run]
        runs.append(f"{first} to {rest[-1]}" if len(rest) > 1 else ", ".join(map(str, (first, *rest))))
    return f"env{'s' if len(envs) > 1 else ''} {', '.join(runs)}"
