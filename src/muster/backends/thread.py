"""The thread backend: threads of the calling process step the envs, for envs that release the GIL or share objects."""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

from muster.backends.base import Backend, CallerOptions, make_caller
from muster.backends.deaths import describe_doing, name_envs
from muster.backends.share import EnvCall, EnvFacts, Failure, Share, ShareOptions, check_one_per_process, to_exception
from muster.errors import WaitTimeout, WorkerDied, WorkerTimeout
from muster.recipe import Recipe, WorkerInfo, worker_info_context
from muster.spec import Array
from muster.transport.mail import LocalMail, Mail
from muster.transport.slab import Plan, Slab, split_evenly

_log = logging.getLogger("muster")
_GRACE_S = 1.0
_INTERRUPT_S = 2.0


class _Worker:
    """One thread and its share of the envs. What it is told goes into `inbox`, what it answers comes out of `outbox`.

    It holds no reference to the vector env, so that a vector env nobody uses any more is collected and closed.
    """

    def __init__(self, share: Share) -> None:
        self.share = share
        self.inbox: queue.SimpleQueue[tuple[Any, ...]] = queue.SimpleQueue()
        self.outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.crash: BaseException | None = None
        # A daemon: a step that never ends must not keep the interpreter from ending.
        name = f"muster-worker-{share.info.worker_index}"
        self.thread = threading.Thread(target=self._main, name=name, daemon=True)

    @property
    def envs(self) -> range:
        return range(self.share.first_env, self.share.first_env + len(self.share.recipes))

    def _main(self) -> None:
        try:
            with worker_info_context(self.share.info):
                self._run()
        except BaseException as error:  # told by the caller's watch: nobody reads a thread's traceback
            self.crash = error

    def _run(self) -> None:
        failure = self.share.build()
        self.outbox.put(failure or self.share.facts())
        if failure:
            return
        # The core returns from stepping when a message has come.
        while self._answer(*self.inbox.get()):
            self.share.stepper.run()

    def _answer(self, kind: str, *arguments: Any) -> bool:
        """False once the thread is to end."""
        if kind == "attach":
            self.share.attach(*arguments)
            self.outbox.put("attached")
        elif kind == "reset":
            self.share.reset(*arguments)
        elif kind == "restart":
            self.share.restart(*arguments)
        elif kind == "call":
            self.outbox.put(self.share.call(*arguments))
        elif kind == "set_attr":
            self.outbox.put(self.share.set_attr(*arguments))
        else:
            self.outbox.put(self.share.close())
        return kind != "close"


