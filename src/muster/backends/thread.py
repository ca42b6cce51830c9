"""The thread backend: threads of the calling process step envs that release the GIL or share objects."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any, TypeVar

from muster.backends.base import Backend, CallerOptions, make_caller
from muster.errors import ClosedError, WaitTimeout, WorkerDied, WorkerTimeout
from muster.hosts.env_facts import EnvFacts, check_one_per_process
from muster.hosts.failures import Failure, to_exception
from muster.hosts.requests import EnvCall, HostOptions
from muster.hosts.threads import ThreadWorker, end_threads
from muster.pickling.main_module import Init
from muster.pool import messages
from muster.pool.close_limits import AT_ONCE, CloseLimits
from muster.pool.deaths import NOUNS
from muster.pool.usage import Usage, usage_of
from muster.recipes.recipe import Recipe
from muster.spaces.tree import Array
from muster.transport.mail import LocalMail, Mail
from muster.transport.slab import Slab, SlabPlan, split_evenly
from muster.worker_info import WorkerInfo

T = TypeVar("T")
_SLICE_S = 0.05
# The reply before one of each kind: a thread's last reply stays in place until the next.
_BEFORE: dict[type, tuple[type, ...]] = {
    messages.EnvsBuilt: (),
    messages.Attached: (messages.EnvsBuilt,),
    messages.Answer: (messages.Attached,),
}


class ThreadBackend(Backend):
    """Steps envs in threads. Hosts 0 to W-1 are the workers. Arguments are not copied.

    init: called once, in the calling thread, before the first env is built.
    """

    def __init__(
        self,
        recipes: Sequence[Recipe],
        num_workers: int,
        start_timeout_s: float,
        close_limits: CloseLimits,
        init: Init | None = None,
    ) -> None:
        self.close_limits = close_limits
        self._init = init
        self.num_workers = num_workers
        self.user_call = recipes[0].call
        self.first_envs = split_evenly(len(recipes), num_workers)
        self._start_timeout_s = start_timeout_s
        self._mail = LocalMail()
        self._owner = os.getpid()
        self._closed = False
        self._number = 0  # of the last call: an answer with another number belongs to an interrupted call
        self._calling = ""  # the last call, in words
        self._workers = []
        for host, (first, last) in enumerate(zip(self.first_envs, self.first_envs[1:], strict=False)):
            info = WorkerInfo(None, host, len(recipes), num_workers, seed=None)
            self._workers.append(ThreadWorker(recipes[first:last], info, first, self._mail, recipes))

    # ---- starting

    def start(self) -> list[EnvFacts]:
        facts: list[EnvFacts] = []
        deadline = time.monotonic() + self._start_timeout_s
        try:
            if failure := self._workers[0].env_host.initialise(self._init):
                raise to_exception(failure)
            # One after the other: few constructors are thread-safe, and Python's warning filters are not.
            for worker in self._workers:
                worker.thread.start()
                facts += self._take(messages.EnvsBuilt, worker, deadline, "building its envs").facts
                check_one_per_process(worker.env_host.envs[0], self.first_envs[-1], self.user_call)
        except BaseException:
            self.close(AT_ONCE)
            raise
        return facts

    def attach(self, plan: SlabPlan, options: HostOptions, caller: CallerOptions) -> None:
        self.slab = Slab(plan)
        self.caller = make_caller(self.slab, caller)
        deadline = time.monotonic() + self._start_timeout_s
        for worker in self._workers:
            worker.inbox.put(messages.Attach(self.slab, options))
            self._take(messages.Attached, worker, deadline, "mapping the slab")
        self._usage_at_start = usage_of(os.getpid())

    # ---- commands

    def mail_of(self, host: int) -> Mail:
        return self._mail

    def reset(self, env_ids: Array, arguments: messages.ResetArguments) -> None:
        with self.whole():
            self.caller.request_resets(env_ids)
            for host, reset in self.resets_by_host(env_ids, arguments):
                self._send(host, reset)

    def restart(self, restart: messages.Restart) -> bool:
        with self.whole():
            self._send(self.caller.host_of(restart.env), restart)
        return False

    def call_async(self, name: str | EnvCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calling = f"call({name!r})" if isinstance(name, str) else "call()"
        self._call(messages.Call, [(name, args, kwargs)] * self.num_workers, calling)

    def set_attr(self, name: str, values: Sequence[Any]) -> list[Failure | None]:
        of_workers = [(name, [values[env] for env in worker.envs]) for worker in self._workers]
        self._call(messages.SetAttr, of_workers, f"set_attr({name!r})")
        return self.call_wait(None)

    def _call(
        self, kind: type[messages.Call] | type[messages.SetAttr], arguments: Sequence[tuple[Any, ...]], calling: str
    ) -> None:
        with self.whole():
            self._number += 1
            self._calling = calling
            for host, of_worker in enumerate(arguments):
                self._send(host, kind(self._number, of_worker))

    def call_wait(self, timeout_s: float | None) -> list[Any]:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        results: list[Any] = []
        for host, worker in enumerate(self._workers):
            try:
                results += self._wait_for(messages.Answer, worker, deadline).results
            except TimeoutError:
                raise WaitTimeout(
                    f"call_wait(timeout={timeout_s}): worker {host} has not answered; the call stays pending"
                ) from None
        return results

    def watch(self, waited_s: float) -> None:
        if self._closed:
            raise ClosedError("this vector env was closed by another thread while this one waited for it")
        for worker in self._workers:
            self._raise_crash(worker)

    def process_ids(self) -> list[int | None]:
        return [os.getpid()] * self.num_workers

    def usage_at_start(self, host: int) -> Usage:
        return self._usage_at_start

    # ---- closing

    def close(self, limits: CloseLimits) -> list[Failure]:
        # In a forked child of the caller these threads do not exist.
        if self._closed or self._owner != os.getpid():
            return []
        self._closed = True
        if hasattr(self, "caller"):
            self.caller.closed = True
        # The garbage collector may run this in any thread, even in a worker's own.
        started = [worker for worker in self._workers if worker.thread.ident not in (None, threading.get_ident())]
        for worker in self._workers:
            if worker not in started:  # reads it once it comes to that
                self._send(worker.name.index, messages.Close())
        return end_threads(
            started,
            limits,
            send=lambda worker: self._send(worker.name.index, messages.Close()),
            doing=self._doing,
            count_pending=lambda worker: len(self._busy(worker)),
        )

    def _busy(self, worker: ThreadWorker) -> list[int]:
        """The envs of a thread that it has to step or reset first."""
        if not hasattr(self, "caller"):
            return []
        return [env for env in worker.envs if self.caller.is_pending(env) and not self.caller.finished(env)]

    def _doing(self, worker: ThreadWorker) -> str:
        answered = getattr(worker.last_reply, "number", 0) == self._number
        if not answered:
            return f"answering {self._calling}"
        return NOUNS.doing(getattr(self, "slab", None), worker.name.index, self._busy(worker))

    # ---- messages

    def _send(self, host: int, message: messages.Message) -> None:
        """Sends a message to a thread, and rings it where it may be asleep in the core."""
        self._workers[host].inbox.put(message)
        if hasattr(self, "caller"):
            self.caller.announce_message(host)

    def _take(self, kind: type[T], worker: ThreadWorker, deadline: float, doing: str) -> T:
        try:
            return self._wait_for(kind, worker, deadline)
        except TimeoutError:
            raise WorkerTimeout(worker.name, doing, f"start_timeout={self._start_timeout_s} s") from None

    def _wait_for(self, kind: type[T], worker: ThreadWorker, deadline: float | None) -> T:
        """The thread's reply of this kind; an Answer must be the one to the last call.

        Raises TimeoutError at the deadline, ClosedError, WorkerDied, UnknownMessage, and what building its envs raised.
        """
        while True:
            reply = worker.last_reply
            if isinstance(reply, Failure):
                raise to_exception(reply)
            earlier = isinstance(reply, messages.Answer) and reply.number != self._number
            if not (reply is None or earlier or isinstance(reply, _BEFORE[kind])):
                return messages.expect(kind, reply)
            left_s = _SLICE_S if deadline is None else min(_SLICE_S, max(0.0, deadline - time.monotonic()))
            try:
                worker.replied.get(timeout=left_s)
            except queue.Empty:
                self.watch(0.0)
                if deadline is not None and time.monotonic() >= deadline:
                    raise TimeoutError from None

    def _raise_crash(self, worker: ThreadWorker) -> None:
        if worker.crash is None:
            return
        doing = NOUNS.doing(getattr(self, "slab", None), worker.name.index, [])
        self.close(AT_ONCE)
        cause = f"{type(worker.crash).__name__}: {worker.crash}"
        raise WorkerDied(worker.name, doing, None, cause, is_thread=True) from worker.crash
