"""The one process on a node that runs a pool of replicas there: from an order to an answer, both of them bytes.

What is the user's passes it unopened: packed recipes, policies, functions, arguments, results and exceptions.
"""

from __future__ import annotations

import os
import pickle
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from muster.hosts.requests import Call, KeptAttributes, Packed, SetAttr
from muster.rollout.fields import Array
from muster.rollout.processes.replica_pool import PoolPlan, ReplicaPool
from muster.rollout.processes.shared_weights import install
from muster.rollout.storage import Final, Loss
from muster.transport.big_arrays import memfd

Attributes = Mapping[int, Mapping[str, bytes]]
"""By env and name the values that `set_attr` has set last, packed."""


@dataclass
class Answered:
    """What an order has come to.

    content: the answer.  failure: an exception in its place.  closed: whether the pool is closed.
    logs, lost_logs: see `LogInbox`.  warned: warnings, as their texts and classes.
    """

    content: Any = None
    failure: BaseException | None = None
    closed: bool = False
    logs: bytes = b""
    lost_logs: int = 0
    warned: list[tuple[str, type[Warning]]] = field(default_factory=list)


@dataclass
class NodeBatch:
    """A batch of a node. first_env, versions, notes: as of `Filled`.  columns: of its storage."""

    first_env: int
    columns: list[Array]
    finals: list[Final]
    losses: list[Loss]
    versions: Array
    notes: Sequence[str]


def packed_plan(plan: PoolPlan, num_envs: int) -> bytes:
    """The plan of a `NodeHost`; a buffer that several collectors have is there once. num_envs: of all nodes."""
    known: dict[tuple[int, int, bool], int] = {}
    buffers: list[tuple[bytes | bytearray, bool]] = []
    plans: list[Any] = []
    for one in plan.plans:
        at = []
        for raw in (buffer.raw() for buffer in one.big):
            key = (np.frombuffer(raw, np.uint8).ctypes.data, raw.nbytes, raw.readonly)
            if key not in known:
                known[key] = len(buffers)
                buffers.append((bytes(raw) if isinstance(raw.obj, bytes) else bytearray(raw), raw.readonly))
            at.append(known[key])
        plans.append((replace(one, big=[]), at))
    return pickle.dumps((replace(plan, plans=()), plans, buffers, num_envs))


class NodeHost:
    """A pool of replicas on a node. plan: see `packed_plan`."""

    def __init__(self, plan: bytes) -> None:
        pool_plan, plans, data, num_envs = pickle.loads(plan)
        buffers = [
            pickle.PickleBuffer(memoryview(one).toreadonly() if readonly and isinstance(one, bytearray) else one)
            for one, readonly in data
        ]
        for one, at in plans:
            one.big += [buffers[i] for i in at]
        self._plan: PoolPlan = replace(pool_plan, plans=[one for one, _ in plans])
        self._happened, self._guard = Answered(), threading.Lock()
        self.collecting = 0  # the number of the batch under way
        warnings.simplefilter("always", UserWarning)
        warnings.simplefilter("always", RuntimeWarning)
        warnings.showwarning = self._note
        self._weights_fd, self._version, self._installing = memfd("weights"), 0, threading.Lock()
        # What is set is packed already.
        self._attributes = KeptAttributes(num_envs, lambda value, name: value)
        self._pool = ReplicaPool(self._plan, self._weights_fd, self._attributes, self._take_logs)

    def answer(self, order: bytes) -> bytes:
        """Answers an order: the name of a method of `_Orders`, and its arguments. One after the other."""
        return self._answered(order, _Orders)

    def answer_beside(self, order: bytes) -> bytes:
        """Answers at once, in a thread of its own, see `_Beside`."""
        return self._answered(order, _Beside)

    def _answered(self, order: bytes, orders: type[_Orders | _Beside]) -> bytes:
        name, *arguments = pickle.loads(order)
        content, failure = None, None
        try:
            act: Callable[..., Any] = getattr(orders(self._pool, self), name)
            content = act(*arguments)
        except Exception as error:  # the fleet raises it
            failure = error
        with self._guard:
            happened, self._happened = self._happened, Answered()
        happened.content, happened.failure, happened.closed = content, failure, self._pool.closed
        return pickle.dumps(happened, protocol=5)

    def take_weights(self, version: int, image: bytes) -> None:
        """Has replicas follow these weights, unless they have newer ones."""
        with self._installing:
            if version > self._version:
                install(self._weights_fd, image)
                self._version = version

    def set_at_start(self, attributes: Attributes) -> None:
        """Has envs that are built get these."""
        for env, of_env in attributes.items():
            self._attributes[env] = {name: Packed(data) for name, data in of_env.items()}

    def close(self) -> None:
        """Closes envs, and ends the collectors."""
        self._pool.close()

    def _take_logs(self, data: bytes, lost: int) -> None:
        with self._guard:
            self._happened.logs += data
            self._happened.lost_logs += lost

    def _note(self, message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        with self._guard:
            self._happened.warned.append((str(message), category))


@dataclass
class _Orders:
    """What a node host is asked for, one after the other."""

    pool: ReplicaPool
    host: NodeHost

    def start(self, seeds: Sequence[int | None], attributes: Attributes) -> Any:
        """Returns the fields of rollouts, and the node's folder for messages."""
        self.host.set_at_start(attributes)
        self.pool.start(seeds)
        return self.pool.fields, self.pool.weights(), self.pool.shapes(), os.getpid()

    def spaces(self) -> bytes:
        return self.pool.spaces()

    def reset(self, seeds: Sequence[int | None], frames: int) -> None:
        self.pool.reset(seeds, frames)

    def give_up(self) -> None:
        self.pool.give_up()

    def call(self, arguments: bytes, words: str) -> list[bytes]:
        return self.pool.call(Call(Packed(arguments)), words)

    def set_attr(self, name: str, values: Mapping[int, bytes], requests: Mapping[int, bytes]) -> Any:
        packed = {env: Packed(data) for env, data in values.items()}
        return dict(self.pool.set_attr(name, packed, {k: SetAttr(Packed(data)) for k, data in requests.items()}))

    def collect(self, number: int, weights: tuple[int, bytes] | None) -> NodeBatch:
        if weights is not None:
            self.host.take_weights(*weights)
        self.host.collecting = number
        storage, first_env, versions, notes = self.pool.collect()
        return NodeBatch(first_env, storage.columns(), storage.finals, storage.losses, versions, notes)


@dataclass
class _Beside:
    """What a node host does while it is busy."""

    pool: ReplicaPool
    host: NodeHost

    def ping(self) -> None:
        """Answers, with what has happened."""

    def weights(self, version: int, image: bytes) -> None:
        self.host.take_weights(version, image)

    def stop(self, number: int) -> None:
        """Ends batch `number` early, if that is under way."""
        if self.host.collecting == number:  # not one that came late
            self.pool.stop()

    def stats(self) -> dict[str, Any]:
        return self.pool.stats()

    def close(self) -> None:
        self.host.close()
