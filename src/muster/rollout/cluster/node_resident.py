"""A node as a place of a far pool: a resident that owns a pool of replicas there."""

from __future__ import annotations

import os
import pickle
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from muster.hosts.failures import Failure
from muster.hosts.questions import Again, EnvQuestion, Kept
from muster.pool.far_worker import FarResident, FarWorker
from muster.pool.limits import CloseLimits
from muster.pool.messages import Failed, Message
from muster.pool.place import Plan
from muster.pool.unique_indices import TREE
from muster.rollout.cluster.node_probe import versions_here
from muster.rollout.fields import Array
from muster.rollout.replicas.carriers import CollectFor, GiveUp, NodeBatch, Stop, TakeWeights
from muster.rollout.replicas.plans import PoolPlan
from muster.rollout.replicas.replica import AskFields, AskShapes, AskWeights, Raised
from muster.rollout.replicas.replica_pool import ReplicaPool, in_processes
from muster.rollout.replicas.shared_weights import install
from muster.transport.big_arrays import memfd, memory_of
from muster.transport.mail import dumps

Shared = dict[tuple[int, int, bool], Array]
"""By their memory, copies of big buffers that the plans of all nodes have in common."""


@dataclass(eq=False)
class Greeting(Message):
    """The driver's words to a new process. folders: those of its `sys.path`; the process takes what is there.

    tree: the driver's, which the process joins: a machine may have the driver, or several nodes.
    """

    folders: Sequence[str]
    tree: str


@dataclass(eq=False)
class BeginAll(Message):
    """Begins new episodes. seeds: one for each collector.  frames: collected before by all of them together."""

    seeds: Sequence[int | None]
    frames: int


@dataclass(eq=False)
class AskStats(Message):
    """Asks for `ReplicaPool.stats`."""


@dataclass(frozen=True)
class NodePlan:
    """The plan of a `NodeResident`.

    plans: those of the pool's collectors, and for each the numbers of its buffers.
    buffers: for each its content, and its kind: bytes, read-only or writable memory.
    seeds: as of `ReplicaPool.launch`.
    """

    pool: PoolPlan
    plans: list[tuple[Plan, list[int]]]
    buffers: list[tuple[Array, str]]
    seeds: Sequence[int | None] = ()

    @classmethod
    def of(cls, pool: PoolPlan, shared: Shared) -> NodePlan:
        """Made from that of a pool; a buffer that several collectors have is there once. shared: grows by it."""
        known: dict[tuple[int, int, bool], int] = {}
        plan = cls(replace(pool, plans=()), [], [])
        for one in pool.plans:
            at = []
            for raw in (buffer.raw() for buffer in one.big):
                if (memory := memory_of(raw)) not in known:
                    known[memory] = len(known)
                    if memory not in shared:
                        shared[memory] = np.array(np.frombuffer(raw, np.uint8))
                    kind = "bytes" if isinstance(raw.obj, bytes) else "read-only" if raw.readonly else "writable"
                    plan.buffers.append((shared[memory], kind))
                at.append(known[memory])
            plan.plans.append((replace(one, big=[]), at))
        return plan

    def of_pool(self) -> PoolPlan:
        """The plan of the pool here."""
        made: dict[str, Callable[[Any], Any]]
        made = {"bytes": bytes, "read-only": lambda one: memoryview(one).toreadonly(), "writable": bytearray}
        buffers = [pickle.PickleBuffer(made[kind](one)) for one, kind in self.buffers]
        for plan, at in self.plans:
            plan.big += [buffers[i] for i in at]
        return replace(self.pool, plans=[plan for plan, _ in self.plans])


class NodeResident(FarResident):
    """A pool of replicas on a node. Its exceptions are answers: they would cost the node its place else."""

    @classmethod
    def meet(cls, greeting: Greeting) -> dict[str, str | None]:
        """Returns `versions_here`."""
        os.environ[TREE] = greeting.tree
        sys.path += [one for one in greeting.folders if one not in sys.path and os.path.isdir(one)]
        return versions_here()

    def __init__(self, plan: NodePlan, here: FarWorker) -> None:
        self._place = f"node {plan.plans[0][0].info.node_index} ({here.host})"
        self._collecting = 0  # the number of the batch under way
        self._weights_fd, self._version, self._installing = memfd("weights"), 0, threading.Lock()
        own = plan.of_pool()
        envs = range(own.plans[0].envs.start, own.plans[-1].envs.stop)
        kept = Kept(envs, lambda value, parts: value)  # all is packed already
        self._pool: ReplicaPool = in_processes(own, self._weights_fd, kept, here.take_logs)
        self._pool.launch(plan.seeds)

    def answer(self, question: Any) -> Any:
        try:
            return self._answer(question)
        except Exception as error:
            return Raised(Failed.of(error, dumps), self._pool.closed)

    def take(self, message: Any) -> None:
        try:
            self._answer(message)
        except Exception:
            if self._pool.closed or not isinstance(message, EnvQuestion):  # envs that refuse cost nobody the node
                raise

    def answer_now(self, question: Any) -> Any:
        match question:
            case TakeWeights(version, image):
                self._follow(version, image)
                return None
            case Stop(number):
                if self._collecting == number:  # not one that came late
                    self._pool.stop()
                return None
            case AskStats():
                return self._pool.stats()
        return super().answer(question)

    def close(self, closes: Callable[[int], None], limits: CloseLimits | None = None) -> None:
        self._pool.close(limits)

    def _answer(self, question: Any) -> Any:
        match question:
            case CollectFor(number, weights):
                return self._collect(number, weights)
            case EnvQuestion():
                return [self._named(one) if isinstance(one, Failure) else one for one in self._pool.ask(question)]
            case BeginAll(seeds, frames):
                return self._pool.reset(seeds, frames)
            case Again(questions):
                return self._pool.again(questions)
            case GiveUp():
                return self._pool.give_up()
            case AskFields():
                return self._pool.lay_out()
            case AskWeights():
                return self._pool.weights()
            case AskShapes():
                return self._pool.shapes()
        return super().answer(question)

    def _collect(self, number: int, weights: TakeWeights | None) -> NodeBatch:
        if weights is not None:
            self._follow(weights.version, weights.image)
        self._collecting = number
        storage, first_env, versions, notes = self._pool.collect()
        return NodeBatch(first_env, storage.columns(), storage.finals, storage.losses, storage.infos, versions, notes)

    def _follow(self, version: int, image: Array) -> None:
        """Has replicas follow these weights, unless they have newer ones."""
        with self._installing:
            if version > self._version:
                install(self._weights_fd, image.data)
                self._version = version

    def _named(self, failure: Failure) -> Failure:
        """The failure of an env, with the name of its node."""
        return replace(failure, note="\n".join(filter(None, (f"On {self._place}.", failure.note))))
