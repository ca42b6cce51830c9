"""A pool of threads of this process: the same verbs, where nothing is sent or replaced."""

from __future__ import annotations

import errno
import inspect
import os
import queue
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from muster.errors import WorkerDied, WorkerTimeout
from muster.pickling.interrupts import Uninterrupted
from muster.pickling.probe import starts
from muster.pool.closing import ClosingPlaces, not_closed, warn_of_cuts
from muster.pool.deaths import NOUNS
from muster.pool.limits import AT_ONCE, CloseLimits, Limit, Limits
from muster.pool.messages import Answer, Close, Closed, Failed, Message, Post, Question, Ready
from muster.pool.place import Owing, Plan
from muster.pool.resources import MemoryPlan, Usage, limit_reached, usage_of
from muster.pool.verbs import SLICE_S, Answered, BasePool, Hooks
from muster.pool.watch import Activity, lines_of
from muster.pool.worker import Here, Resident, serve
from muster.worker_info import WorkerInfo, worker_info_context

if TYPE_CHECKING:
    import asyncio

Outcome = tuple[Any, BaseException | None]
"""The value that a call has returned, and its exception; one of them is None."""

# How long a thread may take at least to finish its current work when the pool closes, and to close a part. Together
# under 2 s: after Ctrl-C nobody waits longer.
_GRACE_S = 1.0
_PART_S = 0.5


class _Thread(Owing):
    """One thread and its resident. Messages to it go into `inbox`, what it says into `said`.

    It holds no reference to the pool, so that a pool that nobody uses is collected and closed.
    said, heard: readers take from `said`; `heard` gets an item with each, to wait for, so that a wait that Ctrl-C ends
    loses nothing.  unread: what it has said while the pool closes. Event and the other parts of `threading` that are
    written in Python are not used: Ctrl-C in a wait may break them.
    """

    cut_verb = "left behind"

    def __init__(
        self, index: int, plan: Plan, resident: type[Resident], said: deque[Any], heard: queue.SimpleQueue[None]
    ) -> None:
        self.index, self.plan = index, plan
        self.name = NOUNS.name(index, plan.envs)
        self._resident = resident
        self._said, self._heard = said, heard
        self.parts, self.unread, self._has_closed = plan.parts, deque[Message](), False
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.activity = Activity()
        self.crash: BaseException | None = None
        self._numpy_errors: dict[str, Any] = {**np.geterr(), "call": np.geterrcall()}  # a new thread has NumPy's own
        # A daemon: an endless step must not keep the interpreter from ending.
        self.thread = threading.Thread(target=self._main, name=f"muster-worker-{index}", daemon=True)

    def _main(self) -> None:
        try:
            with np.errstate(**self._numpy_errors), worker_info_context(self.plan.info):
                try:
                    here = Here(self.plan.info, {}, None, self._say, activity=self.activity)
                    resident = self._resident(self.plan.content, here)
                    self._say(Ready(resident.facts()))
                except BaseException as error:
                    self._say(Failed.of(error, None))
                    return
                serve(resident, self.inbox.get, self._say)
        except BaseException as error:  # reported by the caller's `watch`: nobody reads a thread's traceback
            self.crash = error

    def _say(self, message: Message) -> None:
        self._said.append((self, message))
        self._heard.put(None)

    def has_ended(self) -> bool:
        if self._has_closed:
            self.thread.join(_GRACE_S)  # nothing is left to be done there
        return not self.thread.is_alive()

    def heard(self) -> object:
        message = self.unread.popleft() if self.unread else None
        self._has_closed |= isinstance(message, Closed)
        return message

    def cut(self) -> None:
        """Leaves it behind: nobody can end a thread."""

    def stack_lines(self) -> list[str]:
        frame = sys._current_frames().get(self.thread.ident or 0)
        return [] if frame is None else lines_of(traceback.walk_stack(frame))


