"""A pool of worker processes that knows no env: places with one resident each.

    owner    post, Round.ask ──▶ [ channel ] ──▶ Resident.take, Resident.answer     one worker, one resident
             Round.wait      ◀── [ channel ] ◀── the answer, or what has become of the worker
             files           ◀─────────────────▶ files       whatever else they share is the owner's

The owner hands in where the resident's class is, a plan for each place, files, the nouns of its errors, and hooks. The
pool starts the workers, addresses them, watches them, replaces and closes them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from muster._core import HOST_BYTES, Doing
from muster.errors import CannotTravel, UnknownMessage, UsageError, WorkerError, WorkerTimeout
from muster.pickling.interrupts import Uninterrupted
from muster.pool.about import about_pool
from muster.pool.closing import ClosingPlaces, log_failures, warn_of_cuts
from muster.pool.deaths import NOUNS, Nouns
from muster.pool.launcher_client import LauncherLost, LauncherOfPool, fork_worker, standard_fds, surroundings_of
from muster.pool.limits import AT_ONCE, CloseLimits, Limit, Limits
from muster.pool.logs import LogInbox, hand_over, hand_over_waits
from muster.pool.messages import (
    Answer,
    Build,
    Close,
    Failed,
    Post,
    Progress,
    Question,
    Ready,
    Sealed,
    Unpacking,
)
from muster.pool.notices import StartNotice
from muster.pool.place import Inheritance, Place, Plan, Started, Starting, launch, readable_places, turns_of
from muster.pool.resources import MemoryPlan, Usage, naming_limits
from muster.pool.script import refuse_while_script_runs
from muster.pool.set_up import Processes, SetUp
from muster.pool.verbs import SLICE_S, Answered, BasePool, Hooks, Lost, Successor
from muster.pool.watch import activity_in
from muster.pool.worker_process import Poller, close_own, last_words, open_files
from muster.transport.big_arrays import BigArrays
from muster.transport.channel import Channel, ChannelClosed, frame
from muster.transport.mail import dumps

# Each stands before its content, which was sealed once for several places.
_HEADS = {kind: frame(dumps(kind())) for kind in (Post, Question)}

# What costs a worker its place: its report, what it has sent and nobody can rebuild, or its end.
_ENDED = "ended"
_Ending = Failed | CannotTravel | str


class Pool(BasePool[Place]):
    """Workers in processes.

    resident: ``"module:Class"`` of a `Resident`.  plans: one for each place.
    files: fds by name, which all workers get; they stay the owner's.  reported: called with what residents report.
    take_logs: see `LogInbox`; of workers that are apart only `hand_over_waits`.  about: see `about_pool`.
    """

    def __init__(
        self,
        resident: str,
        plans: Sequence[Plan],
        processes: Processes,
        hooks: Hooks,
        limits: Limits = Limits(),  # noqa: B008  # frozen
        *,
        files: Mapping[str, int] | None = None,
        nouns: Nouns = NOUNS,
        reported: Callable[[Any], object] = lambda content: None,
        take_logs: Callable[[bytes, int], None] = hand_over,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(hooks, nouns, take_logs)
        self._resident, self._options, self._limits, self._reported = resident, processes, limits, reported
        self.plans = plans
        self._files, self._of_pool = dict(files or {}), about
        self._take_logs = hand_over_waits if processes.are_apart else take_logs
        self._own_files: dict[str, int] = {}
        self._log_inbox: LogInbox | None = None
        self._starting = Starting(most=limits.max_concurrent_starts)
        self._started = False
        self._leaving: list[tuple[Place, ClosingPlaces[Place]]] = []
        self._polled, self._poller = list[Place](), Poller()

    # ---- starting

    def start(self, judge: MemoryPlan | None = None, meanwhile: Callable[[], None] | None = None) -> list[Any]:
        """Starts all workers; returns what their residents say of themselves. An error leaves nothing behind.

        judge: says when those after the first may build, and looks at what is left.  meanwhile: called while they do.
        Raises what building raised, for the first worker that failed, WorkerDied, WorkerTimeout, NotEnoughMemory.
        """
        try:
            self._starting.is_first_alone = judge is not None and not judge.has_room
            self._launch_all(is_judged=judge is not None)
            if judge is not None and self._starting.is_first_alone:
                self._await(lambda place: judge.others_begin or not place.starts, judge, 1)
                self._starting.is_first_alone = False
                self._let_build()
            if self._starting.most is not None:
                self._await(lambda place: not place.starts, judge)
            if meanwhile is not None:
                meanwhile()
            self._await(lambda place: not place.starts, judge)
            self._started = True
        except BaseException as error:
            self.close(AT_ONCE)
            with contextlib.suppress(OSError):
                self._end()  # once more: for what was begun while another thread closed the pool
            self._ends_halfway(error)
            raise
        return [place.facts for place in self._places]

    def _launch_all(self, *, is_judged: bool) -> None:
        refuse_while_script_runs()
        options, starting = self._options, self._starting
        self._notice, forks = StartNotice(self._nouns.starting), options.context == "fork"
        self._number(self.plans)
        starting.surroundings = surroundings_of(options, len(self.plans))
        set_up = None if forks else options.set_up or SetUp.of_this_process(options.init)
        pickles = [b"" if forks else dumps(plan.content) for plan in self.plans]
        with Uninterrupted(), standard_fds():
            starting.inheritance = None if forks else Inheritance([plan.fds for plan in self.plans])
            open_files(self._own_files, "arrays", "logs", "activity")
            starting.about = about_pool(self._of_pool, self._nouns, len(self.plans), self._files | self._own_files)
        os.ftruncate(self._own_files["activity"], max(1, len(self.plans)) * HOST_BYTES)
        self._log_inbox = LogInbox(self._own_files["logs"], self._take_logs)
        self.log_flag = self._log_inbox.flag
        starting.big_arrays = BigArrays(self._own_files["arrays"], [plan.big for plan in self.plans])
        starting.make_orders(self._resident, options, set_up, self.plans, pickles, is_judged=is_judged)
        if not forks and self.plans:
            with Uninterrupted():
                starting.launcher = LauncherOfPool(options)
        for index, plan in enumerate(self.plans):
            self._notice.check()
            with Uninterrupted():
                place = self._launch(index, plan.content)
                place.begins_to_build(self._limits.start_timeout)
                self._places.append(place)
                self._require_place(place)
        for place in self._places:
            place.send_order(*self._starting.order_of(place.index))
        self._let_build()

    def _launch(self, index: int, content: Any, why: str = "") -> Place:
        plan, starting = self.plans[index], self._starting
        name = self._nouns.name(index, plan.envs)
        settings = self._nouns.process_name(index), starting.surroundings[index], self._options.are_apart
        forks, launcher = self._options.context == "fork", starting.launcher
        if forks:
            inherited = content, self._options.init.function
            start: Callable[..., Started] = functools.partial(fork_worker, inherited, *settings)
        elif launcher is not None:
            start = functools.partial(launcher.start, *settings)
        else:  # another thread has closed the pool
            raise self._is_closed()
        activity = activity_in(self._own_files["activity"], index)
        activity.memory[:] = 0  # of the worker before
        activity.put(Doing.BUILDING)
        fds, count = {**self._files, **self._own_files}, len(self.plans)
        try:
            with naming_limits(f"{name}, of {count}, could not start"), standard_fds():
                process, channel = launch(name, index, fds, start, self._options, why)
        except LauncherLost:
            raise WorkerError(name, "could not start: the process that starts workers ends each time") from None
        to = Channel(channel, functools.partial(self._watch_sending, index), shares_main=forks)
        return Place(index, name, plan.parts, process, to, activity, self._nouns)

    def _let_build(self) -> None:
        """Has the workers build whose turn has come."""
        for place in self._starting.next_to_build(self._places, self._leaves):
            place.begins_to_build(self._limits.start_timeout)
            place.send_at_start(Build())

    def _leaves(self, index: int) -> bool:
        """True if the resident that was in a place before has not ended."""
        return any(old.index == index for old, _ in self._leaving)

    def _await(self, is_done: Callable[[Place], bool], judge: MemoryPlan | None, count: int | None = None) -> None:
        """Waits until the first `count` places, or all, are done with a part of their start; raises once one fails."""
        while owed := [place for place in self._places[:count] if not is_done(place)]:
            heard = self._listen(min(SLICE_S, *(place.start_left_s() for place in owed)))
            self._starting.raise_failed(self._places)
            self._notice.check(lambda: turns_of(self._places))
            self.deliver_logs()
            if judge is not None:
                judge.look(self._starting.reports)
            if heard:
                continue
            late = next((place for place in owed if place.failed is None and place.start_left_s() == 0.0), None)
            if late is not None:
                with self.whole():
                    self._lose(late, late.too_slow(turns_of(self._places)))
            self._look(owed)

    # ---- messages

    def sealed(self, message: object) -> bytes:
        return message if isinstance(message, Sealed) else dumps(message, shares_main=self._options.context == "fork")

    def _send(self, place: Place, kind: type[Post | Question], content: bytes, limit: Limit | None) -> None:
        if place.starts:
            place.outbox.append((kind, content))
            return
        self._hooks.ring(place.index)  # before the bytes: a worker that is awake looks for them
        try:
            place.channel.send_frames(frame(content, _HEADS[kind]), None if limit is None else limit.s)
        except ChannelClosed:
            if self._places[place.index] is place:
                self._lose(place, place.died(self._doing(place)))
        except TimeoutError:
            if limit is None:  # another thread sends to this place, or this call is made by a signal handler
                raise UsageError(f"{place.name} is just being sent another message") from None
            # `_doing` is evaluated first: the signal that asks for the worker's stack may change what it does.
            self._lose(place, place.timed_out(self._doing(place), limit.words, limit.s))

    # ---- listening

    def _listen(self, timeout_s: float) -> bool:
        if self._polled != self._places:
            self._polled, self._poller = list(self._places), Poller()
            for place in (one for one in self._polled if one.failed is None):
                self._poller.add(place.channel.fileno(), (place, False))
                self._poller.add(place.process.fileno(), (place, True))
        ready = self._poller.ready(timeout_s)
        self._require_open()
        if not ready:  # a Ctrl-C in the wait closes nothing
            return False
        self._hear_all(ready)
        return True

    def _hear_all(self, places: Sequence[tuple[Place, bool]]) -> None:
        """Takes what workers have sent, each with whether it had ended before that: none is still on its way then."""
        with self.whole():
            said = [(place, self._hear(place, has_ended)) for place, has_ended in places if place.failed is None]
            for place, ending in said:  # the same one twice where its channel and its process have ended
                is_here = self._places[place.index] is place and place.failed is None
                if is_here and (ending or (place.outbox and not place.starts)):
                    self._settle(place, ending)
            if self._starting.in_turns:
                self._let_build()

    def _hear(self, place: Place, has_ended: bool) -> _Ending | None:
        """Takes the messages of one worker; returns what costs it its place, if anything."""
        failed: _Ending | None = None
        try:
            while failed is None and self._places[place.index] is place:
                failed = self._hear_one(place, place.heard())
                if not (has_ended or place.channel.holds_more):  # a poll reports what comes later
                    break
        except CannotTravel as error:  # so that nobody knows what it has said
            failed = error
        except ChannelClosed:
            has_ended = True
        except TimeoutError:
            pass
        return failed or (_ENDED if has_ended else None)

    def _settle(self, place: Place, ending: _Ending | None) -> None:
        """Sends a worker that is ready what has waited for that, or has another take its place."""
        while ending is None and place.outbox and self._places[place.index] is place:
            self._send(place, *place.outbox.popleft(), None if place.asked is None else place.asked.limit)
        if isinstance(ending, Failed):
            self._lose(place, self._hooks.raised(place.index, ending))
        elif ending is not None:
            self._lose(place, ending if isinstance(ending, CannotTravel) else place.died(self._doing(place)))

    def _hear_one(self, place: Place, message: object) -> Failed | None:
        """Takes one message; returns it if it costs the worker its place."""
        match message:
            case Answer(content):
                self._is_answered(place, Answered(place.index, content))
            case Unpacking(done):
                place.is_unpacking = not done
            case Progress(content):
                self._reported(content)
                if place.starts:
                    self._starting.reports.append(content)
            case Ready(facts):
                place.is_ready(facts, private="memory_bytes" in (self._limits.recycle_after or ()))
            case Failed():
                return message
            case _:
                raise UnknownMessage(f"{place.name} has sent what no worker sends here: {message!r:.200}")
        return None

    # ---- watching

    def watch(self, waited_s: float) -> None:
        self._require_open()
        self._listen(0.0)
        for place in list(self._places):
            if place.starts:
                if place.start_left_s() == 0.0:
                    with self.whole():
                        self._lose(place, place.too_slow(turns_of(self._places)))
            elif (limit := place.asked and place.asked.limit) and (elapsed_s := place.owes_since()) > limit.s:
                self.lose(place.index, limit.words, elapsed_s)
        if self._leaving:
            with self.whole():
                self._let_leave()
        self.deliver_logs()
        self._look(self._places)

    def lose(self, place: int, limit: str, elapsed_s: float) -> None:
        """Ends a worker that hangs, for its owner. limit: the limit in words.  elapsed_s: its time so far."""
        hanging = self._open_place(place)
        with self.whole():
            # `_doing` is evaluated first: the signal that asks for the worker's stack may change what it does.
            self._lose(hanging, hanging.timed_out(self._doing(hanging), limit, elapsed_s))

    def deliver_logs(self) -> None:
        if self._log_inbox is not None:
            self._log_inbox.deliver()

    def _watch_sending(self, index: int, waited_s: float) -> None:
        """Looks at the workers while a message to one waits because that has not read the one before.

        Takes meanwhile what that one sends: it may not read before. Raises ChannelClosed where it has ended, and what
        the end of another closes the pool with.
        """
        self._require_open()
        Uninterrupted.let_through()
        place = self._places[index]
        for one in list(self._places):
            if (ended := one.process.has_ended()) or one is place:
                self._hear_all([(one, ended and one is not place)])
        if self._places[index] is not place or place.process.has_ended():
            raise ChannelClosed
        self.deliver_logs()
        self._look(self._places)

    def _hint(self, place: Place) -> str:
        shown = f" To look at all workers: muster top {os.getpid()}." if self._of_pool else ""
        if not place.starts:
            return self._nouns.patience + shown
        limit = self._nouns.start_limit(self._limits.start_timeout)
        until = f" It may go on until {limit}." if self._nouns.start_timeout else ""
        return until + turns_of(self._places) + shown + place.rebuilding

    def _doing(self, place: Place) -> str:
        return place.building if place.starts else super()._doing(place)

    def processes(self) -> list[tuple[int | None, Usage]]:
        return [(None if one.process.has_ended() else one.process.pid, one.usage_at_start) for one in [*self._places]]

    def ready_at(self, place: int) -> float | None:
        """`watched_s` of the moment at which the worker in a place was ready; None while it starts."""
        return None if (one := self._places[place]).starts else one.ready_at

    # ---- replacing

    def replace(self, place: int, reason: str, successor: Successor, gently: CloseLimits) -> None:
        """Has another worker take a place. It builds once the old resident has closed within `gently`; see `watch`."""
        old = self._open_place(place)
        with self.whole():
            closing = self._closing([old], gently, lambda _: 0)  # its answer is this replacement
            closing.ask()
            self._leaving.append((old, closing))
            self._replace(old, reason, successor, WorkerError(old.name, f"was replaced: {reason}"))

    def _let_leave(self, slice_s: float = 0.0) -> None:
        """Looks at residents that close since others take their places, which build once these have ended."""
        ended = [one for one in self._leaving if one[1].look(slice_s)]
        self._leaving[:] = [one for one in self._leaving if one not in ended]
        for old, closing in ended:
            old.retire()
            log_failures(old.name, closing.said.get(old.index))
        self._let_build()
        warn_of_cuts([cut for _, closing in ended for cut in closing.cuts])  # last: a warning may be an exception

    def _lose(self, place: Place, error: BaseException) -> None:
        """Replaces a worker that cannot be used any more; where the owner has no successor, raises `error`.

        Only called within `whole`, which then closes the pool.
        """
        self._require_open()
        if self._started and not isinstance(error, Exception):
            raise error
        before = f" (while {self._nouns.worker} {place.index} was replaced, after: {place.replaces})"
        reason = f"{error}{before if place.starts and place.replaces else ''}"
        # Killed before the owner hears of it: a worker that only hung could still write to what they share.
        place.retire()
        if self._started:
            successor = self._hooks.on_lost(place.index, reason)
        else:
            is_tried = place.is_tried_again(error, self._limits.restarts)
            successor = Successor(self.plans[place.index].content) if is_tried else None
        if successor is not None and isinstance(error, Exception):
            self._replace(place, (place.replaces if place.starts else "") or reason, successor, error)
        elif self._started:
            raise error
        else:
            self._starting.fails(place, error)
            self._polled = []

    def _replace(self, old: Place, reason: str, successor: Successor, error: Exception) -> None:
        """Starts a successor. reason: why, also where that is lost as well.  error: for an answer that is owed."""
        index = old.index
        self._is_answered(old, Lost(index, error))
        self._require_open()
        place = self._places[index] = self._launch(index, successor.content, reason)
        self._require_place(place)
        place.replaces, place.tries, waits = reason, old.tries + 1, self._starting.in_turns or self._leaves(index)
        place.begins_to_build(self._limits.start_timeout)
        place.outbox.extend((Post, self.sealed(message)) for message in successor.messages)
        content = b"" if self._options.context == "fork" else dumps(successor.content)
        with contextlib.suppress(WorkerTimeout):  # the watch over its start reports that, as it does all losses
            place.send_order(*self._starting.order_of(index, content, self.plans[index].next_info(), waits=waits))
            self._let_build()

    def _require_place(self, place: Place) -> None:
        """Raises ClosedError where another thread has closed the pool, and did not know of this worker."""
        if self.closed:
            place.retire()
            self._require_open()

    def never_replaces(self) -> None:
        self._starting.never_again()

    # ---- closing

    def close(self, limits: CloseLimits, meanwhile: Callable[[], bool] | None = None) -> list[tuple[int, Any]]:
        """As `BasePool.close`. meanwhile: called once all are asked to close; False ends the wait."""
        try:
            with Uninterrupted():
                is_first = self._begins_to_close()
            if not is_first:
                return []
            closing = self._closing([] if limits.terminates else self._places, limits, self._hooks.pending)
            closing.ask()
            ends_at = time.monotonic() + limits.call_s
            if meanwhile is None or meanwhile():
                closing.wait()
                leaving = [] if limits.terminates else self._leaving
                while leaving and time.monotonic() < ends_at:
                    self._let_leave(SLICE_S)
                closing.cuts += [f"{old.name} was killed: its close did not end" for old, _ in leaving]
        finally:  # also when Ctrl-C ends the wait
            if self._is_closer():
                self._end()
        warn_of_cuts(closing.cuts)
        return sorted(closing.said.items())

    def _closing(
        self, places: Sequence[Place], limits: CloseLimits, pending: Callable[[int], int]
    ) -> ClosingPlaces[Place]:
        message = frame(dumps(Close()))

        def owed(index: int) -> int:
            # What has waited for its start is not sent any more.
            return 0 if self._places[index].outbox else pending(index)

        def ask(place: Place) -> None:
            self._hooks.ring(place.index)
            place.channel.send_frames(message, 0.0)

        return ClosingPlaces(
            *(places, limits),
            ask=ask,
            listen=readable_places,
            doing=self._doing,
            stacks=lambda places: last_words([place.process for place in places]),
            pending=owed,
            on_slice=self.deliver_logs,
        )

    def _end(self) -> None:
        """Kills the workers that still run, and releases their fds, the launcher and the big arrays."""
        places = [*self._places, *(old for old, _ in self._leaving)]
        kills, retires = [one.process.kill for one in places], [one.retire for one in places]
        raised: BaseException | None = None
        with Uninterrupted():
            for step in (*kills, *retires, self._let_go):
                try:
                    step()
                except BaseException as error:  # raised once all is done
                    raised = error
        if raised is not None:
            raise raised

    def _let_go(self) -> None:
        starting, self._starting = self._starting, Starting()
        starting.release()
        if self._log_inbox is not None:
            self._log_inbox.deliver(at_the_end=True)
        self._log_inbox = None
        fds, self._own_files = self._own_files, {}
        close_own(*fds.values())
        self._unique_indices.release()
