"""The end of a pool: how long it waits for residents that close, what it says meanwhile, and what it has cut off."""

from __future__ import annotations

import itertools
import logging
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from muster.errors import CannotTravel, WorkerName, more
from muster.introspection import caller_stacklevel
from muster.pickling.interrupts import Uninterrupted
from muster.pool.limits import LEAST_S, CloseLimits, in_all
from muster.pool.messages import Answer, Closed, Closing, Failed, Progress, Ready, Unpacking, expect
from muster.pool.notices import say
from muster.pool.place import Owing
from muster.transport.channel import ChannelClosed

P = TypeVar("P", bound=Owing)
_log = logging.getLogger("muster")

NOTICE_S = 5.0
ABANDONED_S = 5.0
_SLICE_S, _BUSY_SLICE_S = 0.05, 0.002


def close_abandoned(close: Callable[..., object], *meanwhile: Any) -> None:
    """Closes what nobody has closed: on garbage collection and at the interpreter's exit.

    There a Ctrl-C that has ended the program hurries the close, too.
    """
    why = f"the {ABANDONED_S:g} s that garbage collection and Python's exit wait (call close(), which waits longer)"
    close(in_all(ABANDONED_S, why).hurried(getattr(sys, "last_type", None) is KeyboardInterrupt), *meanwhile)


class CloseProgress:
    """One worker's way from the request to close to its end.

    name: the worker's.  parts: its envs, by the indices that users know; empty where it has none.  num_closes: the
    number of closes that it reports: one for each env, or one for all of a collector's.
    begun: whether it closes them.  left: those that it has not closed.  until: time.monotonic() of the moment until
    which it is waited for.
    """

    def __init__(
        self, name: WorkerName, parts: Sequence[int], limits: CloseLimits, began: float, num_closes: int
    ) -> None:
        self.name = name
        self.has_envs = bool(parts)
        self.left = self._parts = list(parts or range(num_closes))
        self.begun = False
        self._limits = limits
        self._one_each = num_closes == len(self._parts)
        self._latest = began + limits.call_s
        self._wait(began, limits.busy_s)

    def goes_on(self) -> None:
        """Notes that the worker has finished a part of what it was busy with."""
        self._wait(time.monotonic(), self._limits.busy_s)

    def begins(self, i: int) -> None:
        """Notes that the worker closes its i-th part now."""
        self.begun, self.left = True, self._parts[i:]
        self._wait(time.monotonic(), self._limits.part_s)

    def ends(self) -> None:
        """Notes that all is closed; the worker has the time of one more part to end."""
        self.begins(len(self._parts))

    def _wait(self, now: float, limit_s: float) -> None:
        self.until = min(now + limit_s, self._latest)

    def cut(self, verb: str, doing: str, stack: str) -> str:
        """The sentences that report that the worker did not end in time. verb: what was done to it, such as "killed".

        doing: what it was busy with, in words, where it has not begun.
        """
        within = f"within {self._limits.words}"
        if not self.begun:
            what = f"before it closed {self._named(self.left)}: it was {doing}."
        elif not self.left:
            closed = "its envs were" if self.has_envs else "its resident was"
            what = f"since it did not end {within}, though {closed} closed."
        else:
            closing, waiting = (self.left[:1], self.left[1:]) if self._one_each and self.has_envs else (self.left, [])
            others = f"; {self._named(waiting)} had not begun" if waiting else ""
            what = (
                f"in close() of {self._named(closing)}, which did not end {within}{others}. Data that was not "
                "written yet is lost."
            )
        return f"{self.name} was {verb} {what}\nIts Python stack:\n{stack}"

    def _named(self, parts: Sequence[int]) -> str:
        return name_envs(parts) if self.has_envs else "its resident"


