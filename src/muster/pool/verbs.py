"""The verbs that pools of processes and of threads share, and what they ask of their owner."""

from __future__ import annotations

import itertools
import math
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

from muster._core import Doing
from muster.errors import ClosedError, UsageError
from muster.pickling.interrupts import Uninterrupted
from muster.pool.deaths import Nouns
from muster.pool.limits import AT_ONCE, CloseLimits, Limit
from muster.pool.logs import hand_over
from muster.pool.messages import Failed, Post, Question
from muster.pool.place import Asked, Owing, Plan
from muster.pool.resources import MemoryPlan, Usage
from muster.pool.unique_indices import UniqueIndices
from muster.pool.watch import NO_ENV, About, State, Watch
from muster.transport.channel import watched_s

SLICE_S = 0.05


class Successor(NamedTuple):
    """The successor of a lost worker. content: as of `Plan`.  messages: posts for it, once it is ready."""

    content: Any
    messages: Sequence[object] = ()


class Answered(NamedTuple):
    """An answer to a question."""

    place: int
    content: Any


class Lost(NamedTuple):
    """The end of a worker that owed an answer. Another one takes its place."""

    place: int
    error: Exception


class Hooks(Protocol):
    """The questions of a pool to its owner. Belongs to a part of the owner that nobody's finalizer hangs on.

    An owner that says what is `raised`, and no more, has workers that only read messages and that nothing replaces.
    """

    def on_lost(self, place: int, reason: str) -> Successor | None:
        """The successor of a worker that is gone; None where that is an error, which closes the pool. May raise."""
        return None

    def raised(self, place: int, failed: Failed) -> BaseException:
        """The exception for what a worker reports."""

    def doing(self, place: int) -> str:
        """The words for a worker that is ready, and owes no answer."""
        return "waiting for the caller"

    def state(self, place: int) -> State | None:
        """The state of a worker that does not report it itself, see `Activity`."""
        return None

    def pending(self, place: int) -> int:
        """How much a worker has to do before it can read a message."""
        return 0

    def ring(self, place: int) -> None:
        """Wakes a worker, before a message is sent to it, where it waits for anything else than messages."""
        return


class Whole(Uninterrupted):
    """A block that is done as a whole: where it ends halfway, the pool is closed, since half would know of it.

    holds: holds signals back meanwhile, too.
    """

    def __init__(self, ends_halfway: Callable[[BaseException], None], *, holds: bool = True) -> None:
        self._ends_halfway, self._holds = ends_halfway, holds

    def __enter__(self) -> Self:
        return super().__enter__() if self._holds else self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            if error is not None:
                self._ends_halfway(error)
        finally:
            if self._holds:
                super().__exit__(kind, error, traceback)


P = TypeVar("P", bound=Owing)


class Round:
    """A page of a pool's book, for one kind of question of its owner: who was asked, and what has come of that.

    A place has one question at a time. Asked again in the same round, what it owes from before is dropped; asked in
    another round, what it does is awaited first, and that answer stays in its round. A timeout, a Ctrl-C or a handler's
    exception loses no answer and drops nothing: who waits again goes on.

    answers: by place, what has come and was not taken yet: whoever takes one removes it.
    """

    def __init__(self, pool: BasePool[Any]) -> None:
        self._pool = pool
        self.answers: dict[int, Answered | Lost] = {}

    @property
    def owing(self) -> list[int]:
        """The places that still owe an answer of this round."""
        return [place.index for place in self._pool.owing(self)]

    def ask(
        self,
        messages: Mapping[int, object],
        words: str,
        limit: Limit | Mapping[int, Limit] | None = None,
        first: str | None = None,
    ) -> None:
        """Asks places.

        words: for what they do.  first: those until that is sent.  limit: of an answer, anew with each report.
        One object for several places is sealed once, and all are before any is sent. Raises what pickling raises.
        """
        pool = self._pool
        pool.require_places(messages)
        by_identity = {key: pool.sealed(one) for key, one in {id(one): one for one in messages.values()}.items()}
        sealed = {place: by_identity[id(message)] for place, message in messages.items()}
        if self._elsewhere(sealed):  # only then: who has died meanwhile is to be found by this message
            pool.wait(lambda: not self._elsewhere(sealed))
        self.drop(sealed)
        with pool.whole():
            for place, message in sealed.items():
                of_place = limit.get(place) if isinstance(limit, Mapping) else limit
                asked = Asked(self, first or words, watched_s(), of_place, None if first else time.monotonic())
                pool.ask(place, message, asked)
                asked.words, asked.since = words, time.monotonic()

    def wait(
        self, at_least: int | None = None, timeout_s: float | None = None, places: Collection[int] | None = None
    ) -> list[int]:
        """Waits for answers, and hands logs on; returns the places with an answer, in the order of arrival.

        at_least: None for all that are owed.  places: those that count. Fewer are there after the timeout.
        Raises ClosedError, and what closed the pool.
        """
        self._pool.require_places(places or ())

        def came() -> list[int]:  # a list: a Ctrl-C that comes as a generator is dropped is lost
            return [place for place in [*self.answers] if places is None or place in places]

        def is_done() -> bool:
            owing = [place for place in self.owing if places is None or place in places]
            return not owing or (at_least is not None and len(came()) >= at_least)

        self._pool.wait(is_done, timeout_s)
        self._pool.deliver_logs()
        return came()

    def drop(self, places: Collection[int] | None = None) -> None:
        """Drops the answers of these places, or of all, that have come or will come."""
        for place in self._pool.owing(self):
            if places is None or place.index in places:
                place.asked, place.forgotten = None, place.forgotten + 1
        for index in [*self.answers] if places is None else places:
            self.answers.pop(index, None)

    def _elsewhere(self, places: Collection[int]) -> list[int]:
        """Those of `places` that owe an answer of another round."""
        own = self.owing
        return [one.index for one in self._pool.owing() if one.index in places and one.index not in own]


