"""A pool with places on other machines, where an `Engine` starts processes: the same verbs, and two more."""

from __future__ import annotations

import atexit
import functools
import time
import warnings
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from muster.errors import ConfigError, NodeLost, WorkerName
from muster.introspection import caller_stacklevel
from muster.pickling.interrupts import Uninterrupted
from muster.pool.closing import close_abandoned, warn_of_cuts
from muster.pool.deaths import Nouns
from muster.pool.engine import Engine, Host, HostGone, Parcel, Ticket
from muster.pool.far_worker import Meet, Met, Ping, Report, opened, parcel_of
from muster.pool.limits import CloseLimits, Limit, Limits
from muster.pool.logs import hand_over
from muster.pool.messages import Answer, Build, Close, Failed, Message, Post, Question, Ready
from muster.pool.notices import say
from muster.pool.place import Owing, Plan
from muster.pool.resources import MemoryPlan, Usage
from muster.pool.verbs import SLICE_S, Answered, BasePool, Hooks, Lost
from muster.transport.mail import dumps

_PING_S, _ROOM_S = 0.5, 10.0
_LAST_WORDS_S, _ON_ITS_WAY_S = 1.0, 5.0
_SLOW = "Raise start_timeout, or look into what that machine is busy with"
# Each stands before its content, which is in a parcel of its own.
_HEADS = {kind: dumps(kind()) for kind in (Build, Post, Question, Close)}
_PING = [dumps(Ping()), *parcel_of(None)]


class FarHooks(Hooks, Protocol):
    """The further questions of a far pool to its owner. A successor's messages are those of `again`, made late."""

    def met(self, place: int, met: Met) -> tuple[str, str]:
        """Takes note of a machine that has answered the greeting. Returns an error and a warning; empty for none."""

    def again(self, place: int) -> Sequence[object]:
        """The messages for a successor that is built. Only once it has taken them it is reachable."""


@dataclass(eq=False)
class FarPlace(Owing):
    """The host in one place.

    content: its plan's.  where: its machine, for people.  is_met: true once it has answered the greeting.
    facts: as of `Pool.start`.  left: messages that it has to take before it is reachable; None until it is built.
    launched_at, heard_at, pinged_at: when it was begun, and when it spoke, and was asked to, last.
    is_said: true once it was said that there is no room.
    """

    index: int
    name: WorkerName
    host: Host
    content: Any
    where: str = "a machine"
    starts: bool = True
    is_met: bool = False
    facts: Any = None
    left: int | None = None
    launched_at: float = field(default_factory=time.monotonic)
    heard_at: float = 0.0
    pinged_at: float = 0.0
    is_said: bool = False

    def __str__(self) -> str:
        return f"{self.name.noun} {self.index} ({self.where})"


