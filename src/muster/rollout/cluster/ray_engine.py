"""Node hosts as actors of a Ray cluster."""

from __future__ import annotations

import contextlib
import math
import os
import select
import socket
import textwrap
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from muster.errors import ConfigError
from muster.pool.engine import Engine, Host, HostGone, Parcel, Site, Ticket
from muster.pool.far_worker import FarWorker
from muster.rollout.cluster.nodes import Node, RayCluster
from muster.rollout.cluster.ray_connection import Connection, ConnectionLost, connect, this_node

_STORED_BYTES = 100_000  # Ray sends what is smaller with the order
_FREED_S = 2.0
_FETCH_S, _SHOWN_CHARACTERS = 5.0, 300
_BESIDE = 4  # threads of a node host for what it does while it is busy


class NodeActor:
    """A `FarWorker` in a worker process of Ray's."""

    def __init__(self) -> None:
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
        os.environ.pop("OMP_NUM_THREADS", None)  # Ray's, which would count in collectors before threads_per_collector
        self._host = FarWorker(socket.gethostname(), this_node())

    def answer(self, *order: Any) -> Parcel:
        return self._host.answer(order)

    def answer_beside(self, *order: Any) -> Parcel:
        return self._host.answer_beside(order)


def _end_with(raylet: int) -> None:
    """Ends this process when its raylet ends: Ray sees that up to 2 s later, and envs would go on meanwhile."""
    try:
        there = os.pidfd_open(raylet)
    except OSError:
        return
    select.select([there], [], [])
    os._exit(1)


class _Unasked:
    """The ticket of an order that did not get to Ray."""


class Stored:
    """The big buffer that was sent last, such as weights: it is put into Ray's store once for all nodes."""

    def __init__(self) -> None:
        self._last: tuple[tuple[int, int], Any, Any] | None = None

    def of(self, ray: Any, buffer: Any) -> Any:
        """The buffer, or what stands for it in Ray's store."""
        if not isinstance(buffer, np.ndarray) or buffer.nbytes < _STORED_BYTES:
            return buffer
        place, last = (buffer.ctypes.data, buffer.nbytes), self._last
        if last is None or last[0] != place:
            # The buffer is kept, so that nothing else gets its place meanwhile.
            self._last = last = place, buffer, ray.put(buffer)
        return last[2]


class RayHost(Host):
    """A node host. actor: of `NodeActor`.  stored: see `Stored`."""

    def __init__(self, connection: Connection, actor: Any, stored: Stored) -> None:
        self._connection, self.actor, self._stored = connection, actor, stored

    def ask(self, order: Parcel, *, beside: bool = False) -> Ticket:
        try:
            with self._connection.used() as ray:
                method, group = (self.actor.answer_beside, "beside") if beside else (self.actor.answer, "order")
                ticket: Ticket = method.options(concurrency_group=group).remote(
                    *(self._stored.of(ray, one) for one in order)
                )
                return ticket
        except ConnectionLost:
            return _Unasked()  # `wait` says so

    def kill(self) -> None:
        # Where the connection is lost, the actor is, too.
        with contextlib.suppress(ConnectionLost), self._connection.used(asks_head=True) as ray:
            ray.kill(self.actor, no_restart=True)


@dataclass(frozen=True)
class _Spot:
    """A place for a node host. node_id: of the machine, where that is settled.  cpus: those it may have there."""

    wish: Node
    cpus: float
    node_id: str | None = None


