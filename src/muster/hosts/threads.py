"""A worker of the thread backend: the thread, and how it is ended."""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from muster.hosts.env_host import EnvHost
from muster.hosts.env_resident import MessageLoop
from muster.hosts.failures import Failure
from muster.pool.close_limits import CloseLimits, CloseNotice, CloseProgress, warn_of_cuts
from muster.pool.deaths import NOUNS
from muster.pool.messages import Closed, ClosingEnv, EnvsBuilt, Message
from muster.recipes.recipe import Recipe
from muster.transport.mail import Mail
from muster.worker_info import WorkerInfo, worker_info_context

# How long a thread may take at least to finish its current work when the vector env closes, and then to end by an
# interrupt. Together under 2 s: after Ctrl-C nobody waits longer.
_GRACE_S = 1.0
_INTERRUPT_S = 0.5


class _ThreadHost(EnvHost):
    """An env host that calls `before_close` when it is about to close its envs."""

    before_close: Callable[[], None]

    def close(self, on_closing: Callable[[int], None] | None = None) -> list[Failure]:
        self.before_close()
        return super().close(on_closing)


class ThreadWorker:
    """One thread and the envs that it steps. Messages to the thread go into `inbox`.

    The worker holds no reference to the vector env, so that a vector env that nobody uses is collected and closed.
    together: the recipes of all threads.
    last_reply: readers leave it in place, so that a wait that Ctrl-C ends loses nothing. `replied` receives an item
    with each reply, to wait for.
    closes: whether the thread is closing its envs, or has ended.  closing: the number of the env that it closes then.
    failures: the errors that closing raised.

    Event and the other parts of `threading` that are written in Python are not used: Ctrl-C in a wait may break them.
    """

    def __init__(
        self, recipes: Sequence[Recipe], info: WorkerInfo, first_env: int, mail: Mail, together: Sequence[Recipe]
    ) -> None:
        self.env_host = _ThreadHost(recipes, info, first_env, together=together)
        self.env_host.before_close = self._shield
        self.envs = range(first_env, first_env + len(recipes))
        self.name = NOUNS.name(info.worker_index, self.envs)
        self._mail = mail
        self.inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self.last_reply: Message | Failure | None = None
        self.replied: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.failures: list[Failure] = []
        self.crash: BaseException | None = None
        self.closes = False
        self.closing = 0
        self._interrupting = threading.Lock()
        self._numpy_errors = np.geterr(), np.geterrcall()  # a new thread has NumPy's own
        # A daemon: an endless step must not keep the interpreter from ending.
        name = f"muster-worker-{info.worker_index}"
        self.thread = threading.Thread(target=self._main, name=name, daemon=True)

    def interrupt_if(self, hangs: Callable[[ThreadWorker], bool]) -> None:
        """Raises SystemExit in the thread if it hangs; that interrupts Python code, not a native call."""
        with self._interrupting:
            if hangs(self):
                _raise_exit_in(self.thread.ident)

    def _shield(self) -> None:
        """Sets `closes`: from now on the thread is interrupted only where closing hangs. Drops an earlier interrupt."""
        while not self.closes:
            with contextlib.suppress(SystemExit):
                with self._interrupting:
                    self.closes = True
                _let_exit_come_up()

    def _main(self) -> None:
        modes, errcall = self._numpy_errors
        np.seterrcall(errcall)
        np.seterr(**modes)
        try:
            with worker_info_context(self.env_host.info):
                try:
                    self._run()
                except SystemExit:  # an interrupt between the steps of two envs
                    self.failures += self.env_host.close(lambda i: self._reply(ClosingEnv(i)))
        except BaseException as error:  # reported by the caller's `watch`: nobody reads a thread's traceback
            self.crash = error
        finally:
            self.closes = True

    def _run(self) -> None:
        failure = self.env_host.build()
        self._reply(failure or EnvsBuilt(self.env_host.facts()))
        if not failure:
            MessageLoop(self.env_host, self._mail, self._reply, lambda slab: slab).run(self.inbox.get)

    def _reply(self, reply: Message | Failure) -> None:
        match reply:
            case ClosingEnv(i):
                self.closing = i
            case Closed(failures):
                self.failures += failures
            case _:
                self.last_reply = reply
                self.replied.put(None)

    def stack(self) -> str:
        """The thread's Python stack."""
        frame = sys._current_frames().get(self.thread.ident or 0)
        return "".join(traceback.format_stack(frame)).rstrip() if frame is not None else "(none: it has ended)"


def end_threads(
    workers: Sequence[ThreadWorker],
    limits: CloseLimits,
    *,
    send: Callable[[ThreadWorker], None],
    doing: Callable[[ThreadWorker], str],
    count_pending: Callable[[ThreadWorker], int],
) -> list[Failure]:
    """Waits for threads to close their envs, and interrupts those that hang; returns what ``env.close()`` raised.

    send: sends a thread the message `Close`.  doing: what a thread is busy with, in words.
    count_pending: the number of envs that it has to step or reset first.
    """
    # Threads in the caller's own process always have time to close, even after an error or with a timeout of 0.
    longer = replace(
        limits,
        env_s=max(limits.env_s, _INTERRUPT_S),
        in_all_s=max(limits.in_all_s, _GRACE_S + _INTERRUPT_S),
        busy_s=max(limits.busy_s, _GRACE_S),
    )
    ending = _EndingThreads(workers, longer, send, doing, count_pending if limits.in_all_s > 0.0 else lambda _: 0)
    try:
        ending.wait()
    finally:  # also when another Ctrl-C ends the wait
        ending.ask(workers)
        for hangs in (lambda worker: not worker.closes, lambda worker: worker.thread.is_alive()):
            _interrupt(workers, hangs)
    if not limits.terminates:
        warn_of_cuts(ending.cuts)
    cut = ending.cut_envs
    ended = [worker for worker in workers if not worker.thread.is_alive()]
    failures = [failure for worker in ended for failure in worker.failures]
    return [one for one in failures if not (one.env_index in cut and isinstance(one.exception, SystemExit))]


