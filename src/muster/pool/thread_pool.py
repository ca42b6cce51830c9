"""A pool whose places are threads of this process, for envs: the same verbs, where nothing is sent or replaced."""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import errno
import os
import queue
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from muster.errors import WorkerDied, WorkerTimeout
from muster.pickling.interrupts import Uninterrupted
from muster.pickling.probe import starts
from muster.pool.closing import AT_ONCE, CloseLimits, CloseNotice, CloseProgress, not_closed, warn_of_cuts
from muster.pool.deaths import NOUNS
from muster.pool.messages import Answer, Close, Closed, Closing, Failed, Message, Post, Question, Ready
from muster.pool.place import Limit, Owing, Plan
from muster.pool.resources import Usage, limit_reached, usage_of
from muster.pool.verbs import SLICE_S, Answered, BasePool, Hooks
from muster.pool.watch import Activity
from muster.pool.worker import Here, Resident, serve
from muster.worker_info import worker_info_context

# How long a thread may take at least to finish its current work when the pool closes, and then to go on after an
# interrupt. Together under 2 s: after Ctrl-C nobody waits longer.
_GRACE_S = 1.0
_INTERRUPT_S = 0.5
_AGAIN_S = 0.1  # for what an interrupted thread does next
_BUSY_SLICE_S = 0.002


class _Thread(Owing):
    """One thread and its resident. Messages to it go into `inbox`, what it says into `said`.

    It holds no reference to the pool, so that a pool that nobody uses is collected and closed.
    said, heard: readers take from `said`; `heard` gets an item with each, to wait for, so that a wait that Ctrl-C ends
    loses nothing. Event and the other parts of `threading` that are written in Python are not used: Ctrl-C in a wait
    may break them.
    """

    def __init__(
        self, index: int, plan: Plan, resident: type[Resident], said: deque[Any], heard: queue.SimpleQueue[None]
    ) -> None:
        self.index, self.plan = index, plan
        self.name = NOUNS.name(index, plan.envs)
        self._resident = resident
        self._said, self._heard = said, heard
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.activity = Activity()
        self.crash: BaseException | None = None
        self._numpy_errors = np.geterr(), np.geterrcall()  # a new thread has NumPy's own
        # A daemon: an endless step must not keep the interpreter from ending.
        self.thread = threading.Thread(target=self._main, name=f"muster-worker-{index}", daemon=True)

    def _main(self) -> None:
        modes, errcall = self._numpy_errors
        np.seterrcall(errcall)
        np.seterr(**modes)
        try:
            with worker_info_context(self.plan.info):
                try:
                    here = Here(self.plan.info, {}, None, self._say, activity=self.activity)
                    resident = self._resident(self.plan.content, here)
                    self._say(Ready(resident.facts()))
                except BaseException as error:
                    self._say(Failed.of(error, None))
                    return
                try:
                    serve(resident, self.inbox.get, self._say)
                except SystemExit:  # an interrupt between the steps of two envs
                    self._say(Closed(resident.close(lambda i: self._say(Closing(i)))))
        except BaseException as error:  # reported by the caller's `watch`: nobody reads a thread's traceback
            self.crash = error

    def _say(self, message: Message) -> None:
        self._said.append((self, message))
        self._heard.put(None)

    def stack_lines(self) -> list[str]:
        frame = sys._current_frames().get(self.thread.ident or 0)
        frames = traceback.walk_stack(frame) if frame is not None else ()
        return [f'  File "{one.f_code.co_filename}", line {line} in {one.f_code.co_name}' for one, line in frames]