class RayEngine(Engine):
    """Node hosts on a Ray cluster. Raises ImportError, ConfigError."""

    remedy = "Ask for less with muster.Node, or add machines"

    def __init__(self, cluster: RayCluster) -> None:
        self._cluster = cluster
        self.node_timeout, self.min_nodes = cluster.node_timeout, cluster.min_nodes
        self._connection = connect(cluster.address, cluster.runtime_env)
        self.name = f"the Ray cluster at {self._connection.address}"
        self._hosts: dict[int, RayHost] = {}
        self._asked: dict[int, dict[str, Any]] = {}
        self._stored, self._closed = Stored(), False
        # Ray sends each class to the head once, and waits for that.
        self._kind = self._connection.ray.remote(concurrency_groups={"order": 1, "beside": _BESIDE})(NodeActor)

    def places(self, most: int) -> Sequence[Site]:
        with self._connection.used() as ray:
            self._spots = self._chosen(ray, most)
        return [Site(spot.cpus, spot.wish.collectors, spot.wish) for spot in self._spots]

    def _chosen(self, ray: Any, most: int) -> list[_Spot]:
        nodes, group = self._cluster.nodes, self._cluster.placement_group
        bundles = [] if group is None else [bundle.get("CPU", 0.0) for bundle in group.bundle_specs]
        wanted = len(nodes) if isinstance(nodes, Sequence) else nodes or len(bundles)
        if group is not None and len(bundles) < wanted:
            raise ConfigError("placement_group", f"one with a bundle for each of {wanted} nodes", bundles)
        if isinstance(nodes, Sequence):
            return [_Spot(wish, wish.cpus or 1.0) for wish in nodes]
        if group is not None:
            return [_Spot(Node(cpus=one), one) for one in bundles[:wanted]]
        there = _spots(ray)
        until = time.monotonic() + _FREED_S
        while not there and time.monotonic() < until:
            time.sleep(0.1)  # what has just ended does not give its CPUs back at once
            there = _spots(ray)
        if nodes is None:
            return there[:most] or [_Spot(Node(cpus=1.0), 1.0)]
        # Where more are wanted than machines that are free, Ray finds the places, perhaps on machines to come.
        each = max(1.0, ray.cluster_resources().get("CPU", 0.0) // nodes)
        return there[:nodes] if len(there) >= nodes else [_Spot(Node(), each)] * nodes

    def start(self, index: int, collectors: int) -> Host:
        spot = self._spots[index]
        wish = spot.wish
        by_wish = isinstance(self._cluster.nodes, Sequence)
        cpus = wish.cpus if wish.cpus is not None else collectors if by_wish else min(collectors, spot.cpus)
        named = {"CPU": cpus, "GPU": wish.gpus, "memory": wish.memory_bytes or 0, **(wish.resources or {})}
        self._asked[index] = {name: amount for name, amount in named.items() if amount}
        of_all, own = self._connection.runtime_env, self._cluster.runtime_env
        runtime_env = {**own} if own and own != of_all else {}
        is_first = index not in self._hosts
        # Where the connection is lost, the host before is returned: `wait` says so.
        lost = contextlib.nullcontext() if is_first else contextlib.suppress(ConnectionLost)
        with lost, self._connection.used() as ray:
            try:
                actor = self._kind.options(
                    num_cpus=cpus,
                    num_gpus=wish.gpus,
                    memory=wish.memory_bytes,
                    resources={**(wish.resources or {})},
                    label_selector={**(wish.labels or {})},
                    scheduling_strategy=self._strategy(ray, index, spot, is_first=is_first),
                    runtime_env=runtime_env,
                )
                self._hosts[index] = RayHost(self._connection, actor.remote(), self._stored)
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"Ray does not take the wishes for node {index}: {error}. They come from muster.Node and "
                    "RayCluster. A runtime_env with folders is given to the first collector of a process, or to its "
                    "own ray.init()"
                ) from error
        return self._hosts[index]

    def _strategy(self, ray: Any, index: int, spot: _Spot, *, is_first: bool) -> Any:
        strategies = ray.util.scheduling_strategies
        if self._cluster.placement_group is not None:
            return strategies.PlacementGroupSchedulingStrategy(self._cluster.placement_group, index)
        if spot.node_id is not None and is_first:
            return strategies.NodeAffinitySchedulingStrategy(spot.node_id, soft=True)
        return "SPREAD"

    def wait(self, tickets: Collection[Ticket], timeout_s: float) -> Mapping[Ticket, Parcel | HostGone]:
        if not tickets:
            time.sleep(timeout_s)
            return {}
        try:
            with self._connection.used() as ray:
                asked: list[Any] = [one for one in tickets if not isinstance(one, _Unasked)]
                ready, _ = ray.wait(asked, num_returns=1, timeout=timeout_s)
                if ready:
                    ready, _ = ray.wait(asked, num_returns=len(asked), timeout=0)
                return {ticket: self._taken(ray, ticket) for ticket in ready}
        except ConnectionLost as lost:
            return dict.fromkeys(tickets, HostGone(str(lost), is_final=True))

    def _taken(self, ray: Any, ticket: Any) -> Parcel | HostGone:
        try:
            answer: Parcel = ray.get(ticket, timeout=_FETCH_S)
            return answer
        except ray.exceptions.RayError as error:
            return HostGone(_in_a_line(ray, error))

    def room(self, index: int) -> str:
        asked, labels = self._asked[index], self._spots[index].wish.labels
        free = None
        with contextlib.suppress(ConnectionLost), self._connection.used(asks_head=True) as ray:  # `wait` says so
            has_process = ray._private.state.actors(self._hosts[index].actor._actor_id.hex())["Pid"]
            free = None if has_process else [*_free(ray)]
        if free is None:
            return ""
        there = [f"{host} has {_in_words({name: own.get(name, 0) for name in asked})}" for _, host, own in free]
        on = f" on a node with the labels {dict(labels)}" if labels else ""
        return f"it asks for {_in_words(asked)}{on}. Free of that: {', '.join(there) or 'no node is there'}"

    def store_bytes(self) -> float:
        with self._connection.used() as ray:
            stores = [node["Resources"].get("object_store_memory", math.inf) for node in ray.nodes() if node["Alive"]]
        return min(stores, default=math.inf)

    def why_ended(self) -> str:
        return self._connection.why_lost()

    def close(self) -> None:
        if self._closed:
            return
        try:
            for host in self._hosts.values():
                host.kill()
        finally:
            self._connection.close()
        self._closed = True  # last: another close ends what a Ctrl-C has left of this


def _spots(ray: Any) -> list[_Spot]:
    """The nodes that have a free CPU, those with the most first."""
    free = [(own.get("CPU", 0.0), node_id) for node_id, _, own in _free(ray)]
    return [_Spot(Node(), cpus, node_id) for cpus, node_id in sorted(free, reverse=True) if cpus >= 1]


def _free(ray: Any) -> Iterator[tuple[str, str, dict[str, float]]]:
    """Id, name and free resources of each node that is alive."""
    free = ray._private.state.available_resources_per_node()
    for node in ray.nodes():
        if node["Alive"]:
            yield node["NodeID"], node["NodeManagerAddress"], free.get(node["NodeID"], {})


def _in_words(resources: Mapping[str, float]) -> str:
    return " and ".join(f"{amount:,g} {name}" for name, amount in resources.items()) or "nothing"


def _in_a_line(ray: Any, error: Exception) -> str:
    """The words of Ray, by the error alone: the head may be gone with the node."""
    if isinstance(error, ray.exceptions.ActorUnavailableError):
        return "its machine does not answer"
    said = f"{error}"
    _, named, rest = said.rpartition("\n\t")  # lines that name the actor come before the cause
    cause = rest.partition("\n")[2] if named else said
    return f"Ray says: {textwrap.shorten(cause, _SHOWN_CHARACTERS, placeholder=' ...')}"