class ThreadPool(BasePool[_Thread]):
    """Residents in threads of this process. It has the verbs of `muster.pool.pool.Pool`.

    Plans and messages are the objects themselves. Residents are built one after the other: few constructors are
    thread-safe, and Python's warning filters are not. None is judged, lost or replaced; a thread that ends closes it.
    One that does not close in time is left behind and named: nobody can end a thread.
    """

    def __init__(self, resident: type[Resident], plans: Sequence[Plan], hooks: Hooks, limits: Limits) -> None:
        super().__init__(hooks, NOUNS)
        self._limits = limits
        self._said: deque[tuple[_Thread, Message]] = deque()
        self._heard: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._places = [_Thread(i, plan, resident, self._said, self._heard) for i, plan in enumerate(plans)]

    def start(self, judge: MemoryPlan | None = None) -> list[Any]:
        facts: list[Any] = []
        deadline = time.monotonic() + self._limits.start_timeout
        try:
            self._number([one.plan for one in self._places])
            for one in self._places:
                with Uninterrupted():
                    if not starts(one.thread):
                        raise limit_reached(errno.EAGAIN, f"{one.name}, of {len(self._places)}, could not start")
                while not self._said:
                    if not self._wait(min(SLICE_S, max(0.0, deadline - time.monotonic()))):
                        self.watch(0.0)
                        if time.monotonic() >= deadline:
                            limit = f"start_timeout={self._limits.start_timeout} s"
                            raise WorkerTimeout(one.name, NOUNS.building, limit)
                _, message = self._said.popleft()
                if isinstance(message, Failed):
                    raise self._hooks.raised(one.index, message)
                assert isinstance(message, Ready)
                facts.append(message.facts)
            self._usage_at_start = usage_of(os.getpid())
        except BaseException:
            self.close(AT_ONCE)
            raise
        return facts

    # ---- messages

    def sealed(self, message: object) -> Any:
        """The message itself."""
        return message

    def _send(self, place: _Thread, kind: type[Post | Question], content: Any, limit: Limit | None) -> None:
        self._put(place, kind(content))

    def _put(self, place: _Thread, message: Message) -> None:
        place.inbox.put(message)  # never waits
        self._hooks.ring(place.index)  # after the message: a thread that wakes looks for it once

    def _wait(self, timeout_s: float) -> bool:
        """Waits for something that a thread says; False after the time."""
        try:
            self._heard.get(timeout=timeout_s)
        except queue.Empty:
            return bool(self._said)
        return True

    def _listen(self, timeout_s: float) -> bool:
        if not self._wait(timeout_s):
            return False
        self._require_open()
        while self._said:
            with Uninterrupted():
                one, message = self._said.popleft()
                if isinstance(message, Answer):
                    self._is_answered(one, Answered(one.index, message.content))
        return True

    # ---- watching

    def watch(self, waited_s: float) -> None:
        """Raises WorkerDied where a thread has ended by an exception that is no env's."""
        self._require_open()
        for one in self._places:
            if one.crash is not None:
                cause = f"{type(one.crash).__name__}: {one.crash}"
                with self.whole():
                    raise WorkerDied(one.name, self._doing(one), None, cause, is_thread=True) from one.crash
        self._look(self._places)

    def deliver_logs(self) -> None:
        """Does nothing: records are the process's own."""

    def never_replaces(self) -> None:
        """Does nothing: threads are never replaced."""

    def processes(self) -> list[tuple[int | None, Usage]]:
        """This process, once for each thread."""
        return [(os.getpid(), self._usage_at_start)] * len(self._places)

    # ---- closing

    def close(self, limits: CloseLimits) -> list[tuple[int, Any]]:
        """As `Pool.close`; a thread that hangs is left behind and named."""
        try:
            with Uninterrupted():
                is_first = self._begins_to_close()
            if not is_first:  # in a forked child of the caller these threads do not exist
                return []
            closing = self._closing(limits)
            closing.ask()
            closing.wait()
        finally:  # also when a Ctrl-C ends the wait
            if self._is_closer():
                for one in self._places:
                    self._put(one, Close())  # who goes on after all closes its resident then
                self._unique_indices.release()
        if not limits.terminates:
            crashes = [(one.name, Failed.of(one.crash, None)) for one in self._places if one.crash is not None]
            warn_of_cuts([*closing.cuts, *(not_closed(*crash) for crash in crashes)])
        return sorted(closing.said.items())

    def _closing(self, limits: CloseLimits) -> ClosingPlaces[_Thread]:
        # The garbage collector may close it in any thread, even in one of these.
        here = threading.get_ident()
        # Threads of the caller's own process always have time to close, even after an error or with a timeout of 0.
        longer = replace(
            limits,
            part_s=max(limits.part_s, _PART_S),
            call_s=max(limits.call_s, _GRACE_S + _PART_S),
            busy_s=max(limits.busy_s, _GRACE_S),
        )
        started = [one for one in self._places if one.thread.ident not in (None, here)]

        asked: list[_Thread] = []

        def ask(one: _Thread) -> None:
            asked.append(one)
            self._put(one, Close())

        def ring() -> None:  # again: one that steps into the slab just now has not heard the first ring
            for one in asked:
                self._hooks.ring(one.index)

        return ClosingPlaces(
            *(started, longer),
            ask=ask,
            listen=self._hear,
            doing=self._doing,
            stacks=lambda places: ["\n".join(one.stack_lines()) or "(none: it has ended)" for one in places],
            pending=(lambda _: 0) if limits.terminates else self._hooks.pending,
            on_slice=ring,
        )

    def _hear(self, places: Sequence[_Thread], timeout_s: float) -> list[_Thread]:
        self._wait(timeout_s)
        while self._said:
            one, message = self._said.popleft()
            one.unread.append(message)
        return [*places]


class CallingThread:
    """A thread that calls functions one after the other, for a loop in another thread, which gets the outcomes."""

    def __init__(self, name: str, info: WorkerInfo, loop: asyncio.AbstractEventLoop) -> None:
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._info, self._loop = info, loop
        self._numpy_errors: dict[str, Any] = {**np.geterr(), "call": np.geterrcall()}  # a new thread has NumPy's own
        self.thread = threading.Thread(target=self._main, name=name, daemon=True)
        if not starts(self.thread):
            raise limit_reached(errno.EAGAIN, f"the thread of env {info.env_index} could not start")

    def call(self, done: Callable[[Outcome], None], function: Callable[[], Any]) -> None:
        """Has a function called; `done` takes the outcome, in the loop."""
        self._inbox.put((done, function))

    def ends(self) -> None:
        """Ends the thread once it has done all that it was asked for."""
        self._inbox.put(None)

    def _main(self) -> None:
        with np.errstate(**self._numpy_errors), worker_info_context(self._info):
            while (asked := self._inbox.get()) is not None:
                done, function = asked
                try:
                    self._loop.call_soon_threadsafe(done, outcome_of(function))
                except RuntimeError:  # the loop has ended
                    return
                del asked, done, function  # nothing of a call is held until the next one


def outcome_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Outcome:
    """The outcome of a call."""
    try:
        return function(*args, **kwargs), None
    except BaseException as error:
        return None, error


async def awaited(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Outcome:
    """The outcome of a call in a loop; a result that can be awaited is."""
    try:
        value = function(*args, **kwargs)
        return (await value if inspect.isawaitable(value) else value), None
    except BaseException as error:
        return None, error
