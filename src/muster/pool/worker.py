"""The worker process: builds its envs, then steps them until the caller closes it."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import faulthandler
import fcntl
import functools
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from muster._core import EXIT_FDS_CLOSED, MARK, kill_started, start_watchdog
from muster.envs.light_melting_pot import import_without_bots
from muster.envs.quiet_atari import print_no_banner
from muster.errors import CannotTravel
from muster.hosts.env_host import EnvHost, freeze_heap, seed_globals
from muster.hosts.env_resident import MessageLoop
from muster.hosts.failures import Failure
from muster.introspection import type_name
from muster.pickling.main_module import ABOUT_INIT, Init, MainModule, run_once
from muster.pool.inherit_in_worker import after_fork, finish_queues, take_over
from muster.pool.killing import kill_group
from muster.pool.log_forwarding import LogForwarding
from muster.pool.messages import Answer, Build, BuildProgress, EnvsBuilt, Message, StartOrder, Unpacking, expect
from muster.recipes.recipe import Recipe, unpack
from muster.transport.big_arrays import map_big_arrays
from muster.transport.channel import Channel, ChannelClosed
from muster.transport.mail import SharedMail, dumps
from muster.transport.slab import Slab
from muster.worker_info import worker_info_context

# Makes faulthandler write the Python stack, even while native code holds the GIL. Not SIGUSR1: envs may use that.
STACK_SIGNAL = signal.SIGRTMIN + 7


def main(fds: Mapping[str, int], recipes: Sequence[Recipe] | None = None, init: Init | None = None) -> NoReturn:
    """Runs a worker on the fds of `launcher.WORKER_FDS`, then ends the process.

    recipes, init: inherited under fork, else None.
    """
    os.environ[f"{MARK}{os.getpid()}"] = ""  # marks all processes that this one starts, see `kill_started`
    start_watchdog(fds["caller"], stderr_pipe=fds["stderr_read"], stderr_to=fds["stderr"], tail=fds["tail"])
    _take_over(fds)
    import_without_bots()
    print_no_banner()
    forked = recipes is not None
    if forked:
        after_fork()
    else:
        MainModule.install()
    channel = Channel(socket.socket(fileno=fds["channel"]), shares_main=forked)
    exit_code, caller_gone = 0, False
    try:
        Worker(channel, fds, forked=forked).run(recipes, init)
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
        kill_group(os.getpid())  # together with what threads of the env start now: nobody may be left to reap those
    os._exit(exit_code)  # an env's threads must not keep the process alive


def flush_streams() -> None:
    """Flushes stdout and stderr, which may be None, closed, or an object that the user has put in their place."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()


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
    faulthandler.register(STACK_SIGNAL, file=fds["tail"], all_threads=True)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # The caller handles Ctrl-C. A handler that does nothing: processes of the env would inherit an ignored signal.
    signal.signal(signal.SIGINT, lambda *_: None)


class Worker:
    """Builds the envs, then answers the caller's messages; between them the core steps."""

    def __init__(self, channel: Channel, fds: Mapping[str, int], *, forked: bool) -> None:
        self._channel = channel
        self._fds = fds
        self._dumps = functools.partial(dumps, shares_main=forked)
        self._forked = forked
        self._env_host: EnvHost

    def run(self, recipes: Sequence[Recipe] | None, init: Init | None) -> None:
        if self._forked:
            freeze_heap(collects=False)
        order = expect(StartOrder, self._channel.recv())
        with worker_info_context(order.info):
            self._env_host = EnvHost((), order.info, order.first_env, dumps=self._dumps)
            if self._forked:
                limit_threads(order.threads)  # a fork has none of the threads that torch's pool would wait for
            failure = self._set_up(order, recipes, init) or self._build(order)
            self._channel.send(failure or EnvsBuilt(() if order.replaces else self._env_host.facts()))
            while failure:  # until the caller kills this worker: one that ends itself would be reported as dead
                self._channel.recv()
            limit_threads(order.threads)
            freeze_heap(collects=not self._forked)
            mail = SharedMail(self._fds["mail"], shares_main=self._forked)
            loop = MessageLoop(self._env_host, mail, self._reply, lambda plan: Slab(plan, self._fds["slab"]))
            loop.run(self._channel.recv)

    def _set_up(self, order: StartOrder, recipes: Sequence[Recipe] | None, init: Init | None) -> Failure | None:
        """Does all that comes before the first env; returns the failure of what fails."""
        assert order.info.seed is not None
        levels = None if order.set_up is None else order.set_up.logging
        self._logs = LogForwarding(self._fds["logs"], order.info.worker_index, levels)
        self._about = ""  # what an exception is about that is no env's
        try:
            if order.set_up is not None:
                self._about = order.set_up.init.words
                order.set_up.apply()
                self._about = ""
                self._logs.restore(drops_handlers=order.set_up.init.script is not None)
            seed_globals(order.info.seed)
            if recipes is None:
                recipes = self._unpacked(order)
            elif init is not None:
                self._initialise(init)
            self._env_host.recipes = list(recipes)
        except BaseException as error:
            failure = self._env_host.failure(0, error)
            return dataclasses.replace(failure, hint=self._about or failure.hint)
        return None

    def _unpacked(self, order: StartOrder) -> list[Recipe]:
        """The recipes, rebuilt after `worker_init` was called, if that came with them."""
        assert order.inherited is not None
        assert order.set_up is not None

        def initialise(init: Init) -> None:
            self._channel.send(Unpacking(done=True))
            self._initialise(init)
            self._channel.send(Unpacking(done=False))

        self._channel.send(Unpacking(done=False))
        own_fds = take_over(order.inherited, self._channel.take_fds())
        big_arrays = map_big_arrays(self._fds["mail"], order.big_arrays)
        recipes = unpack(order.recipes, big_arrays, own_fds, initialise)
        for fd in own_fds:  # the objects have copies
            os.close(fd)
        self._channel.send(Unpacking(done=True))
        order.set_up.complete()
        return recipes

    def _initialise(self, init: Init) -> None:
        self._about = ABOUT_INIT
        run_once(init)
        self._about = ""
        self._logs.restore()

    def _build(self, order: StartOrder) -> Failure | None:
        if order.awaits_build:
            expect(Build, self._channel.recv())
        if not order.reports_building:
            return self._env_host.build()
        return self._env_host.build(lambda memory_bytes: self._channel.send(BuildProgress(memory_bytes)))

    def _reply(self, reply: Message) -> None:
        """Sends a reply. Results are pickled one by one, so that one that cannot travel does not cost the others."""
        if isinstance(reply, Answer):
            reply = Answer(reply.number, [self._packed(i, result) for i, result in enumerate(reply.results)])
        self._channel.send(reply)

    def _packed(self, i: int, result: Any) -> bytes:
        try:
            return self._dumps(result)
        except Exception as error:
            refusal = CannotTravel(
                f"a {type_name(result)} cannot be sent from the worker: {error}. Ask for something smaller, such as an "
                f"attribute of it, or use {self._env_host.recipes[0].call.in_process}"
            )
            return self._dumps(self._env_host.failure(i, refusal))


def limit_threads(count: int) -> None:
    """Limits the threads of torch, where the env has loaded it, to `count`, or to the user's own OMP_NUM_THREADS.

    OpenMP and BLAS read the environment themselves.
    """
    if torch := sys.modules.get("torch"):
        first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # "4,2" is for nested regions
        torch.set_num_threads(int(first) if first.isdecimal() and int(first) else count)
