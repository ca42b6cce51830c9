"""The worker processes of one vector env: their start, their replacement and their end."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import pickle
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from muster.hosts.env_facts import EnvFacts
from muster.hosts.failures import Failure, to_exception
from muster.hosts.requests import HostOptions
from muster.pool.close_limits import CloseLimits
from muster.pool.deaths import NOUNS, Nouns
from muster.pool.environment import Changes, WorkerEnv, changes_of
from muster.pool.inherit_in_caller import Inheritance
from muster.pool.launcher_client import LauncherClient, LauncherLost, close_own, own, readable, standard_fds
from muster.pool.logs import LogInbox
from muster.pool.memory_plan import MemoryPlan
from muster.pool.messages import Attach, Attached, Build, BuildProgress, EnvsBuilt, StartOrder, Unpacking, expect
from muster.pool.place import Started, WorkerHandle, fork_worker_for, launch_worker, unpacks_hint
from muster.pool.resources import usable_cores
from muster.pool.start_notice import StartNotice, starting
from muster.pool.usage import usage_of
from muster.recipes.known_envs import advise_apart
from muster.recipes.recipe import Recipe, check_forkable, pack
from muster.transport.big_arrays import BigArrays
from muster.transport.channel import ChannelClosed
from muster.transport.slab import SlabPlan, memfd
from muster.worker_info import WorkerInfo
from muster.workers.caller_script import refuse_while_script_runs
from muster.workers.worker_init import NO_INIT, ChosenInit, SetUp

T = TypeVar("T")
SLICE_S = 0.05
PATIENT_S = 60.0  # a longer wait gives a warning
_BUILDING, _MAPPING = "building its envs", "mapping the slab"


@dataclass(frozen=True)
class ProcessOptions:
    """Options of starting and watching worker processes. context: "fork", "forkserver" or "spawn"."""

    context: str
    num_workers: int
    start_timeout_s: float
    step_timeout_s: float | None = None
    threads_per_worker: int = 1
    caller_steps: bool = False
    one_env_per_process: bool = False  # an env that has raised is built again in a new process
    memory_check: str = "error"  # one of memory_plan.MEMORY_CHECKS
    nouns: Nouns = NOUNS
    worker_env: WorkerEnv | None = None  # changes to the environment of the workers
    init: ChosenInit = NO_INIT  # what each worker does before its first env
    close_limits: CloseLimits = field(default_factory=CloseLimits)


class Workers:
    """The worker processes; worker i steps the envs from ``first_envs[i]`` to ``first_envs[i + 1] - 1``.

    watch(host): called every 50 ms while a message to worker `host` has to wait; it may raise to end the wait.
    """

    def __init__(
        self,
        recipes: Sequence[Recipe],
        first_envs: Sequence[int],
        options: ProcessOptions,
        watch: Callable[[int], None],
    ) -> None:
        self._recipes = recipes
        self._call = recipes[0].call
        self._first_envs = first_envs
        self._options = options
        self._watch = watch
        self._changes = changes_of(options.worker_env, options.num_workers)
        self._launcher: LauncherClient | None = None
        self._big_arrays: BigArrays | None = None
        self._inheritance: Inheritance | None = None
        self.handles: list[WorkerHandle] = []
        self.fds: dict[str, int] = {}  # "slab", "mail" and "logs"
        self.log_inbox: LogInbox | None = None
        self._warned = False

    # ---- starting

    def start(self) -> None:
        """Starts all workers; `send_orders` continues. Raises CannotTravel before anything is started."""
        refuse_while_script_runs()
        options = self._options
        doing = starting(options.nouns, len(self._recipes), options.num_workers, caller_steps=options.caller_steps)
        self._notice = StartNotice(doing)
        if options.context == "fork":
            check_forkable(self._recipes, options.init.function)
            set_up = None
        else:
            set_up = SetUp.of_this_process(options.init)
        hosts = range(options.num_workers)
        big: list[list[pickle.PickleBuffer]] = [[] for _ in hosts]
        fds: list[list[int]] = [[] for _ in hosts]
        orders = [self._order(host, set_up, big[host], fds[host]) for host in hosts]
        self._deadline = time.monotonic() + options.start_timeout_s
        with standard_fds():
            self._inheritance = None if options.context == "fork" else Inheritance(fds)
            for name in ("slab", "mail", "logs"):
                self.fds[name] = memfd(name)
                own(self.fds[name])
        self.log_inbox = LogInbox(self.fds["logs"])
        self._big_arrays = BigArrays(self.fds["mail"], big)
        placed = zip(orders, self._big_arrays.places, strict=True)
        self._orders = [dataclasses.replace(order, big_arrays=places) for order, places in placed]
        if options.context != "fork" and self._orders:
            with standard_fds():
                self._launcher = LauncherClient.acquire(options.context, options.threads_per_worker)
        for host in hosts:
            self._notice.check()
            self.handles.append(self._launch(host))

    def send_orders(self) -> None:
        """Lets the workers build their envs. All import at once; only the first builds before `_await_first_envs`."""
        for worker, order in zip(self.handles, self._orders, strict=True):
            self._send(worker, *self._with_inheritance(order), _BUILDING)
        if self._orders and self._orders[0].reports_building:
            self._await_first_envs(self.handles[0])
        for worker, order in zip(self.handles, self._orders, strict=True):
            if order.awaits_build:
                self._send(worker, Build(), (), _BUILDING)

    def _with_inheritance(self, order: StartOrder) -> tuple[StartOrder, list[int]]:
        """The order with what the worker inherits, and the fds to send with it."""
        if self._inheritance is None:
            return order, []
        inherited, fds = self._inheritance.of(order.info.worker_index)
        return dataclasses.replace(order, inherited=inherited), fds

    def facts(self) -> list[EnvFacts]:
        """The facts of all envs. Raises what building raised, for the first env that failed."""
        return [one for built in self._answers(EnvsBuilt, self.handles, _BUILDING) for one in built.facts]

    def attach(self, plan: SlabPlan, options: HostOptions) -> None:
        """Makes all workers ready to step into the slab."""
        self._attach = Attach(plan, options)
        self._deadline = time.monotonic() + self._options.start_timeout_s
        for worker in self.handles:
            self._send(worker, self._attach, (), _MAPPING)
        self._answers(Attached, self.handles, _MAPPING)
        for worker in self.handles:
            worker.usage_at_start = usage_of(worker.process.pid)

    def _await_first_envs(self, worker: WorkerHandle) -> None:
        """Waits until the envs that the first worker has built show that all will fit into memory, see `MemoryPlan`."""
        count, options = len(self._recipes), self._options
        one_each = options.num_workers + options.caller_steps == count and not options.one_env_per_process
        fewer = min(usable_cores(), count) if one_each else None
        plan = MemoryPlan(count, options.num_workers, options.memory_check, fewer)
        for env in worker.envs[:2]:
            (built,) = self._answers(BuildProgress, [worker], f"building env {env}")
            if plan.fits(built):
                break
        else:
            plan.require(built)

    def _answers(self, kind: type[T], workers: Sequence[WorkerHandle], doing: str) -> list[T]:
        """One answer of each of `workers`, in their order; skips BuildProgress unless that is the kind.

        Raises WorkerDied as soon as any worker has died, WorkerTimeout, and what building raised, for the first env
        that failed.
        """
        answers: dict[int, object] = {}
        while owed := [worker for worker in workers if worker.index not in answers]:
            left_s = max(0.0, self._deadline - time.monotonic())
            ready = readable([worker.channel for worker in owed], min(SLICE_S, left_s))
            for worker in (one for one in owed if one.channel in ready):
                try:
                    answer = self._recv(worker)
                except TimeoutError:  # only a part of the message has come
                    continue
                if kind is BuildProgress or not isinstance(answer, BuildProgress):
                    answers[worker.index] = answer
            self._notice.check()
            self.deliver_logs()
            if ready:
                continue
            for worker in self.handles:
                if worker.process.has_ended():
                    raise worker.died(worker.building)
            if left_s == 0.0:
                raise self._too_slow(owed[0], doing)
            self._warn_once(owed[0])
        in_order = [answers[worker.index] for worker in workers]
        for answer in in_order:
            if isinstance(answer, Failure):
                raise to_exception(answer)
        return [expect(kind, answer) for answer in in_order]

    def _warn_once(self, worker: WorkerHandle) -> None:
        if not self._warned and time.monotonic() - worker.launched_at > PATIENT_S:
            self._warned = True
            warnings.warn(worker.slow_to_start(self._options.start_timeout_s), RuntimeWarning, stacklevel=7)

    def _recv(self, worker: WorkerHandle) -> object:
        """The next message of `worker`; notes Unpacking. Raises WorkerDied; TimeoutError if none is there."""
        try:
            while isinstance(message := worker.channel.recv(0.0), Unpacking):
                worker.hint = "" if message.done else unpacks_hint(self._call)
            return message
        except ChannelClosed:
            raise worker.died(worker.building) from None

    def _send(self, worker: WorkerHandle, message: object, fds: Sequence[int], doing: str) -> None:
        with contextlib.suppress(ChannelClosed):  # the worker has died; the wait for its answer will report that
            try:
                worker.channel.send(message, max(0.0, self._deadline - time.monotonic()), fds)
            except TimeoutError:
                raise self._too_slow(worker, doing) from None

    def _too_slow(self, worker: WorkerHandle, doing: str) -> Exception:
        limit_s = self._options.start_timeout_s
        return worker.timed_out(doing, f"start_timeout={limit_s}, {doing}", limit_s)

    def _order(self, host: int, set_up: SetUp | None, big: list[pickle.PickleBuffer], fds: list[int]) -> StartOrder:
        """The order for the worker `host`. big, fds: receive what of its recipes travels apart, see `pack`."""
        first, last = self._first_envs[host : host + 2]
        info = WorkerInfo(
            env_index=None,
            worker_index=host,
            num_envs=len(self._recipes),
            num_workers=self._options.num_workers,
            seed=int(np.random.SeedSequence().generate_state(1)[0]),
        )
        recipes = self._recipes[first:last]
        context, init = self._options.context, self._options.init.function
        data = b"" if context == "fork" else pack(recipes, start_method=context, big=big, fds=fds, init=init)
        reports_building = host == 0 and len(self._recipes) > 1
        threads = self._options.threads_per_worker
        return StartOrder(data, set_up, info, first, threads, reports_building, awaits_build=host > 0)

    def _launch(self, host: int) -> WorkerHandle:
        envs = range(*self._first_envs[host : host + 2])
        forks, settings = self._launcher is None, (self._options.nouns.process_name(host), self._changes[host])
        start: Callable[[Mapping[str, int]], Started] = functools.partial(self._start_by_launcher, *settings)
        if forks:
            inherited = self._recipes[envs.start : envs.stop], self._options.init.function
            start = functools.partial(fork_worker_for, *inherited, *settings)
        watch = functools.partial(self._watch, host)
        try:
            with standard_fds():
                nouns = self._options.nouns
                worker = launch_worker(host, envs, self.fds, start, watch=watch, shares_main=forks, nouns=nouns)
            worker.apart = advise_apart(self._recipes[envs.start : envs.stop])
            return worker
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                error.add_note(
                    f"worker {host} of {self._options.num_workers} could not start: each needs 5 file descriptors in "
                    f"this process; allow it more (`ulimit -n`), or ask for fewer workers"
                )
            raise

    def _start_by_launcher(self, name: str, changes: Changes, fds: Mapping[str, int]) -> Started:
        assert self._launcher is not None
        try:
            return self._launcher.start(name, changes, fds)
        except LauncherLost:
            self._launcher.release()
            self._launcher = LauncherClient.acquire(self._options.context, self._options.threads_per_worker)
            return self._launcher.start(name, changes, fds)

    # ---- replacing

    def replace(self, host: int, reason: str) -> None:
        """Starts a process in the place of one that has been retired; `continue_start` continues."""
        worker = self.handles[host] = self._launch(host)
        worker.replaces = reason
        worker.starting_until = time.monotonic() + self._options.start_timeout_s
        order = dataclasses.replace(self._orders[host], reports_building=False, awaits_build=False, replaces=True)
        with contextlib.suppress(ChannelClosed, TimeoutError):  # `continue_start` will report that
            order, fds = self._with_inheritance(order)
            worker.channel.send(order, self._options.start_timeout_s, fds)

    def continue_start(self, worker: WorkerHandle) -> bool:
        """Answers the messages of a replacement that starts; True once it is ready to step.

        Raises WorkerDied, WorkerTimeout, and what building its envs raised.
        """
        assert worker.starting_until is not None
        try:
            while not isinstance(answer := self._recv(worker), Attached):
                if isinstance(answer, Failure):
                    raise to_exception(answer)
                expect(EnvsBuilt, answer)
                worker.channel.send(self._attach, max(0.0, worker.starting_until - time.monotonic()))
        except ChannelClosed:
            raise worker.died(worker.building) from None
        except TimeoutError:
            if worker.process.has_ended():
                raise worker.died(worker.building) from None
            if time.monotonic() >= worker.starting_until:
                raise self._too_slow(worker, _BUILDING) from None
            return False
        worker.starting_until, worker.ready_at = None, time.monotonic()
        worker.usage_at_start = usage_of(worker.process.pid)
        return True

    def deliver_logs(self) -> None:
        """Hands the log records that have arrived to the caller's loggers."""
        if self.log_inbox is not None:
            self.log_inbox.deliver()

    # ---- ending

    def never_replace(self) -> None:
        """Releases what only replacements of workers would need: copies of users' fds, and big pickles."""
        self._drop_inheritance()
        if self._big_arrays is not None:
            self._big_arrays.drop_pickles()

    def _drop_inheritance(self) -> None:
        if self._inheritance is not None:
            self._inheritance.close()

    def end(self) -> None:
        """Kills the workers that still run, and releases their fds, the launcher and the big arrays."""
        kills = [worker.process.kill for worker in self.handles]
        retires = [worker.retire for worker in self.handles]
        interrupt: KeyboardInterrupt | None = None
        for step in (*kills, *retires, self._let_go):
            for _ in range(2):
                try:
                    step()
                    break
                except KeyboardInterrupt as error:  # raised once all is done
                    interrupt = error
        if interrupt is not None:
            raise interrupt

    def _let_go(self) -> None:
        launcher, self._launcher = self._launcher, None
        if launcher is not None:
            launcher.release()
        self._drop_inheritance()
        if self._big_arrays is not None:
            self._big_arrays.close()
        if self.log_inbox is not None:
            self.log_inbox.deliver(at_the_end=True)
        self.log_inbox = None
        fds, self.fds = self.fds, {}
        close_own(*fds.values())
