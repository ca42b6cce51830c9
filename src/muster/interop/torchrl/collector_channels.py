"""The worker processes behind a `MultiSyncCollector` or `MultiAsyncCollector`, and how TorchRL's loops speak to them.

These loops send messages to pipes, receive answers from them, and take batches from a queue. Pipes and queue are
objects of this file, which speak to Muster's pool.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from muster._core import map_fd
from muster.errors import NotPendingError, SpecMismatch, WaitTimeout
from muster.interop.torchrl.collector_worker import FLAG_BYTES, Command, Told
from muster.interop.torchrl.hosting import PoolOptions, pickled, started
from muster.pool.closing import in_all
from muster.recipes.recipe import Recipe
from muster.rollout.processes.shared_weights import SharedWeights
from muster.transport.big_arrays import memfd


class Files:
    """The files in memory that a pool shares with its workers: flags, and the weights of each worker's policy."""

    def __init__(self, num_workers: int) -> None:
        self._fds = [memfd("flags"), *(memfd("weights") for _ in range(num_workers))]
        self._finalizer = weakref.finalize(self, _close_all, self._fds)
        os.ftruncate(self._fds[0], FLAG_BYTES)
        self.flags = map_fd(fd=self._fds[0], size=FLAG_BYTES)
        self.weights_fds = self._fds[1:]
        self.paths = [f"/proc/{os.getpid()}/fd/{fd}" for fd in self._fds]

    def close(self) -> None:
        """Closes the files; who has mapped them keeps the memory."""
        self._finalizer()


class CollectorPool:
    """The worker processes of one collector of TorchRL's, each of which has built a collector."""

    def __init__(self, recipes: Sequence[Recipe], files: Files, *, context: str, num_threads: int) -> None:
        self.num_workers = len(recipes)
        self._context = context
        self._files = files
        options = PoolOptions(memory_check="warn", name="num_workers")
        _, self.vector_env = started(recipes, options, context=context, num_threads=num_threads)
        self._doing: dict[int, Command] = {}  # by worker that has not answered
        self._pausing: set[int] = set()
        self._ready: deque[tuple[int, Told | None, Any]] = deque()  # by worker what it has told, None for a pause
        self._trees: dict[int, Any] = {}
        self._handed: set[int] = set()  # workers whose trees TorchRL's loop has
        self._batches, self._updates = [0] * self.num_workers, [0] * self.num_workers
        self._noted: dict[int, tuple[Any, str]] = {}
        self._answers: dict[int, deque[Any]] = {worker: deque() for worker in range(self.num_workers)}
        facts = self.vector_env.call("facts")
        self._uses_buffers = [one.uses_buffers for one in facts]
        self.loop_reason: str = next((one.loop_reason for one in facts if one.loop_reason), "")
        self._weights = [SharedWeights(one.weights, fd) for one, fd in zip(facts, files.weights_fds, strict=True)]

    # ---- weights

    def publish(self, worker: int, weights: Mapping[str, Tensor], *, counts: bool = True) -> None:
        """Lets a worker act with these weights from its next batch on; those without a new value stay.

        counts: whether this is another version of the policy. Raises SpecMismatch.
        """
        self.look()
        shared = self._weights[worker]
        own = shared.read()
        new = {name: tensor for name, tensor in weights.items() if tensor.numel()}
        if unknown := sorted(new.keys() - own.keys()):
            raise SpecMismatch(
                f"the weights are not those of the policy in collector {worker}: unknown {unknown[:5]}, expected "
                f"{sorted(own)[:5]}"
            )
        self._updates[worker] += counts
        shared.write({**own, **new}, str(self._updates[worker]).encode())

    # ---- batches

    def begin(self, worker: int, command: Command) -> None:
        """Has a worker collect. What it has collected before, and nobody has taken, is dropped."""
        self._settle([worker])
        self._drop([worker])
        self._send(worker, command)

    def pause(self, worker: int) -> None:
        """Ends a free run after the current batch; the queue tells when it has ended."""
        self._pausing.add(worker)
        self._files.flags[worker] = 1

    def look(self) -> None:
        """Raises what a worker in a free run has raised, or died of, since somebody last asked it for anything."""
        while any(command == Command.FREELY for command in self._doing.values()):
            try:
                self._receive(0.0)
            except WaitTimeout:
                return

    def take(self, timeout: float | None) -> tuple[Any, Any]:
        """What TorchRL's workers put into their queue. Raises WaitTimeout after `timeout` s, NotPendingError."""
        while not self._ready:
            if not self._doing:
                raise NotPendingError("no worker collects; iterate the collector, or start() it")
            self._receive(timeout)
        worker, told, info = self._ready.popleft()
        return (worker, "paused") if told is None else self._result(worker, told, info)

    def _send(self, worker: int, command: Command) -> None:
        self._files.flags[worker] = 0
        self.vector_env.send(np.array([[command]], np.uint8), [worker])
        self._doing[worker] = command

    def _receive(self, timeout: float | None) -> None:
        try:
            batch = self.vector_env.recv(1, timeout)
        except Exception:
            if not self.vector_env.num_pending:
                self._doing.clear()
            raise
        has_info = batch.infos.get("_batch")
        workers = batch.env_ids.tolist()
        # In the order in which they began, which `_doing` keeps: none is overtaken by another's later batch.
        rows = {worker: row for row, worker in enumerate(workers)}
        for worker, row in [(worker, rows[worker]) for worker in self._doing if worker in rows]:
            command = self._doing.pop(worker)
            if command == Command.FREELY:
                if worker in self._pausing:
                    self._ready.append((worker, None, None))
                self._pausing.discard(worker)
                continue
            info: Any = batch.infos["batch"][row].content if has_info is not None and has_info[row] else None
            told = Told(int(batch.obs[row, 0]))
            if told == Told.LAID_OUT:
                self._trees[worker] = info.mapped()
                self._handed.discard(worker)
            self._ready.append((worker, told, info))

    def _result(self, worker: int, told: Told, info: Any) -> tuple[Any, int]:
        """What TorchRL's worker puts into its queue: a batch and the worker's index where it is new, or the index."""
        number = self._batches[worker]
        self._batches[worker] += 1
        if told == Told.STORED:
            return worker, number
        batch = info if told == Told.MAILED else self._trees[worker]
        if not self._uses_buffers[worker]:
            return (batch if told == Told.MAILED else batch.clone(), worker), number
        if told != Told.MAILED and worker in self._handed:
            return worker, number
        self._handed = self._handed - {worker} if told == Told.MAILED else self._handed | {worker}
        return (batch, worker), 0

    def hand_anew(self) -> None:
        """Lets `take` return whole batches again, not only workers' indices: a new loop begins."""
        self._handed.clear()

    def _settle(self, workers: Iterable[int]) -> None:
        """Waits until these workers have done what they do."""
        for worker in workers:
            while worker in self._doing:
                if self._doing[worker] == Command.FREELY:
                    self._files.flags[worker] = 1
                self._receive(None)

    def _drop(self, workers: Iterable[int]) -> None:
        """Drops the batches of these workers that nobody has taken."""
        gone = set(workers)
        self._ready = deque(one for one in self._ready if one[0] not in gone)

    # ---- messages

    def note(self, worker: int, message: tuple[Any, str]) -> None:
        """Notes a message, which `answer` sends."""
        self._noted[worker] = message

    def has_answer(self, worker: int) -> bool:
        """Whether `answer` returns one."""
        return worker in self._noted or bool(self._answers[worker])

    def answer(self, worker: int) -> Any:
        """The oldest answer that nobody has taken; sends what is noted first. Raises what the worker has raised."""
        if worker in self._noted:
            self._exchange()
        return self._answers[worker].popleft()

    def _exchange(self) -> None:
        noted, self._noted = self._noted, {}
        freely = [worker for worker, command in self._doing.items() if command == Command.FREELY]
        for worker in freely:
            self._files.flags[worker] = 1
        self._settle(range(self.num_workers))
        self._drop(worker for worker, (_, name) in noted.items() if name == "reset")
        pickled = {worker: self._pickled(worker, message) for worker, message in noted.items()}
        for worker, answer in enumerate(self.vector_env.call("perform", pickled)):
            if answer is not None:
                self._answers[worker].append(answer)
        for worker in freely:
            self._send(worker, Command.FREELY)

    def _pickled(self, worker: int, message: tuple[Any, str]) -> bytes:
        return pickled(message, f"what {message[1]} sends to collector {worker}", message[0], context=self._context)

    # ---- closing

    def close(self, timeout: float) -> None:
        """Closes the envs and ends the processes, after at most this many seconds."""
        self._files.flags[:] = 1
        try:
            self.vector_env.close_within(in_all(timeout, f"timeout={timeout:g}"))
        finally:
            self._files.close()


