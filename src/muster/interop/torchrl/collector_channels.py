"""The worker processes behind a `MultiSyncCollector` or `MultiAsyncCollector`, and how TorchRL's loops speak to them.

These loops send messages to pipes, receive answers from them, and take batches from a queue. Pipes and queue are
objects of this file, which speak to Muster's pool.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from muster._core import map_fd
from muster.errors import ClosedError, ConfigError, NotPendingError, SpecMismatch, WaitTimeout
from muster.hosts.failures import Failure, not_rebuilt_here
from muster.hosts.recipe_plans import Recipes, about_of, plans_of
from muster.interop.starting import NOUNS, sealed, ways_of
from muster.interop.torchrl.collector_worker import FLAG_BYTES, Ask, CollectBy, CollectorPlan, Placed, Put, Way
from muster.pickling.interrupts import Uninterrupted
from muster.pool.closing import close_abandoned
from muster.pool.limits import Limits, in_all
from muster.pool.messages import Failed
from muster.pool.pool import Pool
from muster.pool.resources import MemoryPlan
from muster.pool.verbs import Answered, Hooks, Lost, Round
from muster.recipes.recipe import Recipe
from muster.rollout.replicas.shared_weights import SharedWeights, write_all
from muster.rollout.weights import Copies
from muster.transport.big_arrays import memfd
from muster.vector.raisers import original_error

# Imported once, before workers are forked from what has imported them.
PRELOADS = ("torch", "tensordict", "torchrl.collectors", "torchrl.envs")


class Files:
    """The files in memory that a pool shares with its workers: flags, and the weights of each worker's policy."""

    def __init__(self, num_workers: int) -> None:
        self._fds = [memfd("flags"), *(memfd("weights") for _ in range(num_workers))]
        self._finalizer = weakref.finalize(self, _close_all, self._fds)
        os.ftruncate(self._fds[0], FLAG_BYTES)
        self.flags = map_fd(fd=self._fds[0], size=FLAG_BYTES)
        self.weights_fds = self._fds[1:]
        self.paths = [f"/proc/{os.getpid()}/fd/{fd}" for fd in self._fds]

    def end_free_runs(self) -> bool:
        """Sets all flags. True, as a pool that closes asks: it may wait for the workers."""
        self.flags[:] = 1
        return True

    def close(self) -> None:
        """Closes the files; who has mapped them keeps the memory."""
        self._finalizer()


class _Work(Hooks):
    """The answers of the owner to the pool, see `Hooks`."""

    def raised(self, place: int, failed: Failed) -> BaseException:
        fields = failed.type_name, failed.message, failed.traceback, failed.exception
        return original_error([Failure(place, place, None, *fields, hint=failed.about)], 0)


