"""One place of a pool as its owner sees it: the worker process that is in it, what that owes, and how it is started."""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import secrets
import socket
import sys
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from muster.errors import CannotTravel, EnvError, MusterError, WorkerDied, WorkerError, WorkerName, WorkerTimeout
from muster.introspection import caller_stacklevel, type_name
from muster.pickling.shared_pickling import tracker_fd
from muster.pool.deaths import NOUNS, Nouns, is_from_outside, likely_cause
from muster.pool.environment import Surroundings
from muster.pool.launcher_client import LauncherOfPool
from muster.pool.limits import Limit
from muster.pool.messages import Inherited, Message, Post, Question, StartOrder, message_of
from muster.pool.output import INHERIT, head_log, open_output
from muster.pool.resources import Usage, usage_of
from muster.pool.set_up import Processes
from muster.pool.watch import Activity
from muster.pool.worker_process import (
    WorkerFiles,
    WorkerProcess,
    close_own,
    disown,
    last_words,
    own,
    python_stacks,
    readable,
    stream_fd,
)
from muster.transport.big_arrays import BigArrays, memfd
from muster.transport.channel import Channel, ChannelClosed, watched_s
from muster.worker_info import SEED_BITS, WorkerInfo

# A worker's pid and pidfd, and the pipe that its exit code will come by; None where it is a child of this process.
Started = tuple[int, int, int | None]

WINDOW_S = 60.0
# How long those before the one that fails first may take to fail as well: most often all do, and env 0 is named.
_OTHERS_FAIL_S = 0.5


@dataclass
class Plan:
    """The plan of one place.

    content: what its resident is built from; sent as a pickle, and under fork inherited as it is.
    info: what the worker sees of itself; the pool adds the seed, unless its owner has.
    envs: those that messages name.  parts: the number of those that the resident closes one after the other.
    big, fds: the memory of big arrays, and the file descriptors, that belong to the content's pickle.
    """

    content: Any
    info: WorkerInfo
    envs: range = range(0)
    parts: int = 1
    big: list[pickle.PickleBuffer] = field(default_factory=list)
    fds: list[int] = field(default_factory=list)

    def next_info(self) -> WorkerInfo:
        """The info of the next worker in this place.

        It draws other random numbers than its predecessor, which might end it in the same way.
        """
        info = self.info
        if info.seed is None:
            return replace(info, seed=secrets.randbits(SEED_BITS))
        self.seed(info.seed + 1)
        return info

    def seed(self, seed: int | None) -> None:
        """Has the next worker in this place derive its global generators from `seed`; None: from one of the pool's."""
        self.info = replace(self.info, seed=None if seed is None else seed % 2**SEED_BITS)


@dataclass(eq=False)
class Asked:
    """A question that a place owes an answer to.

    round: of the book, which the answer goes to.  words: for what the place does.  at: `watched_s` of the question.
    since: time.monotonic() once it is sent; None before, while the words say what is about to be done.
    limit: of the answer; a thread's has no effect: nobody can end a thread.
    """

    round: Any
    words: str
    at: float
    limit: Limit | None
    since: float | None = None

    def __str__(self) -> str:
        return self.words if self.since is None else f"{self.words} for {time.monotonic() - self.since:.3g} s"


class Owing:
    """The worker in a place as its owner sees it: its debts, and its activity.

    parts: see `Plan`.  starts: whether its worker is not ready yet.  cut_verb: what is done to one that does not end.
    """

    index: int
    name: WorkerName
    parts: int
    activity: Activity
    asked: Asked | None = None
    forgotten = 0  # answers that will come and are to be dropped
    starts: Any = False
    cut_verb = "killed"

    def has_ended(self) -> bool:
        """True once its worker has ended."""
        raise NotImplementedError

    def heard(self) -> object:
        """The next message that has come as a whole, or None. Raises TimeoutError, ChannelClosed, CannotTravel."""
        raise NotImplementedError

    def hang_up(self) -> None:
        """Hears no more of it."""

    def cut(self) -> None:
        """Ends a worker that does not end by itself."""
        raise NotImplementedError

    def stack_lines(self) -> list[str]:
        """The Python stack of the thread that works there, most recent call first; empty where it cannot be read."""
        raise NotImplementedError


