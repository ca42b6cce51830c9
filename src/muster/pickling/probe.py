"""Pickling that reports which object failed, and that returns even if an object hangs."""

from __future__ import annotations

import _thread
import contextvars
import functools
import io
import pickle
import queue
import threading
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from muster.pickling import functools_pickling
from muster.pickling.interrupts import Uninterrupted
from muster.pickling.kinds import kind_of
from muster.pickling.main_module import OWN_PARTS
from muster.pickling.shared_pickling import reduction_of_memory, reduction_of_shared, spawning

_POLL_S = 0.05
_BEGIN_S = 5.0
# Smaller buffers stay in the pickle: they are not worth a place of their own.
_BIG_BYTES = 1 << 20


@dataclass
class PickleAttempt:
    """The result of one attempt to pickle.

    data: the pickle, None if there is none.  failed: the very object that could not be pickled.  error: the exception
    that it raised, None if it hung.  out_of_time: the limit was reached before anything failed.  noted: objects that
    arrive as something else, or are huge.  seen: the objects that were reached, in this order, builtin containers and
    plain values excepted.  shared: objects that the receiver shares with this process.
    """

    data: bytes | None = None
    failed: Any = None
    error: BaseException | None = None
    out_of_time: bool = False
    noted: list[Any] = field(default_factory=list)
    seen: list[Any] = field(default_factory=list)
    shared: list[Any] = field(default_factory=list)


def attempt(
    value: Any,
    *,
    silence_s: float,
    before: Sequence[Any] = (),
    lays_main: bool = False,
    forks: bool = False,
    limit_s: float | None = None,
    skip: Collection[int] = (),
    big: list[pickle.PickleBuffer] | None = None,
    fds: list[int] | None = None,
) -> PickleAttempt:
    """Pickles ``value`` with cloudpickle.

    before: pickled before it, each as a pickle of its own that shares its objects with the others: what the receiver
    needs before it loads the rest, by one Unpickler.  lays_main, forks: see `main_module.Definitions`.
    silence_s: an object that takes longer than this counts as hanging.  limit_s: the limit for the whole; None for no
    limit.  skip: ids of objects that a placeholder replaces, to find what else fails.
    big: receives the memory of big arrays, which is then no part of the pickle.
    fds: receives the fds that the pickle's receiver needs, see `shared_pickling`; None where it can receive none.
    """
    buffer = io.BytesIO()
    buffer_callback = None if big is None else lambda one: not takes(one, big)
    pickler = _ReportingPickler(buffer, skip, buffer_callback, shares=fds is not None, lays_main=lays_main, forks=forks)
    outcome = PickleAttempt(noted=pickler.noted, seen=pickler.seen, shared=pickler.shared)

    def run() -> None:
        try:
            with spawning(fds):
                for one in (*before, value):
                    pickler.dump(one)
            outcome.data = buffer.getvalue()
        except BaseException as error:  # a SystemExit from a __reduce__ must not get any further either
            outcome.error = error

    # In a thread, because only a thread can be left behind with an object that hangs while it is pickled.
    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), daemon=True, name="muster-pickling")
    if starts(thread):
        end = _wait(thread, lambda: (len(pickler.seen), buffer.tell()), silence_s, limit_s)
    else:
        run()
        end = "finished"
    if end == "finished":
        outcome.failed = pickler.seen[-1] if outcome.data is None and pickler.seen else None
        return outcome
    pickler.abandoned = True
    seen = pickler.seen.copy()
    return PickleAttempt(failed=seen[-1] if seen else None, out_of_time=end == "out of time", seen=seen)


def starts(thread: threading.Thread) -> bool:
    """Starts a thread; returns False where there can be no more.

    Another one tries that: `Thread.start` waits forever for a thread that finds no memory to begin with.
    """
    said: queue.SimpleQueue[Any] = queue.SimpleQueue()
    task = functools.partial(lambda: said.put(True))
    ended = weakref.ref(task, said.put)
    try:
        _thread.start_new_thread(task, ())
        del task
        if said.get(timeout=_BEGIN_S) is ended:
            return False
        with Uninterrupted():  # else `Thread.start` may leave a lock held that the thread's beginning needs
            thread.start()
    except (RuntimeError, queue.Empty):
        return False
    return True


def takes(buffer: pickle.PickleBuffer, big: list[pickle.PickleBuffer]) -> bool:
    """Adds `buffer` to `big` if it is big and in one piece; returns whether it is.

    Not bytes: among the big ones they are pickles, and their memory goes once they are read.
    """
    try:
        raw = buffer.raw()
        is_big = raw.nbytes >= _BIG_BYTES and not isinstance(raw.obj, bytes)
    except BufferError:  # not in one piece
        return False
    if is_big:
        big.append(buffer)
    return is_big


class _ReportingPickler(functools_pickling.Pickler):
    """A pickler that records which object is being pickled.

    Pickling calls `reducer_override` for every object that is not a plain builtin.
    """

    def __init__(
        self,
        file: io.BytesIO,
        skip: Collection[int],
        buffer_callback: Callable[[pickle.PickleBuffer], bool] | None,
        shares: bool,
        **to: bool,
    ) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffer_callback, **to)
        self.abandoned = False
        self.seen: list[Any] = []
        self.noted: list[Any] = []
        self.shared: list[Any] = []
        self._skip = skip
        self._shares = shares

    def reducer_override(self, obj: Any) -> Any:
        if self.abandoned:
            raise TimeoutError("nobody waits for this pickle any more")
        if type(obj) in OWN_PARTS:
            return NotImplemented
        self.seen.append(obj)
        if id(obj) in self._skip:
            return str, ()
        kind = kind_of(obj)
        if kind is not None and kind.shared == "always":
            self.shared.append(obj)
        if self._shares and (reduction := reduction_of_shared(obj)) is not None:
            return reduction
        if kind is not None and kind.refused:
            raise TypeError(kind.reason)
        if kind is not None and kind.warns:
            self.noted.append(obj)
        return reduction_of_memory(obj) or super().reducer_override(obj)


def _wait(
    thread: threading.Thread, progress: Callable[[], Any], silence_s: float, limit_s: float | None
) -> Literal["finished", "silent", "out of time"]:
    """The end of waiting for `thread`. silent: no progress for ``silence_s``; out of time: over ``limit_s`` in all."""
    started = silent_since = time.monotonic()
    seen = None
    while True:
        thread.join(_POLL_S)
        if not thread.is_alive():
            return "finished"
        now, reached = time.monotonic(), progress()
        if reached != seen:
            seen, silent_since = reached, now
        if now - silent_since > silence_s:
            return "silent"
        if limit_s is not None and now - started > limit_s:
            return "out of time"