class FarPool(BasePool[FarPlace]):
    """Residents on other machines. It has the verbs of `muster.pool.pool.Pool`.

    A host that ends, or says nothing for the engine's time, is lost. Nobody waits for its successor: until that is up,
    the place is not `reachable`. Questions have no limits here: the residents have some.

    resident: ``"module:Class"`` of a `FarResident`.  plans: one for each place of the engine's.
    greeting: for `FarResident.meet`.
    """

    def __init__(
        self,
        engine: Engine,
        resident: str,
        plans: Sequence[Plan],
        hooks: FarHooks,
        limits: Limits,
        nouns: Nouns,
        greeting: Any = None,
    ) -> None:
        super().__init__(hooks, nouns)
        self.plans, self._engine, self._resident = plans, engine, resident
        self._far_hooks, self._limits, self._greeting = hooks, limits, parcel_of(greeting)
        self._halfway = limits.close(max((len(plan.envs) for plan in plans), default=1))
        self._owed: dict[Ticket, tuple[FarPlace, type[Message]]] = {}
        self._reports: deque[tuple[FarPlace, Report]] = deque()
        self._warned: deque[tuple[str, type[Warning]]] = deque()
        self._listened_at, self._started, self._ended = 0.0, False, False
        self._at_exit = functools.partial(close_abandoned, self.close)
        atexit.register(self._at_exit)  # after the engine's own hooks, so that it runs before them

    @property
    def reachable(self) -> list[int]:
        return [place.index for place in self._places if not place.starts]

    def start(self, judge: MemoryPlan | None = None) -> list[Any]:
        try:
            for index, plan in enumerate(self.plans):
                self._require_open()
                self._places.append(self._launch(index, plan.content))
            self.wait(lambda: not any(place.starts for place in self._places))
            self.deliver_logs()
            self._started = True
        except BaseException as error:
            self.close(self._halfway)
            self._ends_halfway(error)
            raise
        return [place.facts for place in self._places]

    def _launch(self, index: int, content: Any) -> FarPlace:
        plan = self.plans[index]
        name = self._nouns.name(index, plan.envs)
        place = FarPlace(index, name, self._engine.start(index, plan.parts), content)
        self._order(place, Meet, [dumps(Meet(self._resident, f"{name.noun} {index}")), *self._greeting])
        return place

    # ---- messages

    def sealed(self, message: object) -> Parcel:
        return parcel_of(message)

    def _send(self, place: FarPlace, kind: type[Post | Question], content: Parcel, limit: Limit | None) -> None:
        if place.left is None:  # `again` says it later, with all else; nobody waits for who starts
            if kind is Question:
                self._is_answered(place, Lost(place.index, NodeLost(place.name, place.where, "another is starting")))
            return
        place.left += kind is Post
        self._order(place, kind, [_HEADS[kind], *content])

    def _order(self, place: FarPlace, kind: type[Message], order: Parcel, *, now: bool = False) -> Ticket:
        with Uninterrupted():
            ticket = place.host.ask(order, beside=now)
            self._owed[ticket] = place, Ping if now else kind
        return ticket

    def post_now(self, place: int, message: object) -> Ticket:
        """Has a resident take a message at once, while it is busy. For any thread. Returns what `owes` understands."""
        return self._order(self._open_place(place), Question, [_HEADS[Question], *self.sealed(message)], now=True)

    def owes(self, ticket: Ticket) -> bool:
        """True as long as a resident has not taken that message."""
        return ticket in self._owed

    def ask_now(self, places: Iterable[int], message: object, limit_s: float) -> dict[int, Any]:
        """Asks residents at once, while they are busy. For any thread. Returns the answers that come in that time."""
        until, order, answers = time.monotonic() + limit_s, [_HEADS[Question], *self.sealed(message)], dict[int, Any]()
        asked = dict[Ticket, FarPlace]()
        try:
            with Uninterrupted():
                for place in [self._places[i] for i in places]:
                    asked[place.host.ask(order, beside=True)] = place
            while asked and time.monotonic() < until:
                with Uninterrupted():
                    for ticket, data in self._come(asked, SLICE_S):
                        place = asked.pop(ticket)
                        answer = None if isinstance(data, HostGone) else self._said(place, data)
                        if isinstance(answer, Answer):
                            answers[place.index] = answer.content
        finally:
            self._owed |= {ticket: (place, Ping) for ticket, place in asked.items()}
        self.deliver_logs()
        return answers

    # ---- listening

    def _listen(self, timeout_s: float) -> bool:
        with Uninterrupted():
            came = self._come(self._owed, timeout_s)
            self._require_open()
            for ticket, data in came:
                if ticket in self._owed:  # else of one that was lost meanwhile
                    self._hear(*self._owed.pop(ticket), data)
        self._listened_at = time.monotonic()
        return bool(came)

    def _come(self, tickets: Collection[Ticket], timeout_s: float) -> list[tuple[Ticket, Parcel | HostGone]]:
        """The answers that have come to these tickets, in the order of the questions."""
        came = self._engine.wait([*tickets], timeout_s)
        return [(one, came[one]) for one in [*tickets] if one in came]

    def _said(self, place: FarPlace, data: Parcel) -> object:
        """The answer in a report, or why there is none; keeps what else has happened for `deliver_logs`."""
        try:
            report: Report = opened(data)
            answer: object = report.answer
        except Exception as error:
            return error
        self._reports.append((place, report))
        return answer

    def _hear(self, place: FarPlace, kind: type[Message], data: Parcel | HostGone) -> None:
        if self._places[place.index] is not place:  # lost before, and followed by another
            return
        place.heard_at = max(time.monotonic(), place.pinged_at)
        if isinstance(data, HostGone):
            self._lose(place, data.reason, is_final=data.is_final)
            return
        match self._said(place, data):
            case Met() as met if kind is Meet:
                self._is_met(place, met)
            case Ready(facts) if kind is Build:
                self._is_built(place, facts)
            case Answer(content) if kind is Question:
                self._is_answered(place, Answered(place.index, content))
            case Answer() if kind is Post and place.left is not None:
                place.left -= 1
                place.starts = place.starts and place.left > 0
            case Failed() as failed if kind is not Ping:
                self._fails(place, failed)
            case Answer() | Failed() if kind is Ping:
                pass
            case other:
                self._lose(place, f"it has sent what is no answer here: {other!r:.200}")

    def _is_met(self, place: FarPlace, met: Met) -> None:
        """Checks what a machine has, and has it build its resident. Raises ConfigError."""
        place.is_met, place.where = True, met.host
        error, warning = self._far_hooks.met(place.index, met)
        if warning:
            self._warned.append((warning, UserWarning))
        if not error:
            self._order(place, Build, [_HEADS[Build], *parcel_of(place.content)])
        elif self._started:
            self._lose(place, error)
        else:
            raise ConfigError(error)

    def _is_built(self, place: FarPlace, facts: Any) -> None:
        place.facts, place.content, place.left = facts, None, 0  # its memory
        for message in self._far_hooks.again(place.index) if self._started else ():
            self._send(place, Post, self.sealed(message), None)
        place.starts = place.left > 0

    def _fails(self, place: FarPlace, failed: Failed) -> None:
        error = self._hooks.raised(place.index, failed)
        if not self._started:
            raise error
        self._lose(place, f"it {'could not start again' if place.starts else 'failed'}: {error}", cause=error)

    # ---- watching

    def watch(self, waited_s: float) -> None:
        self._require_open()
        now = time.monotonic()
        for place in self._places:
            if place.pinged_at > place.heard_at:  # silence is what is not heard while somebody listens
                place.pinged_at += max(0.0, now - max(self._listened_at, place.pinged_at))
            elif place.is_met and now - place.pinged_at > _PING_S:
                place.pinged_at = now
                self._order(place, Ping, _PING, now=True)
        self._listen(0.0)
        for place in [*self._places]:
            silent_s = time.monotonic() - place.pinged_at
            if not place.is_met:
                self._look_for_room(place, time.monotonic() - place.launched_at)
            elif place.pinged_at > place.heard_at and silent_s > self._engine.node_timeout:
                self._lose(place, f"nothing was heard from it for {silent_s:.3g} s")
        self.deliver_logs()

    def _look_for_room(self, place: FarPlace, waited_s: float) -> None:
        """Says it where a host does not begin. Raises ConfigError where that is one of the first."""
        is_over = waited_s >= self._limits.start_timeout and not self._started
        if waited_s < _ROOM_S or (place.is_said and not is_over):
            return
        room = self._engine.room(place.index)
        text = f"{place.name.noun} {place.index} has not begun in {waited_s:.3g} s: "
        text += room or "its process is slow to start"
        if is_over:
            raise ConfigError(f"{text}. {self._engine.remedy if room else _SLOW}")
        if room and self._started:
            self._warned.append((text, RuntimeWarning))
        elif room:
            say(text)
        place.is_said = True  # a head that is asked again and again may be gone at one time, which nobody outlives

    def deliver_logs(self) -> None:
        """Hands over what has happened there; warnings last: filters may make errors of them."""
        self._hand_over(self._warned)
        while (one := _next(self._warned)) is not None:
            text, category = one
            warnings.warn(text, category, stacklevel=caller_stacklevel())

    def _hand_over(self, warned: deque[tuple[str, type[Warning]]]) -> None:
        while (one := _next(self._reports)) is not None:
            place, report = one
            warned.extend((f"{place}: {text}", category) for text, category in report.warned)
            for text in report.said:
                say(f"{place}: {text}")
            hand_over(report.logs, report.lost_logs, {f"{place.name.noun}_index": place.index, "host": place.where})

    def processes(self) -> list[tuple[int | None, Usage]]:
        """None of this machine's."""
        return [(None, Usage())] * len(self._places)

    def never_replaces(self) -> None:
        """Does nothing: plans are the owner's."""

    # ---- losses

    def _lose(
        self, place: FarPlace, reason: str, *, is_final: bool = False, cause: BaseException | None = None
    ) -> None:
        """Gives up a host; begins to start another where that may help, and raises otherwise, once all are closed."""
        with self.whole():
            self._require_open()
            place.starts, place.is_met, place.left = True, False, None
            place.host.kill()
            for ticket in [ticket for ticket, one in [*self._owed.items()] if one[0] is place]:
                del self._owed[ticket]
            error = NodeLost(place.name, place.where, reason)
            error.__cause__ = cause
            successor = self._hooks.on_lost(place.index, reason) if self._started else None
            if successor is None or is_final or len(self.reachable) < self._engine.min_nodes:
                raise error
            self._is_answered(place, Lost(place.index, error))
            self._places[place.index] = new = self._launch(place.index, successor.content)
            new.where = place.where

    # ---- closing

    def close(self, limits: CloseLimits) -> list[tuple[int, Any]]:
        cuts = deque[tuple[str, type[Warning]]]()
        try:
            with Uninterrupted():
                is_first = self._begins_to_close()
            if is_first:
                self._close_residents(limits, cuts)
        finally:  # also when a Ctrl-C ends the wait
            if self._is_closer() and not self._ended:
                self._engine.close()
                self._ended = True  # last: another close ends what a Ctrl-C has left of this
                atexit.unregister(self._at_exit)
            if not limits.terminates:
                warn_of_cuts([text for text, _ in cuts])
        return []

    def _close_residents(self, limits: CloseLimits, cuts: deque[tuple[str, type[Warning]]]) -> None:
        """Closes all at once, and awaits what they say of that. Who is lost is left alone."""
        way_s = _LAST_WORDS_S if limits.terminates else _ON_ITS_WAY_S
        until = time.monotonic() + limits.busy_s + min(limits.part_s, limits.call_s) + way_s
        pinged_at, order = time.monotonic(), [_HEADS[Close], *self.sealed(limits)]
        there = [place for place in self._places if place.left is not None]
        closing = {place.host.ask(order, beside=True): place for place in there}
        owed = {ticket: place for ticket, (place, _) in [*self._owed.items()] if place in there} | closing
        while owed and time.monotonic() < until:
            Uninterrupted.let_through()
            if not closing:
                until = min(until, time.monotonic() + _LAST_WORDS_S)
            elif time.monotonic() - pinged_at > _PING_S:  # what they say meanwhile comes with the answers
                pinged_at = time.monotonic()
                owed |= {place.host.ask(_PING, beside=True): place for place in closing.values()}
            for ticket, data in self._come(owed, SLICE_S):
                place, _ = owed.pop(ticket), closing.pop(ticket, None)
                if not isinstance(data, HostGone):
                    self._said(place, data)
            self._hand_over(cuts)
        cuts.extend(
            (f"{place} did not close its envs in time, and was ended", RuntimeWarning) for place in closing.values()
        )


def _next(queue: deque[Any]) -> Any:
    """The first of a queue, which other threads may take from; None where there is none."""
    try:
        return queue.popleft()
    except IndexError:
        return None
