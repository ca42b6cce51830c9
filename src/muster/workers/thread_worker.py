"""A worker of the thread backend: the thread, and how it is ended."""

from __future__ import annotations

import _thread
import contextlib
import ctypes
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

from muster.recipes.recipe import Recipe
from muster.transport.mail import Mail
from muster.worker_info import WorkerInfo, worker_info_context
from muster.workers.deaths import NOUNS
from muster.workers.env_host import EnvHost
from muster.workers.failures import Failure
from muster.workers.message_loop import MessageLoop
from muster.workers.messages import Closed, EnvsBuilt, Message

_log = logging.getLogger("muster")
# How long a thread may take to finish its current work when the vector env closes, and then to end by an interrupt.
# Together under 2 s: after Ctrl-C nobody waits longer.
_GRACE_S = 1.0
_INTERRUPT_S = 0.5


class _ThreadHost(EnvHost):
    """An env host that calls `before_close` when it is about to close its envs."""

    before_close: Callable[[], None]

    def close(self) -> list[Failure]:
        self.before_close()
        return super().close()


class ThreadWorker:
    """One thread and the envs that it steps. Messages to the thread go into `inbox`.

    The worker holds no reference to the vector env, so that a vector env that nobody uses is collected and closed.
    together: the recipes of all threads.
    last_reply: readers leave it in place, so that a wait that Ctrl-C ends loses nothing. `replied` receives an item
    with each reply, to wait for.
    closes: whether the thread is closing its envs, or has ended.  failures: the errors that closing raised.

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
        self._interrupting = threading.Lock()
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
        try:
            with worker_info_context(self.env_host.info):
                try:
                    self._run()
                except SystemExit:  # an interrupt between the steps of two envs
                    self.failures += self.env_host.close()
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
        if isinstance(reply, Closed):
            self.failures += reply.failures
        else:
            self.last_reply = reply
            self.replied.put(None)


def end_threads(workers: Sequence[ThreadWorker], timeout_s: float) -> list[Failure]:
    """Waits for threads that `Close` was sent to, and interrupts those that hang; returns what ``env.close()`` raised.

    A thread that is still busy with other work has `_GRACE_S`, a thread that closes its envs `timeout_s`.
    """
    # Threads in the caller's own process always have time to close, even after an error or with a timeout of 0.
    busy_until, deadline = time.monotonic() + _GRACE_S, time.monotonic() + timeout_s
    try:
        while not all(worker.closes for worker in workers) and time.monotonic() < busy_until:
            time.sleep(0.002)
    finally:  # also when another Ctrl-C ends the wait
        _interrupt(workers, lambda worker: not worker.closes)
    deadline = max(deadline, time.monotonic() + _INTERRUPT_S)
    try:
        for worker in workers:
            if worker.closes:
                worker.thread.join(max(0.0, deadline - time.monotonic()))
    finally:
        _interrupt(workers, lambda worker: worker.closes and worker.thread.is_alive())
    failures: list[Failure] = []
    for worker in workers:
        if worker.thread.is_alive():
            _log.warning("%s is left behind: it is in a native call that does not return.", worker.name)
        else:
            failures += worker.failures
    return failures


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
