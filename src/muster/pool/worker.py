"""The worker process in a place of a pool: builds its resident, then passes on the owner's messages to it."""

from __future__ import annotations

import errno
import faulthandler
import fcntl
import functools
import gc
import importlib
import logging
import os
import pickle
import random
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from muster._core import EXIT_FDS_CLOSED, EXIT_NO_THREADS, MARK, STACK_SIGNAL, Doing, kill_started, start_watchdog
from muster.errors import UnknownMessage
from muster.pickling.main_module import ABOUT_INIT, Init, MainModule, run_once
from muster.pickling.shared_pickling import use_tracker
from muster.pool.logs import LogForwarding
from muster.pool.messages import (
    Answer,
    Build,
    Close,
    Closed,
    Closing,
    Failed,
    Inherited,
    Message,
    Post,
    Progress,
    Question,
    Ready,
    StartOrder,
    Unpacking,
    expect,
)
from muster.pool.output import INHERIT, take_output
from muster.pool.resources import limit_reached
from muster.pool.set_up import about_script
from muster.pool.watch import Activity, activity_in
from muster.pool.worker_process import flush_streams, ignore_user_signals, kill_group
from muster.transport.big_arrays import map_big_arrays
from muster.transport.channel import Channel, ChannelClosed
from muster.transport.mail import dumps
from muster.worker_info import WorkerInfo, worker_info_context

_log = logging.getLogger("muster")

_FLUSH_S = 5.0


@dataclass
class Here:
    """The place of a pool, as the resident in it sees it.

    info: of this worker.  files: the owner's files, fds by name; empty in a thread.
    dumps: pickles for the owner; None where the owner is in this process.  send: sends the owner a message.
    forked: whether the worker is a fork of its owner.
    big_arrays, fds: what travels with the plan, while `Resident.unpack` runs.
    is_judged: whether the owner wants to hear of the resident's parts by `report`, while it is built. The beginning is
        reported already.
    activity: where the resident says what it is in.
    """

    info: WorkerInfo
    files: Mapping[str, int]
    dumps: Callable[[object], bytes] | None
    send: Callable[[Message], None]
    activity: Activity
    forked: bool = False
    is_judged: bool = False
    big_arrays: Sequence[memoryview] = ()
    fds: Sequence[int] = ()

    def report(self, content: Any = None) -> None:
        """Reports to the owner that a part is done: of the resident's building, or of what it was asked for."""
        self.send(Progress(content))


class Resident:
    """The thing in a place of a pool: built there from a plan, asked by the owner, closed at the end.

    An exception of `answer`, `take` or `between` costs the resident its place.
    """

    @classmethod
    def prepare(cls) -> None:
        """Prepares this process, before the caller's script or anything of the plan is there."""

    @classmethod
    def unpack(cls, data: bytes, here: Here, initialise: Callable[[Init], None]) -> Any:
        """The plan, from its pickle. initialise: calls `worker_init`, where that travels with the plan."""
        return pickle.loads(data)

    def __init__(self, plan: Any, here: Here) -> None:
        """Builds it."""

    def facts(self) -> Any:
        """The facts that the owner has to know, once it is built."""

    def answer(self, question: Any) -> Any:
        """The answer to a question."""
        raise UnknownMessage(f"{type(self).__name__} answers no question, got {question!r:.200}")

    def take(self, message: Any) -> None:
        """Takes a message that nobody answers."""
        raise UnknownMessage(f"{type(self).__name__} takes no message, got {message!r:.200}")

    def between(self) -> None:
        """Works until a message has come; called between two messages. Most wait in the pool, and do nothing here."""

    def close(self, closes: Callable[[int], None]) -> Any:
        """Closes it; returns what the owner has to know of that. closes: called with each part before it is closed."""