@dataclass(eq=False)
class Place(Owing):
    """The worker in one place, the channel to it, and what it owes.

    starting_until: the deadline of a worker that is still starting; None once it is ready.
    awaits_turn: whether it has not begun to build its resident, since others do; its time has not begun then.
    replaces: why it was started, where another was here before.  outbox: messages that wait until it is ready.
    facts: what it has said at its start.  failed: why the start of all fails.  tries: how many workers there were here.
    """

    index: int
    name: WorkerName
    parts: int
    process: WorkerProcess
    channel: Channel
    activity: Activity
    nouns: Nouns = NOUNS
    replaces: str = ""
    starting_until: float | None = None
    start_limit_s: float = 0.0
    awaits_turn: bool = False
    outbox: deque[tuple[type[Post | Question], bytes]] = field(default_factory=deque)
    is_unpacking: bool = False
    launched_at: float = field(default_factory=time.monotonic)
    ready_at: float = 0.0
    usage_at_start: Usage = field(default_factory=Usage)
    facts: Any = None
    failed: BaseException | None = None
    tries: int = 1

    @property
    def starts(self) -> bool:
        return self.starting_until is not None

    def has_ended(self) -> bool:
        return self.process.has_ended()

    def cut(self) -> None:
        self.process.kill()

    @property
    def building(self) -> str:
        """The activity, in words, of a worker that is still starting."""
        return f"{self.nouns.building} for {time.monotonic() - self.launched_at:.3g} s"

    def begins_to_build(self, limit_s: float) -> None:
        """Notes that its time for that begins."""
        self.awaits_turn, self.start_limit_s, self.launched_at = False, limit_s, time.monotonic()
        self.starting_until = watched_s() + limit_s

    def is_ready(self, facts: Any, *, private: bool) -> None:
        """Notes that its resident is built. private: see `usage_of`."""
        self.facts, self.starting_until, self.ready_at = facts, None, watched_s()
        self.usage_at_start = usage_of(self.process.pid, private=private)

    def is_tried_again(self, error: BaseException, most: int | None) -> bool:
        """True if another worker is to begin after `error` at the start of all, `most` times; a warning says so."""
        never = isinstance(error, MusterError) and not isinstance(error, (EnvError, WorkerError))
        if self.tries > (most or 0) or never or not isinstance(error, Exception):
            return False
        said = f"{self.name} has failed at its start, and is started again ({self.tries} of at most {most} times)"
        warnings.warn(f"{said}: {error}", RuntimeWarning, stacklevel=caller_stacklevel())
        return True

    def heard(self) -> object:
        try:
            return self.channel.recv(0.0)
        except (TimeoutError, ChannelClosed):
            raise
        except Exception as error:
            what = f"{type_name(error)}: {message_of(error)}"
            raise CannotTravel(f"{self.name} has sent what cannot be rebuilt in its owner: {what}") from error

    def owes_since(self) -> float:
        """Seconds for which nothing has come of the answer that it owes; 0 where it owes none."""
        if self.asked is None:
            return 0.0
        return watched_s() - max(self.asked.at, self.ready_at, self.channel.heard_at)

    def start_left_s(self) -> float:
        """Seconds that its worker, which is still starting, has left; not below 0."""
        assert self.starting_until is not None
        return math.inf if self.awaits_turn else max(0.0, self.starting_until - watched_s())

    def died(self, doing: str) -> WorkerDied:
        """The error that reports the worker's death. doing: its last activity, in words."""
        self.process.wait(1.0)
        exit_code = self.process.exit_code
        dying = self.nouns.dying[self.index] if self.nouns.dying and not is_from_outside(exit_code) else ""
        return WorkerDied(self.name, doing, exit_code, likely_cause(exit_code), self.process.tail(), hint=dying)

    def timed_out(self, doing: str, limit: str, elapsed_s: float, more: str = "") -> WorkerTimeout:
        """The error that reports that the worker hangs, with its Python stack. Does not kill the worker."""
        [words] = last_words([self.process])
        return WorkerTimeout(self.name, doing, limit, elapsed_s, words, self.rebuilding + more)

    def too_slow(self, more: str = "") -> WorkerTimeout:
        """The error that reports that the worker has not built its resident in time. more: a sentence."""
        building, limit_s = self.nouns.building, self.start_limit_s
        return self.timed_out(building, f"{self.nouns.start_limit(limit_s)}, {building}", limit_s, more)

    def send_order(self, order: StartOrder, fds: Sequence[int]) -> None:
        """Sends its order to a worker that was launched. Raises WorkerTimeout."""
        self.send_at_start(order, fds)
        self.awaits_turn = order.awaits_build

    def send_at_start(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Sends a worker that starts a message. Raises WorkerTimeout."""
        with contextlib.suppress(ChannelClosed):  # the worker has died; the wait for its answer will report that
            try:
                self.channel.send(message, self.start_left_s(), fds)
            except TimeoutError:
                raise self.too_slow() from None

    def stack_lines(self) -> list[str]:
        [stacks] = python_stacks([self.process])
        return stacks.rpartition("most recent call first):\n")[2].splitlines()

    @property
    def rebuilding(self) -> str:
        """The sentence about a worker that still rebuilds what was sent to it; empty for another."""
        return self.nouns.rebuilding if self.is_unpacking else ""

    def retire(self) -> None:
        """Kills the worker, and closes the fds that this process holds for it."""
        self.process.kill()
        self.process.wait(5.0)
        self.hang_up()
        self.process.release()

    def hang_up(self) -> None:
        if (fd := self.channel.fileno()) >= 0:
            disown(fd)
            self.channel.close()


def turns_of(places: Sequence[Place]) -> str:
    """The sentence about workers that wait for others to build; empty where none does."""
    waiting, done = sum(place.awaits_turn for place in places), sum(not place.starts for place in places)
    return f" {done} of {len(places)} are done, and {waiting} wait for their turn." if waiting else ""


def readable_places(places: Sequence[Place], timeout_s: float) -> list[Place]:
    """Those of `places` that have said something, or ended, within the time."""
    by_fd = {fd: place for place in places for fd in (place.process.fileno(), place.channel.fileno())}
    return [*dict.fromkeys(by_fd[fd] for fd in readable(by_fd, timeout_s))]


class Inheritance:
    """The things that workers receive as processes that multiprocessing spawns do: fds of queues and pipes, and so on.

    fds: for each worker those that its recipes need, see `recipe.pack`.

    The fds are copied, so that a replacement of a worker can receive them, too; until then nobody who reads from one of
    these pipes hears that all other ends are closed.
    """

    def __init__(self, fds: Sequence[Sequence[int]]) -> None:
        self._copies: dict[int, int] = {}
        for fd in {fd for of_worker in fds for fd in of_worker}:
            self._copies[fd] = os.dup(fd)
            own(self._copies[fd])
        self._fds = [[self._copies[fd] for fd in of_worker] for of_worker in fds]

    def of(self, host: int) -> tuple[Inherited, list[int]]:
        """The part of worker `host`, and the fds to send with it."""
        fds, tracker, authkey = self._fds[host], tracker_fd(), None
        if "multiprocessing.managers" in sys.modules:
            authkey = bytes(sys.modules["multiprocessing.process"].current_process().authkey)
        return Inherited(len(fds), tracker is not None, authkey), fds if tracker is None else [*fds, tracker]

    def close(self) -> None:
        """Closes the copies of fds; no further worker can be started."""
        close_own(*self._copies.values())
        self._copies.clear()


@dataclass
class Starting:
    """The things that only the start of a pool needs, and that of its replacements.

    surroundings: by place.  reports: of the first worker's building.  fails_at: when the start fails at the latest.
    about: the fd of the pool's about file.  most: workers that may build at the same time, None for all.
    is_first_alone: whether the others still wait for what the memory is that the first one takes.
    """

    most: int | None = None
    is_first_alone: bool = False
    orders: list[StartOrder] = field(default_factory=list)
    surroundings: Sequence[Surroundings] = ()
    launcher: LauncherOfPool | None = None
    inheritance: Inheritance | None = None
    big_arrays: BigArrays | None = None
    reports: list[Any] = field(default_factory=list)
    fails_at: float = math.inf
    about: int | None = None

    def fails(self, place: Place, error: BaseException) -> None:
        """Notes that a place has failed for good."""
        place.failed, self.fails_at = error, min(self.fails_at, watched_s() + _OTHERS_FAIL_S)

    def raise_failed(self, places: Sequence[Place]) -> None:
        """Raises for the first place that has failed, once those before it are ready, or have had their time."""
        starting = [place for place in places if place.starts]
        errors = [place.failed for place in starting if place.failed is not None]
        if errors and (errors[0] is starting[0].failed or watched_s() > self.fails_at):
            raise errors[0]

    @property
    def in_turns(self) -> bool:
        """True if workers begin to build once they are sent `Build`."""
        return self.is_first_alone or self.most is not None

    def make_orders(
        self,
        resident: str,
        options: Processes,
        set_up: Any,
        plans: Sequence[Plan],
        pickles: Sequence[bytes],
        *,
        is_judged: bool,
    ) -> None:
        """Makes the order of each place. Parts are those of `StartOrder`; is_judged: whether the first one is."""
        for index, (plan, data) in enumerate(zip(plans, pickles, strict=True)):
            order = StartOrder(
                resident,
                plan.next_info(),
                options.threads,
                plan=data,
                set_up=set_up,
                big_arrays=() if self.big_arrays is None else self.big_arrays.places[index],
                is_judged=is_judged and index == 0,
                awaits_build=self.in_turns,
                place=index,
                output=options.output,
            )
            self.orders.append(order)

    def next_to_build(self, places: Sequence[Place], is_held: Callable[[int], bool]) -> list[Place]:
        """The places where workers may begin to build now, in their order. is_held: those that must wait."""
        room = (self.most or len(places)) - sum(one.starts and not one.awaits_turn for one in places)
        waiting = [one for one in places if one.awaits_turn and not is_held(one.index)]
        return [one for one in waiting[: max(0, room)] if one.index == 0 or not self.is_first_alone]

    def order_of(
        self, index: int, content: bytes | None = None, info: WorkerInfo | None = None, *, waits: bool = False
    ) -> tuple[StartOrder, list[int]]:
        """The order for a place, and the fds to send with it. content, info: of who comes after its first worker.

        waits: whether that one awaits `Build`.
        """
        order = self.orders[index]
        if content is not None and info is not None:
            order = replace(order, plan=content, info=info, is_judged=False, awaits_build=waits)
        if self.inheritance is None:
            return order, []
        inherited, fds = self.inheritance.of(index)
        return replace(order, inherited=inherited), fds

    def never_again(self) -> None:
        """Releases what only replacements would need."""
        if self.inheritance is not None:
            self.inheritance.close()
        if self.big_arrays is not None:
            self.big_arrays.drop_pickles()

    def release(self) -> None:
        """Releases all of it."""
        if self.launcher is not None:
            self.launcher.release()
        if self.inheritance is not None:
            self.inheritance.close()
        if self.big_arrays is not None:
            self.big_arrays.close()
        close_own(self.about)


def launch(
    name: WorkerName,
    index: int,
    shared_fds: Mapping[str, int],
    start: Callable[[Mapping[str, int]], Started],
    options: Processes,
    why: str,
) -> tuple[WorkerProcess, socket.socket]:
    """Starts a worker by `start`, which receives its fds by name; returns its process, and our end of the channel.

    why: for the head of its part of its log; empty for the first one.  Raises OSError, LauncherLost.
    """
    with contextlib.ExitStack() as theirs_only, contextlib.ExitStack() as ours_on_failure:
        ours, theirs = socket.socketpair()
        own(ours.fileno())
        ours_on_failure.callback(lambda: close_own(ours.detach()))
        theirs_only.enter_context(theirs)
        stderr_read, stderr_write = os.pipe()
        ours_on_failure.callback(os.close, stderr_read)
        theirs_only.callback(os.close, stderr_write)
        tail = memfd(f"tail-{index}")
        ours_on_failure.callback(os.close, tail)
        stacks = memfd(f"stacks-{index}")
        ours_on_failure.callback(os.close, stacks)
        caller = os.pidfd_open(os.getpid())
        theirs_only.callback(os.close, caller)
        stdout, stderr = stream_fd(sys.__stdout__, 1), stream_fd(sys.__stderr__, 2)
        log: int | None = None
        if options.output != INHERIT:
            log = stdout = stderr = open_output(options.output, f"{name.noun}-{index}")
            ours_on_failure.callback(os.close, log)
        pid, pidfd, status = start(
            {
                **shared_fds,
                "channel": theirs.fileno(),
                "tail": tail,
                "stacks": stacks,
                "stderr_read": stderr_read,
                "stderr_write": stderr_write,
                "stdout": stdout,
                "stderr": stderr,
                "caller": caller,
            }
        )
        ours_on_failure.pop_all()
    if log is not None:
        head_log(log, f"{name}, pid {pid}: {why or 'it starts'}")
    files = WorkerFiles(tail, stacks, stderr_read, log)
    return WorkerProcess(pid, pidfd, status, files, is_apart=options.are_apart), ours


class Budget:
    """How often the worker in each place may fail within `WINDOW_S`: more often, and replacing it does not help."""

    def __init__(self, max_restarts: int, nouns: Nouns) -> None:
        self._max_restarts, self._nouns = max_restarts, nouns
        self._recent: dict[tuple[int, str], deque[float]] = {}

    def spend(self, index: int, reason: str, of: str = "") -> None:
        """Counts a failure in a place, or of a part of it. Raises WorkerError where that was one too many."""
        now = time.monotonic()
        recent = self._recent.setdefault((index, of), deque())
        recent.append(now)
        while now - recent[0] > WINDOW_S:
            recent.popleft()
        if len(recent) > self._max_restarts:
            raise WorkerError(
                self._nouns.name(index),
                f"failed {len(recent)} times{of} within {WINDOW_S:.0f} s (max_restarts={self._max_restarts}), so "
                f"restarting does not help; {self._nouns.pool} closed. The last failure: {reason}",
            )