class _EndingThreads:
    """The wait of `end_threads`. cuts: reports of what was interrupted.  cut_envs: those whose close was."""

    def __init__(
        self,
        workers: Sequence[ThreadWorker],
        limits: CloseLimits,
        send: Callable[[ThreadWorker], None],
        doing: Callable[[ThreadWorker], str],
        count_pending: Callable[[ThreadWorker], int],
    ) -> None:
        began = time.monotonic()
        self._owed = list(workers)
        self._progress = {worker: CloseProgress(worker.name, worker.envs, limits, began) for worker in workers}
        self._seen: dict[ThreadWorker, int | None] = dict.fromkeys(workers)
        self._notice = CloseNotice(limits, began)
        self._send, self._doing, self._count_pending = send, doing, count_pending
        self._unasked = list(workers)
        self._pending = {worker: count_pending(worker) for worker in workers}
        self.cuts: list[str] = []
        self.cut_envs: set[int] = set()

    def ask(self, workers: Sequence[ThreadWorker]) -> None:
        """Sends `Close` to those of `workers` that it was not sent to yet."""
        for worker in workers:
            if worker in self._unasked:
                self._unasked.remove(worker)
                self._send(worker)

    def wait(self) -> None:
        """Returns once all threads have ended, but for those that no interrupt reaches."""
        while owed := [worker for worker in self._owed if worker.thread.is_alive()]:
            # A thread reads a message before it begins the next step.
            self.ask([worker for worker in owed if not self._pending[worker]])
            for worker in owed:
                if not worker.closes and (pending := self._count_pending(worker)) != self._pending[worker]:
                    self._pending[worker] = pending
                    self._progress[worker].goes_on()
                if worker.closes and worker.closing != self._seen[worker]:
                    self._seen[worker] = worker.closing
                    self._progress[worker].begins(worker.closing)
            now = time.monotonic()
            if late := [worker for worker in owed if now >= self._progress[worker].until]:
                self._cut(late)
                continue
            self._notice.check(now, [self._progress[worker] for worker in owed], lambda place: self._doing(owed[place]))
            time.sleep(0.002)  # not a join: a Ctrl-C in that makes Python 3.11 take the thread for ended

    def _cut(self, late: Sequence[ThreadWorker]) -> None:
        """Interrupts threads. One that was in a step closes its envs then, the others their next env."""
        at = {worker: (worker.closes, worker.closing) for worker in late}
        before = [(self._doing(worker), worker.stack()) for worker in late]

        def hangs(worker: ThreadWorker) -> bool:
            return worker.thread.is_alive() and (worker.closes, worker.closing) == at[worker]

        self.ask(late)
        _interrupt(late, hangs)
        for worker, (doing, stack) in zip(late, before, strict=True):
            progress = self._progress[worker]
            if hangs(worker):
                self._owed.remove(worker)
                verb = "left behind, in a native call that does not return,"
                self.cuts.append(progress.cut(verb, doing, stack))
            else:
                self.cuts.append(progress.cut("interrupted", doing, stack))
                if progress.begun:
                    self.cut_envs.add(progress.left[0])


def _interrupt(workers: Sequence[ThreadWorker], hangs: Callable[[ThreadWorker], bool]) -> None:
    """Interrupts the threads that hang, again and again until none does, for `_INTERRUPT_S` at most."""
    deadline = time.monotonic() + _INTERRUPT_S
    interrupted = False
    # Repeated because the thread's next env may hang, too. A thread that still runs Python code when the interpreter
    # ends would crash the process.
    try:
        while (hanging := [worker for worker in workers if hangs(worker)]) and time.monotonic() < deadline:
            interrupted = True
            for worker in hanging:
                worker.interrupt_if(hangs)
            hanging[0].thread.join(0.02)
    finally:
        if interrupted:
            _forget_exits()


def _raise_exit_in(ident: int | None) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(ident or 0), ctypes.py_object(SystemExit))


def _let_exit_come_up() -> None:
    """Gives an exception that was set for this thread the chance to be raised: at the latest after a call."""
    time.sleep(0)


def _forget_exits() -> None:
    """Clears Python's note of exceptions that were set for threads which ended, or hang, before they were raised.

    Before 3.13 Python has one such note for all threads, and clears it when any thread raises its exception. Until then
    Python 3.11 hangs in the next function that is profiled or traced, for example by a debugger.
    """

    def notice() -> None:
        with contextlib.suppress(SystemExit):
            _raise_exit_in(threading.get_ident())
            _let_exit_come_up()

    _thread.start_new_thread(notice, ())