def main(fds: Mapping[str, int], inherited: tuple[Any, Init | None] | None = None) -> NoReturn:
    """Runs a worker on the fds that its owner has sent, then ends the process.

    inherited: its plan and `worker_init`, under fork; else they are sent.
    """
    os.environ[f"{MARK}{os.getpid()}"] = ""  # marks all processes that this one starts, see `kill_started`
    try:
        start_watchdog(
            fds["caller"],
            stderr_pipe=fds["stderr_read"],
            stderr_to=fds["stderr"],
            tail=fds["tail"],
            stacks=fds["stacks"],
        )
    except BlockingIOError:
        os._exit(EXIT_NO_THREADS)
    _take_over(fds)
    if inherited is not None:
        after_fork()
    else:
        MainModule.install()
    channel = Channel(socket.socket(fileno=fds["channel"]), shares_main=inherited is not None)
    exit_code, caller_gone = 0, False
    try:
        Worker(channel, fds, inherited).run()
        finish_queues()
    except (ChannelClosed, OSError) as error:
        cause = error.__cause__ if isinstance(error, ChannelClosed) else error
        if isinstance(cause, OSError) and cause.errno in (errno.EBADF, errno.ENOTSOCK):
            exit_code = EXIT_FDS_CLOSED
        elif not isinstance(error, ChannelClosed):
            raise
        else:
            caller_gone = True
    flush_streams()
    # The caller has closed the worker, or is gone. The watchdog does the same, but may not have noticed yet.
    kill_started(root=os.getpid(), session=os.getsid(0))
    if caller_gone:
        kill_group(os.getpid())  # together with what its threads start now: nobody may be left to reap those
    os._exit(exit_code)  # threads of the resident must not keep the process alive


def _take_over(fds: Mapping[str, int]) -> None:
    """Sets up stdin, stdout, stderr, the crash report and the signals of this process."""
    for fd in fds.values():
        os.set_inheritable(fd, False)
    # The watchdog writes to the same file.
    fcntl.fcntl(fds["tail"], fcntl.F_SETFL, os.O_APPEND)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (fds["stdout"], 1), (fds["stderr_write"], 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(fds["stdout"])
    os.close(fds["stderr_write"])
    faulthandler.enable(file=fds["tail"], all_threads=True)
    faulthandler.register(STACK_SIGNAL, file=fds["stacks"], all_threads=True)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ignore_user_signals()
    # The caller handles Ctrl-C. A handler that does nothing: processes of the resident would inherit an ignored signal.
    signal.signal(signal.SIGINT, lambda *_: None)


class Worker:
    """Builds the resident, then answers the owner's messages."""

    def __init__(
        self, channel: Channel, fds: Mapping[str, int], inherited: tuple[Any, Init | None] | None = None
    ) -> None:
        self._channel = channel
        self._fds = fds
        self._inherited = inherited
        self._dumps = functools.partial(dumps, shares_main=inherited is not None)
        self._about = ""  # what an exception is about that is not the resident's

    def run(self) -> None:
        """Runs until the owner closes it. Raises ChannelClosed."""
        forked = self._inherited is not None
        if forked:
            freeze_heap(collects=False)
        order = expect(StartOrder, self._channel.recv())
        if order.output != INHERIT:
            take_output(order.output)
        with worker_info_context(order.info):
            if forked:
                limit_threads(order.threads)  # a fork has none of the threads that torch's pool would wait for
            try:
                self._activity = activity_in(self._fds["activity"], order.place)
                resident = self._built(order)
                self._activity.put(Doing.NOTHING)
                self._channel.send(Ready(resident.facts()))
                limit_threads(order.threads)
                freeze_heap(collects=not forked)
                serve(resident, self._channel.recv, self._reply, lambda _: self._channel.recv())
            except ChannelClosed:
                raise
            except BaseException as error:
                self._channel.send(Failed.of(error, self._dumps, self._about or about_script(error, begins=True)))
                while True:  # until the owner kills this worker: one that ends itself would be reported as dead
                    self._channel.recv()

    def _built(self, order: StartOrder) -> Resident:
        module, _, name = order.resident.partition(":")
        kind: type[Resident] = getattr(importlib.import_module(module), name)
        kind.prepare()
        forked = self._inherited is not None
        here = Here(order.info, self._fds, self._dumps, self._channel.send, self._activity, forked, order.is_judged)
        plan = self._set_up(order, here, kind)
        if order.awaits_build:
            with self._activity.of(Doing.NOTHING):
                expect(Build, self._channel.recv())
        if order.is_judged:
            here.report(())
        return kind(plan, here)

    def _set_up(self, order: StartOrder, here: Here, kind: type[Resident]) -> Any:
        """Sets this process up as its owner is; returns the plan."""
        assert order.info.seed is not None
        levels = None if order.set_up is None else order.set_up.logging
        self._logs = LogForwarding(self._fds["logs"], order.info.worker_index, levels)
        if order.set_up is not None:
            self._about = order.set_up.init.words
            order.set_up.apply()
            self._about = ""
            self._logs.restore(drops_handlers=order.set_up.init.script is not None)
        seed_globals(order.info.seed)
        if self._inherited is None:
            return self._unpacked(order, here, kind)
        plan, init = self._inherited
        if init is not None:
            self._initialise(init)
        return plan

    def _unpacked(self, order: StartOrder, here: Here, kind: type[Resident]) -> Any:
        """The plan, rebuilt after `worker_init` was called, if that came with it."""
        assert order.inherited is not None
        self._channel.send(Unpacking(done=False))
        here.fds = take_over(order.inherited, self._channel.take_fds())
        here.big_arrays = map_big_arrays(self._fds["arrays"], order.big_arrays)
        plan = kind.unpack(order.plan, here, self._initialise)
        for fd in here.fds:  # the objects have copies
            os.close(fd)
        here.fds, here.big_arrays = (), ()
        self._channel.send(Unpacking(done=True))
        return plan

    def _initialise(self, init: Init) -> None:
        """Calls `worker_init`, which is no part of the plan that is being rebuilt."""
        self._channel.send(Unpacking(done=True))
        self._about = ABOUT_INIT
        run_once(init)
        self._about = ""
        self._logs.restore()
        self._channel.send(Unpacking(done=False))

    def _reply(self, message: Message) -> None:
        try:
            self._channel.send(message)
        except ChannelClosed:
            if not isinstance(message, Closing):  # a part has closed this process's fds: the others are still closed
                raise


def serve(
    resident: Resident,
    receive: Callable[[], object],
    reply: Callable[[Message], None],
    opened: Callable[[Any], Any] = lambda content: content,
) -> None:
    """Passes on messages until the resident is closed: the loop of a worker, which is a process or a thread.

    receive: waits for the next message.  reply: sends one to the owner.  opened: what a message has for the resident.
    """
    while True:
        resident.between()
        match message := receive():
            case Post(content):
                resident.take(opened(content))
            case Question(content):
                reply(Answer(resident.answer(opened(content))))
            case Close():
                return reply(Closed(resident.close(lambda i: reply(Closing(i)))))
            case _:  # the two ends do not agree on the protocol: whatever came next would be wrong
                raise UnknownMessage(f"a worker knows no such message: {message!r:.200}")


def seed_globals(seed: int | Sequence[int]) -> None:
    """Seeds the generators that code shares by mistake: `random`, `numpy.random`, and torch where it is loaded."""
    words = np.random.SeedSequence(seed).generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))  # noqa: NPY002  # the legacy generator is the one that is shared
    if torch := sys.modules.get("torch"):
        torch.manual_seed(int(words[2]))