class CloseNotice:
    """Says once, after `after_s`, what a close waits for, unless it ends by then anyway: then `after_s` is infinite."""

    def __init__(self, limits: CloseLimits, began: float) -> None:
        self._words = limits.words
        self.after_s = math.inf if limits.call_s <= NOTICE_S else NOTICE_S
        self._due = began + self.after_s

    def check(self, waited_for: Sequence[CloseProgress], doing: Callable[[int], str]) -> None:
        """Says it if it is time. doing: what the worker at this place of `waited_for` is busy with, in words."""
        if time.monotonic() < self._due:
            return
        self._due = math.inf
        if parts := list(_still(waited_for, doing)):
            waits = f"as long as {self._words} allows" if self._words else "for as long as that takes"
            say(f"close(): {'; '.join(parts)}. Waiting {waits}; Ctrl-C ends the wait")


def _still(waited_for: Sequence[CloseProgress], doing: Callable[[int], str]) -> Iterator[str]:
    if closing := sorted(env for one in waited_for if one.begun and one.has_envs for env in one.left):
        yield f"{name_envs(closing)} {'is' if len(closing) == 1 else 'are'} still closing after {NOTICE_S:g} s"
    for i, one in enumerate(waited_for):
        if not one.begun:
            yield f"{one.name} is still {doing(i)}"
        elif not one.has_envs:
            yield f"{one.name} is still closing after {NOTICE_S:g} s"


class ClosingPlaces(Generic[P]):
    """Asks the residents of places to close, and waits for each as long as `limits` allow.

    ask: sends a place the message `Close`; raises TimeoutError where the worker cannot take it yet, ChannelClosed.
    listen: waits for what some places say, and returns those that may have said something.
    doing, stacks: what a worker is busy with, in words, and the Python stacks of several.
    pending: how much a worker has to do first.  on_slice: called now and then while it waits.
    said: what the residents have said of their closing, by place.  cuts: reports of the workers that were cut off.
    """

    def __init__(
        self,
        places: Sequence[P],
        limits: CloseLimits,
        *,
        ask: Callable[[P], None],
        listen: Callable[[Sequence[P], float], Iterable[P]],
        doing: Callable[[P], str],
        stacks: Callable[[Sequence[P]], Sequence[str]],
        pending: Callable[[int], int],
        on_slice: Callable[[], None],
    ) -> None:
        self._limits, self._on_slice, self._hear = limits, on_slice, listen
        self._ask, self._doing, self._stacks, self._count_pending = ask, doing, stacks, pending
        began = time.monotonic()
        self._owed = [place for place in places if not place.has_ended()]
        self._progress = {
            one.index: CloseProgress(one.name, one.name.envs, limits.hurried(one.starts), began, one.parts)
            for one in self._owed
        }
        self._pending = {place.index: pending(place.index) for place in self._owed}
        self._unasked = list(self._owed)
        self._notice = CloseNotice(limits, began)
        self.said: dict[int, Any] = {}
        self.cuts: list[str] = []

    def ask(self) -> None:
        """Sends `Close`, once, to each worker that has done what it was asked for before."""
        self._unasked = [place for place in self._unasked if not self._is_asked(place)]

    def wait(self) -> None:
        """Waits until all have ended; cuts off those that are late. Ctrl-C ends the wait, and cuts off none."""
        while not self.look(_SLICE_S):
            Uninterrupted.let_through()
            progress = [self._progress[place.index] for place in self._owed]
            self._notice.check(progress, lambda i: self._doing(self._owed[i]))

    def look(self, slice_s: float) -> bool:
        """One turn of `wait`, in which it listens for `slice_s`. True once nothing is left to wait for."""
        if self._owed:
            self.ask()
            self._listen(slice_s)
            self._on_slice()
            self._cut_late(time.monotonic())
        return not self._owed

    def _is_asked(self, place: P) -> bool:
        # A worker reads a message before it begins the next step, so it ends its steps first; one that starts reads
        # none, and nothing rings it, before its resident is built.
        if place.starts or self._pending[place.index]:
            return False
        try:
            self._ask(place)
        except TimeoutError:
            return False
        except ChannelClosed:  # its process ends
            pass
        return True

    def _listen(self, slice_s: float) -> None:
        """Takes what the workers report, for a short time."""
        soonest = min(self._progress[place.index].until for place in self._owed)
        slice_s = min(_BUSY_SLICE_S if self._unasked else slice_s, slice_s, max(0.0, soonest - time.monotonic()))
        for place in self._hear(self._owed, slice_s):
            self._take_messages(place)
            if place.has_ended():
                self._owed.remove(place)

    def _take_messages(self, place: P) -> None:
        progress = self._progress[place.index]
        try:
            while True:
                match place.heard():
                    case None:
                        return
                    case Closing(i):
                        progress.begins(i)
                    case Closed(content):
                        self.said[place.index] = content
                        progress.ends()
                    case Ready():  # one that had been starting
                        place.starting_until = None  # type: ignore[attr-defined]  # no thread starts and closes
                        progress.goes_on()
                    case Failed() as failed:  # it waits to be killed
                        if not place.starts:
                            self.cuts.append(not_closed(place.name, failed))
                        place.cut()
                    case Unpacking() | Progress() | Answer():  # the wait for these was interrupted
                        pass
                    case unknown:
                        expect(Closed, unknown)
        except TimeoutError:
            pass
        except CannotTravel as error:
            self.cuts.append(str(error))
        except ChannelClosed:
            place.hang_up()

    def _cut_late(self, now: float) -> None:
        for place in self._owed:
            if not self._progress[place.index].begun:
                self._note_steps(place)
        late = [place for place in self._owed if now >= self._progress[place.index].until]
        # Of a worker that still builds its resident, nothing is lost.
        told = [one for one in late if not one.starts]
        doing = {place.index: self._doing(place) for place in told}
        stacks = dict(zip(doing, self._stacks(told), strict=True))
        for place in late:
            i, progress = place.index, self._progress[place.index]
            self._take_messages(place)
            if time.monotonic() < progress.until:  # asking for stacks takes time, in which it has gone on
                continue
            self._owed.remove(place)
            # Where hardly any time was given, a process that only has to end is not worth a word.
            if i in stacks and not place.has_ended() and (progress.left or self._limits.call_s > LEAST_S):
                self.cuts.append(progress.cut(place.cut_verb, doing[i], stacks[i]))
            place.cut()

    def _note_steps(self, place: P) -> None:
        if (pending := self._count_pending(place.index)) != self._pending[place.index]:
            self._pending[place.index] = pending
            self._progress[place.index].goes_on()


