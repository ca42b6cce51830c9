"""The one process on a node that runs a pool of replicas there: from an order to an answer, both of them bytes.

What is the user's passes it unopened: packed recipes, policies, functions, arguments, results and exceptions.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from muster.errors import ClosedError
from muster.hosts.questions import EnvQuestion, Kept, unopened
from muster.pool.limits import CloseLimits
from muster.pool.notices import say_by
from muster.pool.place import Plan
from muster.pool.unique_indices import TREE
from muster.rollout.cluster.engine import Parcel
from muster.rollout.cluster.node_prints import NodePrints
from muster.rollout.cluster.node_probe import missing_here, versions_here
from muster.rollout.fields import Array
from muster.rollout.replicas.plans import PoolPlan, ReplicaFields
from muster.rollout.replicas.replica_pool import ReplicaPool
from muster.rollout.replicas.shared_weights import WeightShapes, install
from muster.rollout.storage import Final, LastInfos, Loss
from muster.transport.big_arrays import memfd, memory_of

Questions = Mapping[int, Sequence[EnvQuestion]]
"""By env, what it is asked first."""
Image = tuple[int, Array]
"""Weights, see `SharedWeights.image`."""


class Met(NamedTuple):
    """What a node host says first. missing: modules.  versions: see `versions_here`."""

    host: str
    node_id: str
    missing: list[str]
    versions: dict[str, str | None]


class Started(NamedTuple):
    """What a node has started: see `ReplicaPool`."""

    fields: ReplicaFields
    weights: dict[str, Tensor]
    shapes: list[WeightShapes]


@dataclass
class Report:
    """What an order has come to.

    content: the answer.  failure: an exception in its place.  closed: whether the pool is closed.
    logs, lost_logs: see `LogInbox`.  warned: warnings, as their texts and classes.  said: see `say`.
    """

    content: Any = None
    failure: BaseException | None = None
    closed: bool = False
    logs: bytes = b""
    lost_logs: int = 0
    warned: list[tuple[str, type[Warning]]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)


@dataclass
class NodeBatch:
    """A batch of a node. first_env, versions, notes: as of `Filled`.  columns: of its storage."""

    first_env: int
    columns: list[Array]
    finals: list[Final]
    losses: list[Loss]
    infos: LastInfos
    versions: Array
    notes: Sequence[str]


Shared = dict[tuple[int, int, bool], Array]
"""By their memory, copies of big buffers, which the plans of all nodes have in common."""


@dataclass(frozen=True)
class NodePlan:
    """The plan of a `NodeHost`.

    plans: those of the pool's collectors, and for each the numbers of its buffers.
    buffers: for each its content, and whether it was bytes, read-only or writable memory.
    """

    pool: PoolPlan
    plans: list[tuple[Plan, list[int]]]
    buffers: list[tuple[Array, str]]

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


def sealed(content: Any) -> list[Any]:
    """A message: a pickle, and the memory of the arrays in it, which is not copied."""
    buffers: list[pickle.PickleBuffer] = []
    with unopened():
        head = pickle.dumps(content, protocol=5, buffer_callback=buffers.append)
    return [head, *(np.frombuffer(one.raw(), np.uint8) for one in buffers)]


def opened(parcel: Parcel) -> Any:
    """The content of a message, whose arrays lie in the message's memory."""
    head, *buffers = parcel
    return pickle.loads(head, buffers=buffers)