class CollectorPool:
    """The worker processes of one collector of TorchRL's; each has built a collector."""

    def __init__(self, recipes: Sequence[Recipe], files: Files, *, context: str, num_threads: int) -> None:
        self.num_workers = count = len(recipes)
        self._context = context
        self._files = files
        self._interrupted = False
        self._pausing: set[int] = set()
        self._resuming: set[int] = set()  # workers that run free again once they have answered a message
        self._ready: deque[tuple[int, Placed | None]] = deque()  # by worker, None for a pause
        self._trees: dict[int, Any] = {}
        self._handed: set[int] = set()  # workers; TorchRL's loop has their trees
        self._batches = [0] * self.num_workers
        self._ways: dict[int, Way] = {}  # by worker that collects, in the order in which they were asked
        self._pool = _pool_of(recipes, files, context, num_threads)
        self._messages, self._collecting = self._pool.round(), self._pool.round()
        self._finalizer = weakref.finalize(self, close_abandoned, self._pool.close, files.end_free_runs)
        facts = self._pool.start(MemoryPlan(count, count, "warn") if count > 1 else None)
        self._pool.never_replaces()
        self._uses_buffers = [one.uses_buffers for one in facts]
        self.loop_reason: str = next((one.loop_reason for one in facts if one.loop_reason), "")
        self._weights = [SharedWeights(one.weights, fd) for one, fd in zip(facts, files.weights_fds, strict=True)]

    @property
    def closed(self) -> bool:
        """True if the pool is closed: by `close`, or since it has lost a worker."""
        return self._pool.closed

    # ---- weights

    def publish(self, weights: Mapping[int, Mapping[str, Tensor]], copies: Copies = (), *, counts: bool = True) -> None:
        """Lets workers act with these weights from their next batch on; those without a new value stay.

        copies: others, which are made together with these.  counts: whether this is another version of the policy.
        Raises SpecMismatch.
        """
        self.look()
        publications = []
        for worker, given in weights.items():
            shared = self._weights[worker]
            own, number = shared.read(), int(shared.beside()) + counts
            new = {name: tensor for name, tensor in given.items() if tensor.numel()}
            if unknown := sorted(new.keys() - own.keys()):
                raise SpecMismatch(
                    f"the weights are not those of the policy in collector {worker}: unknown {unknown[:5]}, expected "
                    f"{sorted(own)[:5]}"
                )
            publications.append((shared, {**own, **new}, str(number).encode()))
        write_all(publications, copies)

    # ---- batches

    def begin(self, worker: int, way: Way) -> None:
        """Has a worker collect. What it has collected before, and nobody has taken, is dropped."""
        self._settle(worker)
        self._drop(worker)
        self._resuming.discard(worker)
        self._collect(worker, way)

    def pause(self, worker: int) -> None:
        """Ends a free run after the current batch; the queue reports when it has ended."""
        self._pausing.add(worker)
        self._files.flags[worker] = 1

    def look(self) -> None:
        """Raises what a worker in a free run has raised, or died of, since somebody last asked it for anything."""
        while any(map(self._runs_free, range(self.num_workers))):
            try:
                self._receive(0.0)
            except WaitTimeout:
                return

    def take(self, timeout: float | None) -> tuple[Any, Any]:
        """The next entry of TorchRL's queue. Raises WaitTimeout after `timeout` s, NotPendingError."""
        ends = math.inf if timeout is None else time.monotonic() + timeout
        while not self._ready:
            left_s = None if timeout is None else max(0.0, ends - time.monotonic())
            if self._resuming:  # after a message that nobody awaited the answer of
                with self._noting_interrupts():
                    self._messages.wait(at_least=1, timeout_s=left_s, places=self._resuming)
                self._resume()
            if not self._ways and not self._resuming:
                raise NotPendingError("no worker collects; iterate the collector, or start() it")
            self._receive(left_s)
        worker, collected = self._ready.popleft()
        return (worker, "paused") if collected is None else self._result(worker, collected)

    def hand_anew(self) -> None:
        """Lets `take` return whole batches again, not only workers' indices: a new loop begins."""
        self._handed.clear()

    def _collect(self, worker: int, way: Way) -> None:
        self._files.flags[worker] = 0
        self._ways[worker] = way  # first: what has begun is waited for
        self._send(self._collecting, worker, CollectBy(way), f"in step of env {worker}")

    def _result(self, worker: int, collected: Placed) -> tuple[Any, int]:
        """An entry of TorchRL's queue: a batch and the worker's index where it is new, or the index."""
        number = self._batches[worker]
        self._batches[worker] += 1
        if collected.put == Put.BUFFER:
            return worker, number
        is_here = collected.put == Put.HERE
        batch: Any = collected.content if is_here else self._trees[worker]
        if not self._uses_buffers[worker]:
            return (batch if is_here else batch.clone(), worker), number
        if not is_here and worker in self._handed:
            return worker, number
        self._handed = self._handed - {worker} if is_here else self._handed | {worker}
        return (batch, worker), 0

    def _drop(self, worker: int) -> None:
        """Drops the batches of a worker that nobody has taken."""
        self._ready = deque(one for one in self._ready if one[0] != worker)

    # ---- messages

    def ask(self, worker: int, message: Ask) -> None:
        """Sends a worker a message, once it has done what it does; a free run goes on after the answer."""
        if self._runs_free(worker) and worker not in self._pausing:
            self._resuming.add(worker)
        self._settle(worker)
        if message.name == "reset":
            self._drop(worker)
        what = f"what {message.name} sends to collector {worker}"
        data = sealed(message, what, message.data, context=self._context)
        self._send(self._messages, worker, data, f"answering call({message.name!r})")

    def has_answer(self, worker: int) -> bool:
        """True if `answer` returns one."""
        return worker in self._messages.answers or worker in self._messages.owing

    def answer(self, worker: int) -> Any:
        """The answer of a worker to the last message. Raises what the worker has raised, NotPendingError."""
        if not self.has_answer(worker):
            raise NotPendingError(f"collector {worker} owes no answer")
        with self._noting_interrupts():
            self._messages.wait(places=[worker])
        self._resume()
        answer = _opened(self._messages.answers[worker])
        del self._messages.answers[worker]  # last: a Ctrl-C before it loses none
        if isinstance(answer, Failure):
            raise original_error([answer], 0)
        return answer

    # ---- both

    def _send(self, of: Round, worker: int, question: object, words: str) -> None:
        if self._pool.closed:
            raise ClosedError("this collector was shut down; make another one")
        self._interrupted = False
        of.ask({worker: question}, words)

    def _receive(self, timeout: float | None) -> None:
        """Waits for a batch. Raises what a worker has raised that collected, WaitTimeout, WorkerDied."""
        with self._noting_interrupts():
            if not self._collecting.wait(at_least=1, timeout_s=timeout, places=[*self._ways]):
                raise WaitTimeout(
                    f"no collector has answered within {timeout} s; they go on, so the same call may be made again"
                )
        # In the order in which they were asked: none is overtaken by another's later batch.
        done = [worker for worker in self._ways if worker in self._collecting.answers]
        failures = [failure for worker in done if (failure := self._accept(worker)) is not None]
        if failures:
            raise original_error(failures, 0)

    @contextlib.contextmanager
    def _noting_interrupts(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._interrupted = not isinstance(error, Exception)
            if self._pool.closed:
                self._ways.clear()
            raise

    def _accept(self, worker: int) -> Failure | None:
        """Takes in what a worker has collected, or returns its failure."""
        with Uninterrupted():
            way, answer = self._ways.pop(worker), _opened(self._collecting.answers.pop(worker))
            if isinstance(answer, Failure):
                self._pausing.discard(worker)
                return answer
            if way is Way.FREELY:
                if worker in self._pausing:
                    self._ready.append((worker, None))
                self._pausing.discard(worker)
                return None
            if answer.put == Put.NEW:
                self._trees[worker] = answer.content.mapped()
                self._handed.discard(worker)
            self._ready.append((worker, answer))
        return None

    def _resume(self) -> None:
        """Has workers run free again that did so before a message, and have answered that."""
        for worker in [worker for worker in self._resuming if worker in self._messages.answers]:
            if worker not in self._ways:
                self._collect(worker, Way.FREELY)
            self._resuming.discard(worker)

    def _runs_free(self, worker: int) -> bool:
        return self._ways.get(worker) is Way.FREELY

    def _settle(self, worker: int) -> None:
        """Waits until a worker has done what it does."""
        while worker in self._ways:
            if self._runs_free(worker):
                self._files.flags[worker] = 1
            self._receive(None)

    # ---- closing

    def close(self, timeout: float) -> None:
        """Closes the envs and ends the processes, after at most this many seconds."""
        self._finalizer.detach()
        limits = in_all(timeout, f"timeout={timeout:g}").hurried(self._interrupted)
        try:
            said = self._pool.close(limits, self._files.end_free_runs)
        finally:
            self._files.close()
        if failures := [failure for _, failure in said if failure is not None]:
            raise original_error(failures, 0)


def _pool_of(recipes: Sequence[Recipe], files: Files, context: str, num_threads: int) -> Pool:
    ways, count, call = ways_of(context, num_threads, preloads=PRELOADS), len(recipes), recipes[0].call

    def content(own: Recipes, envs: range) -> CollectorPlan:
        return CollectorPlan(own, files.paths[1 + envs.start], files.paths[0])

    plans = plans_of(recipes, range(count + 1), ways, content)
    for plan in plans:  # TorchRL's code knows one env in each
        plan.info = replace(plan.info, env_index=plan.info.worker_index)
    starting = f"starting {count} env{'s' * (count > 1)} in {count} process{'es' * (count > 1)}"
    nouns = replace(NOUNS, pool="the collector is", starting=starting, rebuilding=call.hanging())
    resident, about = "muster.interop.torchrl.collector_worker:CollectorResident", about_of(recipes, range(count + 1))
    return Pool(resident, plans, ways, _Work(), Limits(), nouns=nouns, about=about)


def _opened(answered: Answered | Lost) -> Any:
    assert isinstance(answered, Answered)  # the loss of a worker closes the pool
    try:
        return pickle.loads(answered.content)
    except Exception as error:
        return Failure.of(not_rebuilt_here(error), answered.place, answered.place, None, None)


class Pipe:
    """The connection to one worker, as TorchRL's code uses it."""

    def __init__(self, pool: CollectorPool, worker: int, before_batch: Callable[[int], None]) -> None:
        self._pool, self._worker, self._before_batch = pool, worker, before_batch

    def send(self, message: tuple[Any, str]) -> None:
        """Sends data and the name of a message: those that begin to collect, and others."""
        data, name = message
        if name in _WAYS:
            self._before_batch(self._worker)
            self._pool.begin(self._worker, _WAYS[name])
        elif name == "pause":
            self._pool.pause(self._worker)
        else:
            self._pool.ask(self._worker, Ask(name, data))

    def recv(self) -> Any:
        """The answer to the last message that has one."""
        return self._pool.answer(self._worker)

    def poll(self, timeout: float | None = 0.0) -> bool:
        """True if there is an answer, or will be."""
        return self._pool.has_answer(self._worker)

    def close(self) -> None:
        """Does nothing: the pool is closed as a whole."""


_WAYS = {"continue": Way.ACTING, "continue_random": Way.RANDOMLY, "run_free": Way.FREELY, "restart": Way.FREELY}


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
class ForeignProcess:
    """The process of a worker or an env, as TorchRL's code looks at it: none of its own. Muster reports deaths."""

    is_alive: Callable[[], bool]  # whether the pool is still open
    _start_method: str

    _closed = True


class Refused(ConfigError, RuntimeError):
    """The errors that TorchRL's classes raise as RuntimeError."""


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