def not_closed(name: WorkerName, failed: Failed) -> str:
    """The sentences that report that a resident has raised before it was closed. name: of its worker."""
    happened = f"{name} ended before its resident was closed: that raised {failed.type_name}: {failed.message}"
    return f"{happened}\nThe worker's traceback:\n{failed.traceback.rstrip()}"


def log_failures(name: WorkerName, said: Any) -> None:
    """Says what closing a resident has raised, where others go on. said: what it has said of its closing."""
    for failure in said or ():
        _log.warning("%s was replaced, and closing it raised %s: %s", name, failure.type_name, failure.message)


def warn_of_cuts(cuts: Sequence[str]) -> None:
    """Gives one RuntimeWarning about all workers that were cut off, if any."""
    if cuts:
        warnings.warn("\n".join(cuts) + more("problems/slow-close"), RuntimeWarning, stacklevel=caller_stacklevel())


def name_envs(envs: Sequence[int]) -> str:
    """Words such as ``env 3`` and ``envs 0 to 3, 7``. envs: in order."""
    runs = []
    for _, run in itertools.groupby(enumerate(envs), lambda one: one[1] - one[0]):
        first, *rest = [env for _, env in run]
        runs.append(f"{first} to {rest[-1]}" if len(rest) > 1 else ", ".join(map(str, (first, *rest))))
    return f"env{'s' if len(envs) > 1 else ''} {', '.join(runs)}"