class NodeHost:
    """A pool of replicas on a node, once it has a plan. host, node_id: how people and the engine name that."""

    def __init__(self, host: str, node_id: str) -> None:
        self.host, self.node_id = host, node_id
        self._happened, self._guard = Report(), threading.Lock()
        self.collecting = 0  # the number of the batch under way
        self._weights_fd, self._version, self._installing = memfd("weights"), 0, threading.Lock()
        self._pool: ReplicaPool | None = None
        warnings.simplefilter("always", UserWarning)
        warnings.simplefilter("always", RuntimeWarning)
        warnings.showwarning = self._note
        say_by(self._say)
        self._place, self._prints = "", NodePrints()

    def begin(self, plan: NodePlan, questions: Questions) -> ReplicaPool:
        """Begins to start replicas. questions: what envs are asked once they are built."""
        kept = Kept(questions, lambda value, parts: value)  # all is packed already
        kept.keep(questions)
        self._place = f"node {plan.plans[0][0].info.node_index} ({self.host})"
        self._pool = ReplicaPool(plan.of_pool(), self._weights_fd, kept, self._take_logs)
        return self._pool

    @property
    def pool(self) -> ReplicaPool:
        """What it runs. Raises ClosedError before there is one."""
        if self._pool is None:
            raise ClosedError("the node host has no collectors yet")
        return self._pool

    def answer(self, order: Parcel) -> list[Any]:
        """Answers an order: the name of a method of `_Orders`, and its arguments. One after the other."""
        return self._reported(order, _Orders)

    def answer_beside(self, order: Parcel) -> list[Any]:
        """Answers at once, in a thread of its own, see `_Beside`."""
        return self._reported(order, _Beside)

    def _reported(self, order: Parcel, orders: type[_Orders | _Beside]) -> list[Any]:
        name, *arguments = opened(order)
        content, failure = None, None
        try:
            act: Callable[..., Any] = getattr(orders(self), name)
            content = act(*arguments)
        except Exception as error:  # the fleet raises it
            failure = error
        printed = self._prints.take(self._place, ends_lines=orders is _Orders or name == "close")
        with self._guard:
            happened, self._happened = self._happened, Report()
        happened.logs += printed
        happened.content, happened.failure = content, failure
        happened.closed = self._pool is not None and self._pool.closed
        return sealed(happened)

    def take_weights(self, version: int, image: Array) -> None:
        """Has replicas follow these weights, unless they have newer ones."""
        with self._installing:
            if version > self._version:
                install(self._weights_fd, image.data)
                self._version = version

    def close(self, limits: CloseLimits | None = None) -> None:
        """Closes envs, and ends the collectors. limits: None for those of the plan."""
        if self._pool is not None:
            self._pool.close(limits)

    def _take_logs(self, data: bytes, lost: int) -> None:
        with self._guard:
            self._happened.logs += data
            self._happened.lost_logs += lost

    def _note(self, message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        with self._guard:
            self._happened.warned.append((str(message), category))

    def _say(self, text: str) -> None:
        with self._guard:
            self._happened.said.append(text)


@dataclass
class _Orders:
    """What a node host is asked for, one after the other."""

    host: NodeHost

    def meet(self, modules: Sequence[str], folders: Sequence[str], tree: str) -> Met:
        """Says what there is. folders: those of the driver's `sys.path`, of which it takes those that are here.

        tree: the driver's, which this process joins: a machine may have the driver, or several node hosts.
        """
        os.environ[TREE] = tree
        sys.path += [one for one in folders if one not in sys.path and os.path.isdir(one)]
        return Met(self.host.host, self.host.node_id, missing_here(modules), versions_here())

    def start(self, plan: NodePlan, seeds: Sequence[int | None], frames: int, questions: Questions) -> Started:
        pool = self.host.begin(plan, questions)
        pool.start(seeds, frames)
        return Started(pool.fields, pool.weights(), pool.shapes())

    def reset(self, seeds: Sequence[int | None], frames: int) -> None:
        self.host.pool.reset(seeds, frames)

    def give_up(self) -> None:
        self.host.pool.give_up()

    def ask(self, question: EnvQuestion) -> list[Any]:
        return self.host.pool.ask(question)

    def collect(self, number: int, weights: Image | None) -> NodeBatch:
        if weights is not None:
            self.host.take_weights(*weights)
        self.host.collecting = number
        storage, first_env, versions, notes = self.host.pool.collect()
        ends = storage.finals, storage.losses, storage.infos
        return NodeBatch(first_env, storage.columns(), *ends, versions, notes)


@dataclass
class _Beside:
    """What a node host does while it is busy."""

    host: NodeHost

    def ping(self) -> None:
        """Answers, with what has happened."""

    def weights(self, image: Image) -> None:
        self.host.take_weights(*image)

    def stop(self, number: int) -> None:
        """Ends batch `number` early, if that is under way."""
        if self.host.collecting == number:  # not one that came late
            self.host.pool.stop()

    def stats(self) -> dict[str, Any]:
        return self.host.pool.stats()

    def close(self, limits: CloseLimits) -> None:
        self.host.close(limits)
