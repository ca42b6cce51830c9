"""The process backend: worker processes step the envs; the caller waits for them, or steps some envs itself."""

from __future__ import annotations

import dataclasses
import math
import os
import pickle
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from muster.arguments import one_of, seconds, whole
from muster.backends.base import (
    Attributes,
    Backend,
    CallerOptions,
    WorkerDied,
    attach_local_host,
    close_here,
    make_caller,
    raise_local_interrupt,
)
from muster.envs.quiet_atari import no_banner_meanwhile
from muster.errors import CannotTravel, ClosedError, EnvError, UsageError, WaitTimeout, WorkerError
from muster.hosts.env_facts import EnvFacts
from muster.hosts.env_host import EnvHost
from muster.hosts.failures import Failure, message_of, to_exception
from muster.hosts.requests import EnvCall, HostOptions
from muster.introspection import type_name
from muster.pickling import dumps as dumps_carefully
from muster.pickling import is_plain, named_arguments
from muster.pool import messages
from muster.pool.close_limits import AT_ONCE, CloseLimits, warn_of_cuts
from muster.pool.closing import ClosingWorkers
from muster.pool.deaths import Nouns, seconds_since
from muster.pool.launcher_client import readable
from muster.pool.place import WorkerHandle, name_workers
from muster.pool.pool import PATIENT_S, SLICE_S, ProcessOptions, Workers
from muster.pool.usage import Usage, usage_of
from muster.recipes.recipe import Recipe
from muster.spaces.tree import Array
from muster.transport.channel import ChannelClosed
from muster.transport.mail import LocalMail, Mail, SharedMail, dumps
from muster.transport.slab import Slab, SlabPlan, split_evenly
from muster.worker_info import WorkerInfo

__all__ = ["ProcessBackend", "ProcessOptions", "check_pool"]

CONTEXTS = ("auto", "fork", "forkserver", "spawn")
# How long a Ctrl-C in an env that the caller steps is held back: if the workers answer in time, the whole step ends.
_INTERRUPT_GRACE_S = 0.5


def check_pool(
    nouns: Nouns, context: Any, start_timeout: Any, step_timeout: Any, on_failure: Any, max_restarts: Any, threads: Any
) -> None:
    """Raises ConfigError for invalid options of a pool; the message uses the nouns of the pool."""
    one_of("context", context, CONTEXTS)
    one_of("on_failure", on_failure, ("raise", "restart"))
    seconds("start_timeout", start_timeout)
    if step_timeout is not None:
        seconds(nouns.step_timeout, step_timeout)
    whole("max_restarts", max_restarts, 0)
    whole(f"threads_per_{nouns.worker}", threads, 1)