class ThreadPool(BasePool[_Thread]):
    """Residents in threads of this process. See `muster.pool.pool.Pool`, whose verbs it has.

    Plans and messages are the objects themselves. Residents are built one after the other: few constructors are
    thread-safe, and Python's warning filters are not. None is judged, lost or replaced; a thread that ends closes it.
    interrupted: parts, by the indices that users know, whose close was interrupted and is named in the warning.
    """

    def __init__(self, resident: type[Resident], plans: Sequence[Plan], start_timeout_s: float, hooks: Hooks) -> None:
        super().__init__(hooks, NOUNS)
        self._start_timeout_s = start_timeout_s
        self._said: deque[tuple[_Thread, Message]] = deque()
        self._heard: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._places = [_Thread(i, plan, resident, self._said, self._heard) for i, plan in enumerate(plans)]
        self.interrupted: set[int] = set()

    def start(self) -> list[Any]:
        """Starts all threads; returns what their residents say of themselves. An error leaves nothing behind."""
        facts: list[Any] = []
        deadline = time.monotonic() + self._start_timeout_s
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
                            raise self._too_slow(one, NOUNS.building)
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

    def _too_slow(self, one: _Thread, doing: str) -> Exception:
        return WorkerTimeout(one.name, doing, f"start_timeout={self._start_timeout_s} s")

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
        """As `Pool.close`; a thread that hangs is interrupted once, then left behind and named."""
        # The garbage collector may run this in any thread, even in one of these.
        started = [one for one in self._places if one.thread.is_alive() and one.thread.ident != threading.get_ident()]
        closing = _ClosingThreads(started, limits, self._said, self._wait, self._hooks, self._put, self._doing)
        try:
            with Uninterrupted():
                is_first = self._begins_to_close()
            if not is_first:  # in a forked child of the caller these threads do not exist
                return []
            for one in self._places:
                if one not in started:  # reads it once it comes to that
                    self._put(one, Close())
            closing.wait()
        finally:  # also when another Ctrl-C ends the wait
            if self._is_closer():
                closing.give_up()
                self._unique_indices.release()
        self.interrupted = closing.interrupted
        if not limits.terminates:
            crashes = [(one.name, Failed.of(one.crash, None)) for one in self._places if one.crash is not None]
            warn_of_cuts([*closing.cuts, *(not_closed(*crash) for crash in crashes)])
        return sorted(closing.results.items())


@dataclass(eq=False)
class _Ending:
    """One thread on its way to its end.

    pending: how much it has to do before it is asked to close; None once it is asked.
    interrupted_at: where it was when it was interrupted; None before, and once it has gone on.
    report: what to say of its first interrupt.
    """

    one: _Thread
    progress: CloseProgress
    pending: int | None = 0
    interrupted_at: tuple[int, ...] | None = None
    report: str = ""


