"""The end of worker processes: all are asked to close their envs, then waited for together."""

from __future__ import annotations

import select
import time
from collections.abc import Callable, Iterable, Sequence

from muster.hosts.failures import Failure
from muster.pool.close_limits import LEAST_S, CloseLimits, CloseNotice, CloseProgress
from muster.pool.messages import Answer, Attached, Closed, ClosingEnv, EnvsBuilt, Unpacking, expect
from muster.pool.place import WorkerHandle, python_stacks
from muster.transport.channel import ChannelClosed

_SLICE_S, _BUSY_SLICE_S = 0.05, 0.002
# Replies that may come before: a wait for them may have been interrupted, or a replacement is still starting.
_BEFORE_CLOSED = (Unpacking, EnvsBuilt, Attached)


class ClosingWorkers:
    """Asks workers to close their envs, and waits for each as long as `limits` allow.

    send: sends a worker the message `Close`; raises TimeoutError where the worker cannot take it yet, ChannelClosed.
    on_slice: called now and then while it waits.
    doing: what a worker is busy with, in words.  count_pending: the number of envs that it has to step or reset first.
    calls: the indices of the workers that owe the answer to a call.
    failures: what ``env.close()`` raised.  cuts: reports of the workers that were killed.
    """

    def __init__(
        self,
        workers: Sequence[WorkerHandle],
        limits: CloseLimits,
        *,
        send: Callable[[WorkerHandle], None],
        doing: Callable[[WorkerHandle], str],
        count_pending: Callable[[WorkerHandle], int],
        calls: Iterable[int],
        on_slice: Callable[[], None],
    ) -> None:
        self._limits, self._on_slice = limits, on_slice
        self._send, self._doing, self._count_pending = send, doing, count_pending
        began = time.monotonic()
        self._owed = [worker for worker in workers if not worker.process.has_ended()]
        self._progress = {worker.index: _progress_of(worker, limits, began) for worker in self._owed}
        self._pending = {worker.index: count_pending(worker) for worker in self._owed}
        self._calls = set(calls)
        self._calls_until = began + limits.call_s
        self._unasked = list(self._owed)
        self._ended_channels: set[int] = set()
        self._notice = CloseNotice(limits, began)
        self.failures: list[Failure] = []
        self.cuts: list[str] = []

    def ask(self) -> None:
        """Sends `Close`, once, to each worker that has done what it was asked for before."""
        self._unasked = [worker for worker in self._unasked if not self._is_asked(worker)]

    def wait(self) -> None:
        """Waits until all have ended; kills those that are late. Ctrl-C ends the wait, and kills none."""
        while self._owed:
            self.ask()
            self._listen()
            self._on_slice()
            now = time.monotonic()
            self._kill_late(now)
            progress = [self._progress[worker.index] for worker in self._owed]
            self._notice.check(now, progress, lambda place: self._doing(self._owed[place]))
        self.failures.sort(key=lambda failure: failure.env_index)

    def _is_asked(self, worker: WorkerHandle) -> bool:
        # A worker reads a message before it begins the next step. One that starts has no steps to end.
        if self._pending[worker.index] and worker.starting_until is None:
            return False
        try:
            self._send(worker)
        except TimeoutError:
            return False
        except ChannelClosed:  # its process ends
            pass
        return True

    def _listen(self) -> None:
        """Takes what the workers report, for a short time."""
        poller, by_fd = select.poll(), {}
        for worker in self._owed:
            ends = [worker.process.fileno()]
            if worker.index not in self._ended_channels:
                ends.append(worker.channel.fileno())
            for fd in ends:
                by_fd[fd] = worker
                poller.register(fd, select.POLLIN)
        soonest = min(self._progress[worker.index].until for worker in self._owed)
        slice_s = min(_BUSY_SLICE_S if self._unasked else _SLICE_S, max(0.0, soonest - time.monotonic()))
        ready = {by_fd[fd].index: by_fd[fd] for fd, _ in poller.poll(slice_s * 1000)}
        for worker in ready.values():
            self._take_messages(worker)
            if worker.process.has_ended():
                self._owed.remove(worker)

    def _take_messages(self, worker: WorkerHandle) -> None:
        progress = self._progress[worker.index]
        try:
            while worker.index not in self._ended_channels:
                match message := worker.channel.recv(0.0):
                    case ClosingEnv(i):
                        progress.begins(i)
                    case Closed(failures):
                        self.failures += failures
                        progress.ends()
                    case Answer():
                        self._calls.discard(worker.index)
                    case Failure():  # a replacement that could not build its envs waits to be killed
                        worker.process.kill()
                    case _ if not isinstance(message, _BEFORE_CLOSED):
                        expect(Closed, message)
        except TimeoutError:
            pass
        except ChannelClosed:
            self._ended_channels.add(worker.index)

    def _kill_late(self, now: float) -> None:
        for worker in self._owed:
            if not self._progress[worker.index].begun:
                self._note_steps(worker)
        late = [worker for worker in self._owed if now >= self._progress[worker.index].until]
        if now >= self._calls_until and any(map(self._owes_answer, self._owed)):
            late = list(self._owed)
        # Of a worker that still builds its envs, nothing is lost.
        told = [one for one in late if one.starting_until is None or self._progress[one.index].begun]
        doing = [self._doing(worker) for worker in told]
        stacks = python_stacks([worker.process for worker in told])
        for worker in late:
            self._owed.remove(worker)
            self._take_messages(worker)  # asking for stacks takes time, in which a worker may have gone on
        for worker, words, stack in zip(told, doing, stacks, strict=True):
            progress = self._progress[worker.index]
            # Where hardly any time was given, a process that only has to end is not worth a word.
            if not worker.process.has_ended() and (progress.left or self._limits.in_all_s > LEAST_S):
                self.cuts.append(progress.cut("killed", words, stack))
        for worker in late:
            worker.process.kill()

    def _owes_answer(self, worker: WorkerHandle) -> bool:
        index = worker.index
        return not self._progress[index].begun and (self._pending[index] > 0 or index in self._calls)

    def _note_steps(self, worker: WorkerHandle) -> None:
        if (pending := self._count_pending(worker)) != self._pending[worker.index]:
            self._pending[worker.index] = pending
            self._progress[worker.index].goes_on()


def _progress_of(worker: WorkerHandle, limits: CloseLimits, began: float) -> CloseProgress:
    envs = worker.nouns.envs[worker.index] if worker.nouns.envs else worker.envs
    limits = limits if worker.starting_until is None else limits.hurried()
    return CloseProgress(worker.name, envs, limits, began, len(worker.envs))