class BasePool(ABC, Generic[P]):
    """The verbs that pools of processes and of threads share; they differ in how a message comes to a place and back.

    closed: whether it is closed, by `close` or by an error.
    log_flag: ``log_flag[0]`` is not 0 while there are log records to deliver.
    """

    def __init__(self, hooks: Hooks, nouns: Nouns, take_logs: Callable[[bytes, int], None] = hand_over) -> None:
        self._watch = Watch(take_logs)
        self._hooks, self._nouns = hooks, nouns
        self._owner = os.getpid()
        self._places: list[P] = []
        self.closed = False
        self._open = [True]
        self._unique_indices = UniqueIndices()
        self._watch_at = 0.0  # time.monotonic() of the next look at deaths and limits, while it waits
        self._halfway = AT_ONCE  # the limits of a close after an error
        self._closer: int | None = None  # the thread that has closed it
        self.log_flag = memoryview(bytes(1))

    def _number(self, plans: Sequence[Plan]) -> None:
        """Gives the envs of all places their unique indices, which they and their successors keep."""
        indices = iter(self._unique_indices.take(sum(len(plan.envs) for plan in plans)))
        for plan in plans:
            plan.info = replace(plan.info, unique_indices=tuple(itertools.islice(indices, len(plan.envs))))

    def whole(self) -> Whole:
        """See `Whole`."""
        return Whole(self._ends_halfway)

    def _ends_halfway(self, error: BaseException) -> None:
        if isinstance(error, UsageError):  # raised before anything was done
            return
        if isinstance(error, Exception) and self._closer not in (None, threading.get_ident()):
            raise self._is_closed() from error  # whatever another thread's close() looks like from here
        self.close(self._halfway)

    def post(self, place: int, message: Any, limit: Limit | None = None) -> None:
        """Sends a sealed message, which nobody answers; keeps it for a worker that is being replaced.

        Waits only while the pipe is full. limit: of that wait; then the worker is lost.
        """
        with self.whole():
            self._send(self._open_place(place), Post, message, limit)

    @property
    def reachable(self) -> list[int]:
        """The places that it is worth to ask: of processes and threads all."""
        return [place.index for place in self._places]

    def round(self) -> Round:
        """A new page of the book, see `Round`."""
        return Round(self)

    def ask(self, place: int, message: Any, asked: Asked) -> None:
        """Sends a sealed message as `post` does; one answer is owed, which `asked.round` gets. For rounds."""
        to = self._open_place(place)
        with self.whole():
            to.asked = asked
            self._send(to, Question, message, asked.limit)

    def owing(self, of: Round | None = None) -> list[P]:
        """The places that owe an answer, of one round or of any."""
        asked = [(one, one.asked) for one in [*self._places]]
        return [one for one, question in asked if question is not None and (of is None or question.round is of)]

    def wait(self, is_done: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Waits until `is_done`, or for the time: the only wait. Raises ClosedError, and what closed the pool."""
        began = time.monotonic()
        deadline = math.inf if timeout_s is None else began + timeout_s
        while True:
            self._require_open()
            if (now := time.monotonic()) >= self._watch_at:  # however often it is called
                self._watch_at = now + SLICE_S
                self.watch(now - began)
            left_s = max(0.0, deadline - now)
            if is_done() or (left_s == 0.0 and not self._listen(0.0)):
                return
            self._listen(min(SLICE_S, left_s))

    def book(self) -> dict[int, str]:
        """By place what it was asked, in words, and for how long it has done that. For any thread."""
        return {one.index: str(one.asked) for one in self.owing()}

    def _is_answered(self, place: P, one: Answered | Lost) -> None:
        """Takes the answer that a place owes, which is dropped where nobody waits for it any more."""
        if isinstance(one, Answered) and place.forgotten:
            place.forgotten -= 1
        elif place.asked is not None:
            place.asked.round.answers[place.index], place.asked = one, None

    def _doing(self, place: P) -> str:
        return self._hooks.doing(place.index) if place.asked is None else str(place.asked)

    def require_places(self, places: Iterable[int]) -> None:
        """Raises UsageError for a place that there is not, ClosedError."""
        for index in places:
            self._open_place(index)

    def _open_place(self, index: int) -> P:
        self._require_open()
        if not 0 <= index < len(self._places):
            raise UsageError(f"the pool has no place {index}; it has {len(self._places)}, from 0 on")
        return self._places[index]

    def _require_open(self) -> None:
        if self.closed:
            raise self._is_closed()

    def _is_closed(self) -> ClosedError:
        return ClosedError(f"{self._nouns.pool} closed, by another thread or after an error")

    def _begins_to_close(self) -> bool:
        """True if this call closes the pool: the first one, in the process that has made it."""
        if self._owner != os.getpid():
            return False
        try:
            self._open.pop()  # by one thread alone
        except IndexError:
            return False
        self.closed, self._closer = True, threading.get_ident()
        return True

    def _is_closer(self) -> bool:
        """True if this thread has closed the pool; it ends again what a Ctrl-C has left of that."""
        return self._owner == os.getpid() and self._closer == threading.get_ident()

    @abstractmethod
    def start(self, judge: MemoryPlan | None = None) -> list[Any]:
        """Starts all workers; returns what their residents say of themselves. An error leaves nothing behind.

        judge: says when those after the first may build, where they share this machine's memory in processes.
        """

    @abstractmethod
    def sealed(self, message: object) -> Any:
        """A message as `post` takes it, made once for several places. Raises what pickling raises."""

    @abstractmethod
    def watch(self, waited_s: float) -> None:
        """Looks once for deaths, replacements that are ready, limits and log records, for whoever waits elsewhere.

        waited_s: for how long. Raises ClosedError, and what closed the pool.
        """

    def _look(self, places: Sequence[P]) -> None:
        """Says what is waited for in these places, if it is time."""
        self._watch.look(partial(self._states, places), self._about)

    # A list: what a signal's handler raises while a generator is thrown away is lost.
    def _states(self, places: Sequence[P]) -> list[tuple[int, State]]:
        said = [(place.index, place.activity.read()) for place in places]
        states = [(i, self._hooks.state(i) if one[0] == Doing.NOTHING else one) for i, one in said]
        return [(i, state) for i, state in states if state is not None]

    def _about(self, index: int, env: int) -> About:
        place = self._places[index]
        own = replace(place.name, envs=range(0))
        name = str(place.name) if env == NO_ENV else f"{self._nouns.env(index, env)} ({own})"
        return name, self._hint(place), place.stack_lines()

    def _hint(self, place: P) -> str:
        """The sentences about a long wait."""
        return ""

    @abstractmethod
    def deliver_logs(self) -> None:
        """Hands the log records that have arrived to the caller's loggers."""

    @abstractmethod
    def processes(self) -> list[tuple[int | None, Usage]]:
        """The pid of each worker, None where it has ended, and what it held once its resident was built."""

    @abstractmethod
    def never_replaces(self) -> None:
        """Releases what only replacements of workers would need: copies of users' fds, and big pickles."""

    @abstractmethod
    def close(self, limits: CloseLimits) -> list[tuple[int, Any]]:
        """Closes residents and workers within `limits`; returns what the residents say of that, by place.

        Gives a RuntimeWarning about workers that were cut off. Only the first call does anything, from any thread, and
        none does in a forked child: it has copies of all this, and must not touch the workers. Where a Ctrl-C has ended
        the first one, another in the same thread ends what that has left.
        """

    @abstractmethod
    def _send(self, place: P, kind: type[Post | Question], content: Any, limit: Limit | None) -> None:
        """Sends a sealed message, or keeps it for a worker that is being replaced."""

    @abstractmethod
    def _listen(self, timeout_s: float) -> bool:
        """Takes what workers have sent, and notices who has ended; returns whether there was anything."""