class ThreadBackend(Backend):
    """Workers 0 to W-1 step the lines of the same number. Arguments reach the envs as they are."""

    def __init__(self, recipes: Sequence[Recipe], num_workers: int, start_timeout_s: float) -> None:
        self.first_envs = split_evenly(len(recipes), num_workers)
        self._start_timeout_s = start_timeout_s
        self._mail = LocalMail()
        self._owner = os.getpid()
        self._closed = False
        self._workers = []
        for line, (first, last) in enumerate(zip(self.first_envs, self.first_envs[1:], strict=False)):
            info = WorkerInfo(None, line, len(recipes), num_workers, seed=None)
            self._workers.append(_Worker(Share(recipes[first:last], info, first)))

    @property
    def num_workers(self) -> int:
        return len(self._workers)

    # ---- starting

    def start(self) -> list[EnvFacts]:
        facts: list[EnvFacts] = []
        deadline = time.monotonic() + self._start_timeout_s
        try:
            # One after the other: constructors are rarely written for threads, and warning filters are not either.
            for worker in self._workers:
                worker.thread.start()
                answer = self._take(worker, deadline, "building its envs")
                if isinstance(answer, Failure):
                    raise to_exception(answer)
                facts += [one or answer[0] for one in answer]
                check_one_per_process(worker.share.envs[0], self.first_envs[-1])
        except BaseException:
            self.close(1.0)
            raise
        return facts

    def attach(self, plan: Plan, shares: ShareOptions, caller: CallerOptions) -> None:
        self.slab = Slab(plan)
        self.caller = make_caller(self.slab, caller)
        deadline = time.monotonic() + self._start_timeout_s
        for line, worker in enumerate(self._workers):
            worker.inbox.put(("attach", self.slab, line, self._mail, shares))
            self._take(worker, deadline, "mapping the slab")

    # ---- commands

    def mail_of(self, line: int) -> Mail:
        return self._mail

    def reset(self, env_ids: Array, seeds: Sequence[int | None], options: dict[str, Any] | None) -> None:
        self.caller.request_resets(env_ids)
        for line, worker in enumerate(self._workers):
            mine = [(env, seed) for env, seed in zip(env_ids.tolist(), seeds, strict=True) if env in worker.envs]
            if mine:
                self._tell(line, "reset", [env for env, _ in mine], [seed for _, seed in mine], options)

    def restart(self, env: int, seed: int | None, options: Any, *, resets_now: bool, rebuilds: bool) -> bool:
        self._tell(self.caller.line_of(env), "restart", env, seed, options, resets_now, rebuilds)
        return False

    def call_async(self, name: str | EnvCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._results: list[list[Any]] = []
        for line in range(self.num_workers):
            self._tell(line, "call", name, args, kwargs)

    def call_wait(self, timeout_s: float | None) -> list[Any]:
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while len(self._results) < self.num_workers:
            line = len(self._results)
            try:
                self._results.append(self._wait_for(self._workers[line], deadline))
            except queue.Empty:
                raise WaitTimeout(
                    f"call_wait(timeout={timeout_s}): worker {line} has not answered; the call stays pending"
                ) from None
        return [result for results in self._results for result in results]

    def set_attr(self, name: str, values: Sequence[Any]) -> list[Failure | None]:
        self._results = []
        for line, worker in enumerate(self._workers):
            self._tell(line, "set_attr", name, [values[env] for env in worker.envs])
        return self.call_wait(None)

    def watch(self, waited_s: float) -> None:
        for worker in self._workers:
            self._raise_crash(worker)

    def process_ids(self) -> list[int | None]:
        return [os.getpid()] * self.num_workers

    # ---- closing

    def close(self, timeout_s: float) -> list[Failure]:
        # In a forked child of the caller the threads do not exist.
        if self._closed or self._owner != os.getpid():
            return []
        self._closed = True
        failures: list[Failure] = []
        if hasattr(self, "caller"):
            self.caller.closed = True
            for line in range(self.num_workers):
                self._tell(line, "close")
        else:
            for worker in self._workers:
                worker.inbox.put(("close",))
        # What lives in the caller's own process is closed with care, also after an error.
        deadline = time.monotonic() + max(timeout_s, _GRACE_S)
        # The garbage collector may run this in any thread, a worker's own among them.
        started = [worker for worker in self._workers if worker.thread.ident not in (None, threading.get_ident())]
        for worker in started:
            worker.thread.join(max(0.0, deadline - time.monotonic()))
        for worker in started:
            if worker.thread.is_alive():
                _interrupt(worker)
            if not worker.thread.is_alive():
                failures += _last_answer(worker)
        return failures

    # ---- messages

    def _tell(self, line: int, *message: Any) -> None:
        """Sends a message to a thread that may be asleep in the core."""
        self._workers[line].inbox.put(message)
        self.caller.announce_message(line)

    def _take(self, worker: _Worker, deadline: float, doing: str) -> Any:
        try:
            return self._wait_for(worker, deadline)
        except queue.Empty:
            raise WorkerTimeout(
                f"{_name(worker)} did not answer within start_timeout={self._start_timeout_s} s while {doing}. "
                'A thread cannot be killed, so it is left behind; backend="process" would end it.',
                worker_index=worker.share.info.worker_index,
                env_indices=tuple(worker.envs),
            ) from None

    def _wait_for(self, worker: _Worker, deadline: float | None) -> Any:
        """The thread's next answer. Raises queue.Empty at the deadline, WorkerDied."""
        while True:
            left_s = 0.05 if deadline is None else min(0.05, max(0.0, deadline - time.monotonic()))
            try:
                return worker.outbox.get(timeout=left_s)
            except queue.Empty:
                self._raise_crash(worker)
                if deadline is not None and time.monotonic() >= deadline:
                    raise

    def _raise_crash(self, worker: _Worker) -> None:
        if worker.crash is None:
            return
        line = worker.share.info.worker_index
        slab = getattr(self, "slab", None)
        doing = describe_doing(slab, line, [])
        self.close(0.0)
        raise WorkerDied(
            f"{_name(worker)}, a thread, ended by {type(worker.crash).__name__}: {worker.crash}. It was {doing}. "
            "The vector env is closed.",
            worker_index=line,
            env_indices=tuple(worker.envs),
        ) from worker.crash


def _name(worker: _Worker) -> str:
    return f"worker {worker.share.info.worker_index} ({name_envs(worker.envs)})"


def _interrupt(worker: _Worker) -> None:
    """Raises SystemExit in a thread that does not come back; that reaches Python code, not a native call."""
    deadline = time.monotonic() + _INTERRUPT_S
    # Again and again: the thread's next env may be no better. A thread that still runs Python code when the interpreter
    # ends would crash the process.
    while worker.thread.is_alive() and time.monotonic() < deadline:
        ident = ctypes.c_ulong(worker.thread.ident or 0)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(SystemExit))
        worker.thread.join(0.02)
    if worker.thread.is_alive():
        _log.warning("%s is left behind: it is in a native call that does not return.", _name(worker))


def _last_answer(worker: _Worker) -> list[Failure]:
    """What ``env.close()`` raised; an answer that nobody waited for may stand before it."""
    answer: Any = None
    while not worker.outbox.empty():
        answer = worker.outbox.get()
    return [one for one in answer if isinstance(one, Failure)] if isinstance(answer, list) else []