class ProcessBackend(Backend):
    """Steps envs in worker processes. Hosts 0 to W-1 are the workers; with `caller_steps` host W is the caller."""

    def __init__(self, recipes: Sequence[Recipe], options: ProcessOptions) -> None:
        self._recipes = recipes
        self._options = options
        self.nouns = options.nouns
        self.close_limits = options.close_limits
        self.user_call = recipes[0].call
        self.num_workers = options.num_workers
        self.first_envs = split_evenly(len(recipes), options.num_workers + options.caller_steps)
        self._workers = Workers(recipes, self.first_envs, options, self._watch_sending)
        self._local: EnvHost | None = None
        self._mail: SharedMail | None = None
        self._local_mail = LocalMail()
        self._owner = os.getpid()
        self._closed = False
        self._warned = False
        self._number = 0  # of the last call: an answer with another number belongs to an interrupted call
        self._calling: str | None = None
        self._results: dict[int, list[Any]] = {}
        self._sending_at = math.inf

    # ---- starting

    def start(self) -> list[EnvFacts]:
        try:
            self._workers.start()
            assert self._workers.log_inbox is not None
            self.log_flag = self._workers.log_inbox.flag
            self._mail = SharedMail(self._workers.fds["mail"], shares_main=self._options.context == "fork")
            self._workers.send_orders()
            local = self._build_local()
            facts = [*self._workers.facts(), *local]
        except BaseException:
            self.close(AT_ONCE)
            raise
        declared = any(one.metadata.get("one_per_process") for one in facts)
        self._one_per_process = declared or self._options.one_env_per_process
        return facts

    def _build_local(self) -> list[EnvFacts]:
        if not self._options.caller_steps:
            return []
        host, first = self.num_workers, self.first_envs[self.num_workers]
        info = WorkerInfo(None, host, len(self._recipes), self.num_workers, None)
        self._local = EnvHost(self._recipes[first:], info, first)
        with no_banner_meanwhile():  # none from the workers, so none from here
            failure = self._local.initialise(self._options.init.function) or self._local.build()
        if failure:
            raise to_exception(failure)
        return self._local.facts()

    def attach(self, plan: SlabPlan, options: HostOptions, caller: CallerOptions) -> None:
        self.slab = Slab(plan, self._workers.fds["slab"])
        self.caller = make_caller(self.slab, caller)
        self._workers.attach(plan, options)
        if self._local is not None:
            attach_local_host(self, self._local, self.num_workers, self._local_mail, options)
            self._own_usage_at_start = usage_of(os.getpid())

    def deliver_logs(self) -> None:
        self._workers.deliver_logs()

    def replaces(self, on_worker_died: WorkerDied | None) -> None:
        super().replaces(on_worker_died)
        if on_worker_died is None:
            self._workers.never_replace()

    # ---- commands

    def mail_of(self, host: int) -> Mail:
        if host == self.num_workers:
            return self._local_mail
        assert self._mail is not None
        return self._mail

    def reset(self, env_ids: Array, arguments: messages.ResetArguments) -> None:
        # First of all: if the options cannot travel, the vector env stays as it was.
        packed = self._packed_options(arguments.options)
        resets = dict(self.resets_by_host(env_ids, dataclasses.replace(arguments, options=packed)))
        local = resets.pop(self.num_workers, None)
        pickles = {host: dumps(reset) for host, reset in resets.items()}
        with self.whole():
            self.caller.request_resets(env_ids)
            for host, message in pickles.items():
                self._send_or_replace(host, message)
            if self._local is not None and local is not None:
                self._local.reset(local.env_ids, dataclasses.replace(arguments, seeds=local.arguments.seeds))

    def restart(self, restart: messages.Restart) -> bool:
        host = self.caller.host_of(restart.env)
        replaces = restart.rebuilds and self._one_per_process
        with self.whole():
            if replaces:
                self._end_gently(self._workers.handles[host])
                reason = f"{self.nouns.env(host, restart.env) or 'it'} raised"
                self._replace(host, reason, {restart.env: restart.attributes})
            packed = self._packed_options(restart.options)
            rebuilds = restart.rebuilds and not replaces
            self._send_or_replace(host, dumps(dataclasses.replace(restart, options=packed, rebuilds=rebuilds)))
        return replaces

    def _replace(self, host: int, reason: str, attributes: Mapping[int, Attributes]) -> None:
        self._workers.replace(host, reason)
        if any(attributes.values()):
            self._workers.handles[host].outbox.append(dumps(messages.SetAgain(attributes)))

    def _end_gently(self, worker: WorkerHandle) -> None:
        """Gives a worker that is to be replaced the time to close its envs, then ends it."""
        closing = self._closing([worker], self.close_limits, lambda _: 0)  # its answer is this replacement
        closing.wait()
        worker.retire()
        warn_of_cuts(closing.cuts)

    def call_async(self, name: str | EnvCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._number += 1
        parts = name.sent_parts() if hasattr(name, "sent_parts") else {"the function": name}
        packed = self._packed((name, args, kwargs), parts | named_arguments(args, kwargs))
        message = dumps(messages.Call(self._number, packed))
        self._call([message] * self.num_workers, f"call({name!r})" if isinstance(name, str) else "call()")
        if self._local is not None:
            self._results[self.num_workers] = self._local.call(name, args, kwargs)

    def set_attr(self, name: str, values: Sequence[Any]) -> list[Failure | None]:
        self._number += 1
        pickles = []
        for worker in self._workers.handles:
            own = [values[env] for env in worker.envs]
            parts = {f"values[{env}]": value for env, value in zip(worker.envs, own, strict=True)}
            pickles.append(dumps(messages.SetAttr(self._number, self._packed((name, own), parts))))
        try:
            self._call(pickles, f"set_attr({name!r})")
            if self._local is not None:
                self._results[self.num_workers] = self._local.set_attr(name, values[self._local.first_env :])
            return self.call_wait(None)
        except UsageError:  # raised before anything was sent
            self._calling = None
            raise

    def kept(self, value: Any) -> messages.Packed:
        # It has just been sent: what cannot be pickled has been reported.
        return messages.Packed(dumps(value, shares_main=self._options.context == "fork"))

    def _call(self, pickles: Sequence[bytes], calling: str) -> None:
        self._results = {}
        self._calling, self._called_at = calling, time.monotonic()
        with self.whole():
            for host, message in enumerate(pickles):
                self._send_or_replace(host, message)

    def call_wait(self, timeout_s: float | None) -> list[Any]:
        deadline = time.monotonic() + (math.inf if timeout_s is None else timeout_s)
        while owed := [worker for worker in self._workers.handles if worker.index not in self._results]:
            self._require_not_closed()
            left_s = max(0.0, deadline - time.monotonic())
            ready = readable([worker.channel for worker in owed], min(SLICE_S, left_s))
            with self.whole():
                for worker in owed:
                    self._take_results(worker)
            self.deliver_logs()
            if left_s == 0.0 and not ready:
                raise WaitTimeout(
                    f"call_wait(timeout={timeout_s}): {name_workers(owed)} not answered; the call stays pending"
                )
            self._warn_once(time.monotonic() - self._called_at)
        self._calling = None
        return [result for host in sorted(self._results) for result in self._results[host]]

    def _take_results(self, worker: WorkerHandle) -> None:
        if worker.starting_until is not None:
            return self._continue_start(worker)
        try:
            answer = messages.expect(messages.Answer, worker.channel.recv(0.0))
            if answer.number == self._number:  # else this answers a call that was interrupted
                self._results[worker.index] = [_unpacked(worker, i, one) for i, one in enumerate(answer.results)]
        except ChannelClosed:
            self._replace_or_raise(worker, worker.died(self._doing(worker)))
        except TimeoutError:
            if worker.process.has_ended():
                self._replace_or_raise(worker, worker.died(self._doing(worker)))
            elif limit_s := self._options.step_timeout_s:
                since = max(self._called_at, worker.ready_at, worker.channel.heard_at)
                elapsed_s = time.monotonic() - since
                if elapsed_s > limit_s * len(worker.envs):
                    self._give_up(worker, elapsed_s, f"{self.nouns.step_timeout}={limit_s} for each env")

    def process_ids(self) -> list[int | None]:
        own = [os.getpid()] if self._local is not None else []
        workers = self._workers.handles
        return [None if worker.process.has_ended() else worker.process.pid for worker in workers] + own

    def usage_at_start(self, host: int) -> Usage:
        return self._own_usage_at_start if host == self.num_workers else self._workers.handles[host].usage_at_start

    # ---- watching

    def _require_not_closed(self) -> None:
        if self._closed:
            raise ClosedError("this vector env was closed by another thread while this one waited for it")

    def watch(self, waited_s: float) -> None:
        self._require_not_closed()
        workers = list(self._workers.handles)
        ended = readable([worker.process for worker in workers], 0.0)
        for worker in workers:
            if worker.starting_until is None and worker.process not in ended:
                continue  # without `whole`: nothing is done for this worker that Ctrl-C could end halfway
            with self.whole():
                if worker.starting_until is not None:
                    self._continue_start(worker)
                elif worker.process.has_ended():
                    self._replace_or_raise(worker, worker.died(self._doing(worker)))
        self._watch_step_time()
        self.deliver_logs()
        if self._local is not None and waited_s > _INTERRUPT_GRACE_S:
            raise_local_interrupt(self, self.num_workers)
        self._warn_once(waited_s)

    def _watch_sending(self, host: int) -> None:
        """Checks the workers while a message to worker `host` waits because that worker has not read the one before.

        Raises ChannelClosed or WorkerDied where a worker has ended.
        """
        for worker in self._workers.handles:
            if not worker.process.has_ended():
                continue
            if worker.index == host:
                raise ChannelClosed
            if self.on_worker_died is None and not self._closed:
                raise worker.died(self._doing(worker))
        self.deliver_logs()
        self._warn_once(time.monotonic() - self._sending_at)

    def _warn_once(self, waited_s: float) -> None:
        if waited_s > PATIENT_S and not self._warned:
            self._warned = True
            workers = self._workers.handles
            doing = "; ".join(f"{self.nouns.worker} {worker.index}: {self._doing(worker)}" for worker in workers)
            limit = self.nouns.step_timeout
            remedy = f" Set {limit}= to end waits for envs that hang." if limit else ""
            warnings.warn(f"waiting for {PATIENT_S:.0f} s ({doing}).{remedy}", RuntimeWarning, stacklevel=4)

    def _watch_step_time(self) -> None:
        limit_s = self._options.step_timeout_s
        if limit_s is None:
            return
        for worker in list(self._workers.handles):
            if worker.starting_until is not None:
                continue
            state = self.slab.host(worker.index)
            # A worker that has been stopped (SIGSTOP) between two steps shows NOTHING as its state, although it owes an
            # answer. Then the time counts for which its state and records have not changed.
            records = self.slab.records[worker.envs.start : worker.envs.stop]
            seen = (state["since"], records["requested"].sum(), records["finished"].sum())
            if seen != worker.seen:
                worker.seen, worker.seen_at = seen, time.monotonic()
            since = max(worker.seen_at, worker.ready_at)
            elapsed_s = seconds_since(state["since"]) if state["doing"] else time.monotonic() - since
            if elapsed_s > limit_s and self._busy(worker):
                self._give_up(worker, elapsed_s, f"{self.nouns.step_timeout}={limit_s}")

    def _give_up(self, worker: WorkerHandle, elapsed_s: float, limit: str) -> None:
        with self.whole():
            # `_doing` is evaluated first: the signal that asks for the worker's stack may change what it does.
            self._replace_or_raise(worker, worker.timed_out(self._doing(worker), limit, elapsed_s))

    def _busy(self, worker: WorkerHandle) -> list[int]:
        return [env for env in worker.envs if self.caller.is_pending(env) and not self.caller.finished(env)]

    def _owes_result(self, worker: WorkerHandle) -> bool:
        return self._calling is not None and self.caller.calling and worker.index not in self._results

    def _doing(self, worker: WorkerHandle) -> str:
        if worker.starting_until is not None:
            return worker.building
        if self._owes_result(worker):
            return f"answering {self._calling} for {time.monotonic() - self._called_at:.3g} s"
        slab = getattr(self, "slab", None)
        return worker.nouns.doing(slab, worker.index, self._busy(worker) if slab is not None else [])

    # ---- replacing

    def _continue_start(self, worker: WorkerHandle) -> None:
        """Continues the start of a replacement. Once it is ready, sends the messages that have waited for it."""
        try:
            if not self._workers.continue_start(worker):
                return
        except (WorkerError, EnvError) as error:
            self._replace_or_raise(worker, error, worker.replaces)
            return
        outbox, worker.outbox = worker.outbox, []
        for message in outbox:
            if self._workers.handles[worker.index] is worker:  # else it has died, and its envs are asked again
                self._send_or_replace(worker.index, message)

    def _replace_or_raise(self, worker: WorkerHandle, error: Exception, replaces: str = "") -> None:
        """Replaces a worker that cannot be used any more; where workers are not replaced, raises `error`.

        Only called within `whole`, which then closes the vector env. Does not wait for the replacement: messages to it
        are kept until it has started, see `_continue_start`.
        replaces: if `worker` is itself a replacement that was being started, the reason for that.
        """
        if self.on_worker_died is None:
            raise error
        host = worker.index
        during = f" (while {self.nouns.worker} {host} was replaced, after: {replaces})" if replaces else ""
        reason = f"{error}{during}"
        if self._calling is not None and host not in self._results:  # then the error is the result of the call
            first = worker.envs.start
            self._results[host] = [Failure(first, host, None, type(error).__name__, str(error), "", error)]
        # Killed before its envs are marked as lost: a worker that only hung could still write to their rows.
        worker.retire()
        # Called before the replacement starts: it may raise because there have been too many restarts.
        attributes = self.on_worker_died(host, worker.envs, reason)
        self._replace(host, replaces or reason, attributes)

    # ---- messages

    def _packed_options(self, options: Any) -> messages.Packed:
        return self._packed(options, {"options": options})

    def _packed(self, value: Any, parts: dict[str, Any]) -> messages.Packed:
        """Packs a user's value. parts: see `dumps_carefully`. Raises CannotTravel, in under 5 s."""
        if is_plain(value):
            return messages.Packed(dumps(value))
        packed = dumps_carefully(value, parts, start_method=None, call=self.user_call)
        return messages.Packed(dumps(value, shares_main=True) if self._options.context == "fork" else packed)

    def _send_or_replace(self, host: int, message: bytes) -> None:
        """Sends a message for pending envs or a call; if the worker is unusable, its replacement will answer."""
        worker = self._workers.handles[host]
        if worker.starting_until is not None:
            worker.outbox.append(message)
            return
        # The worker may have to finish a reset of each of its envs before it reads the next message.
        limit_s = self._options.step_timeout_s
        allowed_s = None if limit_s is None else limit_s * len(worker.envs)
        try:
            self._send(worker, message, allowed_s)
        except ChannelClosed:
            self._replace_or_raise(worker, worker.died(self._doing(worker)))
        except TimeoutError:
            assert allowed_s is not None
            self._give_up(worker, allowed_s, f"{self.nouns.step_timeout}={limit_s} for each env")

    def _send(self, worker: WorkerHandle, message: bytes, timeout_s: float | None) -> None:
        """Sends a message to a worker that may be asleep in the core. Raises ChannelClosed, TimeoutError."""
        self.caller.announce_message(worker.index)
        self._sending_at = time.monotonic()
        try:
            worker.channel.send_bytes(message, timeout_s)
        finally:
            self._sending_at = math.inf

    # ---- closing

    def close(self, limits: CloseLimits) -> list[Failure]:
        # A forked child of the caller has copies of all this, and must not touch the caller's workers.
        if self._closed or self._owner != os.getpid():
            return []
        self._closed = True
        waits = not limits.terminates and hasattr(self, "caller")
        failures: list[Failure] = []
        try:
            asked = self._workers.handles if waits else []
            closing = self._closing(asked, limits, lambda worker: len(self._busy(worker)))
            closing.ask()
            if self._local is not None:
                failures += close_here(self._local, limits)
            if not any(isinstance(one.exception, KeyboardInterrupt) for one in failures):
                closing.wait()
        finally:  # also when Ctrl-C ends the wait
            if self._mail is not None:
                self._mail.close()
            self._workers.end()
        warn_of_cuts(closing.cuts)
        return failures + closing.failures

    def _closing(
        self, workers: Sequence[WorkerHandle], limits: CloseLimits, count_pending: Callable[[WorkerHandle], int]
    ) -> ClosingWorkers:
        message = dumps(messages.Close())

        def send(worker: WorkerHandle) -> None:
            self._send(worker, message, 0.0)

        return ClosingWorkers(
            workers,
            limits,
            send=send,
            doing=self._doing,
            count_pending=count_pending,
            calls=[worker.index for worker in workers if self._owes_result(worker)],
            on_slice=self.deliver_logs,
        )


def _unpacked(worker: WorkerHandle, i: int, data: bytes) -> Any:
    """The result of the worker's i-th env; a Failure where the result cannot be rebuilt in this process."""
    try:
        return pickle.loads(data)
    except Exception as error:
        what = f"the result could be pickled in the worker, but not rebuilt in the caller: {message_of(error)}"
        refusal = CannotTravel(f"{what}. Ask for something plainer, such as an attribute of it")
        return Failure(worker.envs.start + i, worker.index, None, type_name(refusal), str(refusal), "", refusal)