class _ClosingThreads:
    """The wait for threads that close. cuts: reports of what was interrupted, or left behind.

    results: what the residents say of their closing, by place.  interrupted: parts whose close was interrupted.
    """

    def __init__(
        self,
        threads: Sequence[_Thread],
        limits: CloseLimits,
        said: deque[tuple[_Thread, Message]],
        wait: Callable[[float], bool],
        hooks: Hooks,
        send: Callable[..., None],
        doing: Callable[[_Thread], str],
    ) -> None:
        # Threads in the caller's own process always have time to close, even after an error or with a timeout of 0.
        longer = replace(
            limits,
            part_s=max(limits.part_s, _INTERRUPT_S),
            call_s=max(limits.call_s, _GRACE_S + _INTERRUPT_S),
            busy_s=max(limits.busy_s, _GRACE_S),
        )
        self._said, self._wait, self._hooks, self._send, self._doing = said, wait, hooks, send, doing
        self._pending: Callable[[int], int] = (lambda _: 0) if limits.terminates else hooks.pending
        began = time.monotonic()
        self._endings = [
            _Ending(one, CloseProgress(one.name, one.plan.envs, longer, began, one.plan.parts)) for one in threads
        ]
        self._notice = CloseNotice(longer, began)
        self._interrupts = False
        self.interrupted: set[int] = set()
        self.cuts: list[str] = []
        self.results: dict[int, Any] = {}

    def wait(self) -> None:
        """Waits until all have ended, or were left behind."""
        while self._endings:
            self._ask()
            for ending in self._endings:
                if ending.pending is None:  # again: one that steps into the slab just now has not heard the first ring
                    self._hooks.ring(ending.one.index)
            settled = all(one.pending is None and one.progress.left for one in self._endings)
            self._wait(SLICE_S if settled else _BUSY_SLICE_S)
            self._listen()
            now = time.monotonic()
            for ending in list(self._endings):
                alive = ending.one.thread.is_alive()
                if ending.interrupted_at is not None and not (
                    alive and ending.interrupted_at == self._place_of(ending)
                ):
                    self._goes_on(ending)
                if not alive:
                    self._endings.remove(ending)
                elif now >= ending.progress.until:
                    self._is_late(ending)
            self._say_what_closes([one for one in self._endings if one.interrupted_at is None])
        self._listen()

    def give_up(self) -> None:
        """Interrupts the threads that still run, unless they were."""
        endings, self._endings = self._endings, []
        for ending in endings:
            if ending.pending is not None:
                self._send(ending.one, Close())
            if ending.interrupted_at is None:
                self._interrupts = True
                _raise_exit_in(ending.one.thread.ident)
        deadline = time.monotonic() + _INTERRUPT_S
        for ending in endings:
            ending.one.thread.join(max(0.0, deadline - time.monotonic()))
        if self._interrupts:
            _forget_exits()

    def _say_what_closes(self, waited_for: Sequence[_Ending]) -> None:
        progress = [one.progress for one in waited_for]
        self._notice.check(progress, lambda i: self._doing(waited_for[i].one))

    def _place_of(self, ending: _Ending) -> tuple[int, ...]:
        return ending.progress.begun, len(ending.progress.left), self._hooks.pending(ending.one.index)

    def _goes_on(self, ending: _Ending) -> None:
        """Notes that a thread has left the place where it was interrupted; what it does next may hang, too."""
        ending.interrupted_at = None
        if ending.report not in self.cuts:
            self.cuts.append(ending.report)
        if not ending.progress.begun:
            ending.progress.grant(_AGAIN_S)

    def _ask(self) -> None:
        """Asks those to close that have done what they were asked for before."""
        for ending in self._endings:
            if ending.pending is None:
                continue
            if (pending := self._pending(ending.one.index)) != ending.pending:
                ending.progress.goes_on()
            ending.pending = pending or None
            if not pending:
                self._send(ending.one, Close())

    def _listen(self) -> None:
        endings = {one.one.index: one for one in self._endings}
        while self._said:
            one, message = self._said.popleft()
            progress = endings[one.index].progress if one.index in endings else None
            match message:
                case Closing(i) if progress is not None:
                    progress.begins(i)
                case Closed(content):
                    self.results[one.index] = content
                    if progress is not None:
                        progress.ends()

    def _is_late(self, ending: _Ending) -> None:
        """Interrupts a thread that hangs; leaves it behind where that has not helped."""
        one, progress = ending.one, ending.progress
        doing, stack = self._doing(one), "\n".join(one.stack_lines()) or "(none: it has ended)"
        if ending.interrupted_at is not None:
            self.cuts.append(progress.cut("left behind, in a native call that does not return,", doing, stack))
            self._endings.remove(ending)
            return
        ending.interrupted_at = self._place_of(ending)
        ending.report = ending.report or progress.cut("interrupted", doing, stack)
        if progress.begun and progress.left:
            self.interrupted.add(progress.left[0])
        if ending.pending is not None:
            ending.pending = None
            self._send(one, Close())
        progress.grant(_INTERRUPT_S)
        self._interrupts = True
        _raise_exit_in(one.thread.ident)


def _raise_exit_in(ident: int | None) -> None:
    """Raises SystemExit in a thread: that interrupts Python code, not a native call."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident or 0), ctypes.py_object(SystemExit))


def _forget_exits() -> None:
    """Clears Python's note of exceptions that were set for threads which ended, or hang, before they were raised.

    Before 3.13 Python has one such note for all threads, and clears it when any thread raises its exception. Until then
    Python 3.11 hangs in the next function that is profiled or traced, for example by a debugger.
    """

    def notice() -> None:
        with contextlib.suppress(SystemExit):
            _raise_exit_in(threading.get_ident())
            time.sleep(0)  # gives it the chance to be raised: at the latest after a call

    _thread.start_new_thread(notice, ())