def freeze_heap(*, collects: bool) -> None:
    """Excludes all objects that exist now from garbage collections.

    collects: collect before. Not in a fork of the caller: a collection would copy every page of the caller's heap.
    """
    if collects:
        gc.collect()
    gc.freeze()


def limit_threads(count: int) -> None:
    """Limits the threads of torch, where it is loaded, to `count`, or to the user's own OMP_NUM_THREADS.

    OpenMP and BLAS read the environment themselves.
    """
    if torch := sys.modules.get("torch"):
        first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # "4,2" is for nested regions
        torch.set_num_threads(int(first) if first.isdecimal() and int(first) else count)


# ---- what processes of multiprocessing do: its locks, queues and proxies work in a worker


def take_over(inherited: Inherited, fds: Sequence[int]) -> Sequence[int]:
    """Makes this worker the heir of its caller; returns the fds for the recipes. Raises LimitReached."""
    if len(fds) < inherited.num_fds + inherited.has_tracker:
        raise limit_reached(errno.EMFILE, "this worker could not take the files of its recipes")
    if inherited.has_tracker:
        use_tracker(fds[-1])
    if inherited.authkey is not None:
        import multiprocessing.process

        multiprocessing.process.current_process().authkey = inherited.authkey
    return fds[: inherited.num_fds]


def after_fork() -> None:
    """Does in a forked worker what multiprocessing does in processes that it forks: queues start anew, and so on."""
    util: Any = sys.modules.get("multiprocessing.util")
    if util is not None:
        util._finalizer_registry.clear()
        util._run_after_forkers()


def finish_queues() -> None:
    """Writes out what this process has put into multiprocessing's queues, as the end of its own processes does.

    Gives up after some seconds: a queue that is full, and that nobody reads, takes no more.
    """
    util: Any = sys.modules.get("multiprocessing.util")
    if util is None:
        return

    def finish() -> None:
        util._run_finalizers(0)
        util._run_finalizers()

    thread = threading.Thread(target=finish, daemon=True, name="muster-queues")
    thread.start()
    thread.join(_FLUSH_S)
    if thread.is_alive():
        _log.warning(
            "A multiprocessing queue was not written out within %.0f s, since nobody reads it; the rest of what this "
            "worker has put is lost. Read the queue before close().",
            _FLUSH_S,
        )