class Pipe:
    """The connection to one worker, as TorchRL's code uses it."""

    def __init__(self, pool: CollectorPool, worker: int, before_batch: Callable[[int], None]) -> None:
        self._pool, self._worker, self._before_batch = pool, worker, before_batch

    def send(self, message: tuple[Any, str]) -> None:
        """Sends data and the name of a message: begins what collects, and notes what is answered."""
        name = message[1]
        if name in _COMMANDS:
            self._before_batch(self._worker)
            self._pool.begin(self._worker, _COMMANDS[name])
        elif name == "pause":
            self._pool.pause(self._worker)
        else:
            self._pool.note(self._worker, message)

    def recv(self) -> Any:
        """The answer to the oldest message that has one."""
        return self._pool.answer(self._worker)

    def poll(self, timeout: float | None = 0.0) -> bool:
        """Whether there is an answer, or will be."""
        return self._pool.has_answer(self._worker)

    def close(self) -> None:
        """Does nothing: the pool is closed as a whole."""


_COMMANDS = {
    "continue": Command.COLLECT,
    "continue_random": Command.COLLECT_RANDOMLY,
    "run_free": Command.FREELY,
    "restart": Command.FREELY,
}


@dataclass(frozen=True)
class Queue:
    """The queue of batches, as TorchRL's code uses it."""

    pool: CollectorPool

    def get(self, block: bool = True, timeout: float | None = None) -> tuple[Any, int]:
        """The next batch. Raises TimeoutError, NotPendingError, and what a worker has raised."""
        return self.pool.take(timeout if block else 0.0)

    def full(self) -> bool:
        """False: what nobody has taken is dropped where it would be in the way."""
        return False

    def close(self) -> None:
        """Does nothing: the pool is closed as a whole."""


@dataclass(frozen=True)
class WorkerProcess:
    """The process of a worker, as TorchRL's code looks at it: to it, it is none of its own. Muster reports deaths."""

    pool: CollectorPool

    _closed = True

    def is_alive(self) -> bool:
        """Whether the pool is still open."""
        return not self.pool.vector_env.closed


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
