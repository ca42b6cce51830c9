"""The driver's end of all node hosts: orders, waits, pings, losses and successors."""

from __future__ import annotations

import atexit
import math
import os
import sys
import time
import warnings
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from muster.errors import ClosedError, ConfigError, NodeLost, SpecMismatch
from muster.hosts.requests import Call, KeptAttributes, SetAttr
from muster.introspection import caller_stacklevel
from muster.pool.closing import close_abandoned
from muster.pool.deaths import Nouns
from muster.pool.notices import say
from muster.pool.place import Budget
from muster.rollout.cluster.engine import Engine, HostGone, Ticket
from muster.rollout.cluster.member import PING_S, Member, close_all, tell
from muster.rollout.cluster.node_host import (
    Answered,
    Attributes,
    Image,
    Met,
    NodeBatch,
    Started,
    opened,
    packed_plan,
    sealed,
)
from muster.rollout.cluster.node_probe import (
    compare_versions,
    missing_text,
    modules_needed,
    versions_here,
)
from muster.rollout.cluster.nodes import shares
from muster.rollout.collector_set import Filled
from muster.rollout.processes.batch_memory import BatchLayout
from muster.rollout.processes.fates import ReplicaFailed
from muster.rollout.processes.replica_pool import PoolPlan
from muster.rollout.processes.shared_weights import SharedWeights, WeightShapes
from muster.rollout.storage import Storage

_SLICE_S, _STATS_S, _ROOM_S = 0.05, 2.0, 10.0
_SLOW = "Raise start_timeout, or look into what that machine is busy with"


class Fleet:
    """Runs replicas on several nodes: a `RunsReplicas`. The arguments: see `ReplicaPool`.

    A node whose host ends, or says nothing for `node_timeout`, is lost. With `max_restarts` its part of batches is
    masked until its successor is there; nobody waits for that. Otherwise that raises NodeLost.
    """

    def __init__(self, plan: PoolPlan, attributes: KeptAttributes, engine: Engine) -> None:
        self._plan, self._attributes, self._engine = plan, attributes, engine
        self._count, self._num_envs = len(plan.plans), plan.plans[-1].envs.stop
        self._budget = Budget(plan.max_restarts or 0, Nouns("node"))
        self._owed: dict[Ticket, tuple[Member, str]] = {}
        self._answers: dict[Ticket, Any] = {}
        self._batches: dict[Member, Ticket] = {}  # the batches under way
        self._ready: deque[Filled] = deque()
        self._notes: list[str] = []
        self._number = 0  # of the batch
        self._closed, self._is_cut_short = False, False
        self._frames = 0  # of a collector, before the last reset
        self._weights: SharedWeights | None = None
        self._image: Image = 0, np.empty(0, np.uint8)
        self._seeds: Sequence[int | None] = [None] * self._count
        self._modules = modules_needed(plan)
        self._members: list[Member] = []
        self._finalizer = weakref.finalize(self, close_abandoned, close_all, engine, self._members)
        self._finalizer.atexit = False
        atexit.register(self._finalizer)  # after the engine's own hooks, so that it runs before them
        places = engine.places(self._count)
        for index, (place, own) in enumerate(zip(places, shares(self._count, places), strict=True)):
            envs = range(plan.plans[own.start].envs.start, plan.plans[own.stop - 1].envs.stop)
            packed = packed_plan(plan.of(own, index, place.policy_device), self._num_envs)
            self._members.append(Member(index, own, envs, packed))
        for one in plan.plans:
            one.big.clear()  # the packed plans have them

    # ---- what `Replicas` asks for

    def start(self, seeds: Sequence[int | None]) -> None:
        self._seeds = seeds
        for member in self._members:
            self._launch(member)
        while any(member.state != "up" for member in self._members):
            self._hear(_SLICE_S)
        self._fields = self._started()[0].fields
        for member, started in zip(self._members, self._started(), strict=True):
            if started.fields != self._fields:
                raise SpecMismatch(
                    f"{member.name} has {started.fields}, but node 0 {self._fields}; all collectors must be alike"
                )
        self._layouts = [plan.content.layout(self._fields) for plan in self._plan.plans]
        needed, there = 2 * self._layouts[0].block_bytes, self._engine.store_bytes()  # one is read, one is written
        if needed > there:
            warnings.warn(
                f"batches on their way take up to {needed / 1e6:,.0f} MB, and a node of {self._engine.name} has "
                f"{there / 1e6:,.0f} MB for them: they will go by disk. Give it more "
                "(`ray start --object-store-memory`) or ask for fewer frames_per_batch",
                UserWarning,
                stacklevel=caller_stacklevel(),
            )
        of_each = ", ".join(f"{len(member.collectors)} on {member.where}" for member in self._members)
        on_nodes = f"{len(self._members)} node{'s' * (len(self._members) > 1)}"
        say(f"{self._count} collectors on {on_nodes} of {self._engine.name}: {of_each}")

    def _started(self) -> list[Started]:
        return [member.started for member in self._members if member.started is not None]

    def weights(self) -> dict[str, Tensor]:
        return self._started()[0].weights

    def shapes(self) -> list[WeightShapes]:
        return [shapes for started in self._started() for shapes in started.shapes]

    def follow(self, weights: SharedWeights) -> None:
        self._weights = weights
        if not self._plan.sync and self._image[0]:  # not awaited, nor before the first batch
            image = _image_of(weights)
            order = sealed(("weights", image))
            for member in self._up():
                member.version = max(member.version, image[0])
                member.host.ask(order, beside=True)

    def reset(self, seeds: Sequence[int | None], frames: int = 0) -> None:
        self.give_up()
        self._seeds, self._frames = seeds, frames // self._count
        orders = {}
        for member in self._members:
            own = member.collectors
            orders[member] = "reset", seeds[own.start : own.stop], self._frames * len(own)
        self._ask_there(orders)

    def call(self, request: Call, words: str) -> list[bytes]:
        for member in self._members:
            if member.state != "up":
                raise self._lost(member)
        answers = self._ask(dict.fromkeys(self._members, ("call", request.arguments.data, words)))
        for member in self._members:
            if member not in answers:
                raise self._lost(member)
        return [result for results in answers.values() for result in results]

    def set_attr(
        self, name: str, values: Mapping[int, Any], requests: Mapping[int, SetAttr]
    ) -> Mapping[int, ReplicaFailed]:
        def act() -> dict[int, ReplicaFailed]:
            orders = {}
            for member in self._members:
                own = {env: self._attributes[env][name].data for env in member.envs}
                to = {i: requests[k].arguments.data for i, k in enumerate(member.collectors)}
                orders[member] = "set_attr", name, own, to
            return {env: error for refused in self._ask_there(orders).values() for env, error in refused.items()}

        return self._attributes.set(name, values, act)

    def spaces(self) -> bytes:
        packed: bytes = next(iter(self._ask(dict.fromkeys(self._up()[:1], ("spaces",))).values()))
        return packed

    def stats(self) -> dict[str, Any]:
        """As of `ReplicaPool`; of a node that does not answer, the last that is known."""
        if not self._closed:
            tickets = {member: self._send(member, "stats", beside=True) for member in self._up()}
            self._await(tickets, time.monotonic() + _STATS_S)
            for member, ticket in tickets.items():
                answer = self._answers.pop(ticket, None)
                self._owed.pop(ticket, None)
                member.stats = {**member.stats, "stale": True} if answer is None else answer.content
        known = [(member, member.stats) for member in self._members if member.stats]
        sums = {key: sum(stats[key] for _, stats in known) for key in ("env_steps", "restarts", "processes")}
        return {**sums, "workers": [{**one, "node": m.index} for m, stats in known for one in stats["workers"]]}

    def nodes(self) -> list[dict[str, Any]]:
        """What `MultiCollector.nodes` returns."""
        return [
            {
                "index": member.index,
                "host": member.where,
                "node_id": member.node_id,
                "state": member.state,
                "collectors": member.collectors,
                "policy_version": member.version,
                "reason": member.reason,
            }
            for member in self._members
        ]

    def close(self) -> None:
        self._closed = True
        if self._finalizer.detach() is not None:
            atexit.unregister(self._finalizer)
            close_all(self._plan.close_limits, self._engine, self._members)

    # ---- collecting

    def collect(self) -> Filled:
        if self._is_cut_short:
            self.give_up()
        self._hear(0.0)
        return self._collect_all() if self._plan.sync else self._collect_first()

    def give_up(self) -> None:
        self._ready.clear()
        if not self._closed:
            self._stop()
        for ticket in self._batches.values():
            self._owed.pop(ticket, None)
            self._answers.pop(ticket, None)
        self._batches.clear()
        self._is_cut_short = False
        if self._closed:
            return
        self._ask(dict.fromkeys(self._up(), ("give_up",)))

    def _collect_all(self) -> Filled:
        storage = self._layouts[0].storage(_block(self._layouts[0]))
        versions, missing = np.zeros(storage.N, np.int64), {*self._members}
        self._order(self._up())
        ordered, done = self._image[0], 0
        while self._batches:
            self._is_cut_short = True
            self._hear(_SLICE_S)
            for member, batch in self._arrived():
                part = slice(member.envs.start, member.envs.stop)
                self._fill(storage, part, batch)
                versions[part] = batch.versions
                self._check(member, storage.mask[:, part], batch.versions, ordered)
                missing.discard(member)
                done += len(member.collectors)
            if self._batches and done >= self._plan.threshold:
                self._stop()
        self._is_cut_short = False
        for member in missing:
            storage.blank(slice(member.envs.start, member.envs.stop))
        if len(missing) == len(self._members):
            raise self._lost(self._members[0])
        storage.finals.sort(key=lambda one: (one.time, one.env))
        storage.losses.sort(key=lambda one: (one.time, one.env))
        return Filled(storage, 0, versions, self._take_notes())

    def _collect_first(self) -> Filled:
        while not self._ready:
            self._order_idle()
            if not self._up():
                raise self._lost(self._members[0])
            self._take_ready(_SLICE_S)
        self._order_idle()  # at most one batch of each node waits besides those there
        return self._ready.popleft()._replace(notes=self._take_notes())

    def _order_idle(self) -> None:
        self._order([member for member in self._up() if member not in self._batches])

    def _take_ready(self, timeout_s: float) -> None:
        self._hear(timeout_s)
        for _, batch in self._arrived():
            k = next(k for k, plan in enumerate(self._plan.plans) if plan.envs.start == batch.first_env)
            storage = self._layouts[k].storage(_block(self._layouts[k]))
            self._fill(storage, slice(0, storage.N), batch)
            self._ready.append(Filled(storage, batch.first_env, batch.versions))

    def _order(self, members: Sequence[Member]) -> None:
        assert self._weights is not None
        if members and self._weights.version != self._image[0]:
            self._image = _image_of(self._weights)
        self._number += 1
        for member in members:
            has_them = member.version >= self._image[0]
            member.version, member.number = max(member.version, self._image[0]), self._number
            self._batches[member] = self._send(member, "collect", self._number, None if has_them else self._image)

    def _arrived(self) -> list[tuple[Member, NodeBatch]]:
        """The batches that have come. Raises what a node has failed with."""
        done = [(member, ticket) for member, ticket in self._batches.items() if ticket in self._answers]
        for member, _ in done:
            del self._batches[member]
        return [(member, self._content(member, self._answers.pop(ticket))) for member, ticket in done]

    def _fill(self, storage: Storage, part: slice, batch: NodeBatch) -> None:
        storage.write_columns(part, batch.columns)
        storage.add_ends(batch.finals, batch.losses, part.start)
        self._notes += batch.notes

    def _check(self, member: Member, mask: Any, versions: Any, ordered: int) -> None:
        """Raises NodeLost where rows have other weights than those that were ordered."""
        if (mask.any(axis=0) & (versions != ordered)).any():
            member.reason = f"it acted with weights {versions.tolist()}, ordered were {ordered}"
            self.close()
            raise self._lost(member)

    def _stop(self) -> None:
        for member in self._batches:
            self._send(member, "stop", member.number, beside=True, awaited=False)

    def _take_notes(self) -> list[str]:
        notes, self._notes = self._notes, []
        return notes

    # ---- orders and answers

    def _up(self) -> list[Member]:
        return [member for member in self._members if member.state == "up"]

    def _send(self, member: Member, *order: Any, beside: bool = False, awaited: bool = True) -> Ticket:
        """Gives an order. awaited: whether anybody takes the answer."""
        ticket = member.host.ask(sealed(order), beside=beside)
        self._owed[ticket] = member, order[0] if awaited else ""
        return ticket

    def _ask(self, orders: Mapping[Member, tuple[Any, ...]]) -> dict[Member, Any]:
        """Gives orders between batches; returns the contents of the answers, without those of nodes that were lost."""
        self._require_open()
        if self._is_cut_short:
            self.give_up()
        tickets = {member: self._send(member, *order) for member, order in orders.items()}
        self._await(tickets, math.inf)
        answers = {member: self._answers.pop(ticket) for member, ticket in tickets.items() if ticket in self._answers}
        if self._batches:  # those before it, with what they have failed with, as at home
            self._is_cut_short = True
            self._take_ready(0.0)
            self._is_cut_short = False
        return {member: self._content(member, answer) for member, answer in answers.items()}

    def _ask_there(self, orders: Mapping[Member, tuple[Any, ...]]) -> dict[Member, Any]:
        """As `_ask`. Nodes that are starting get the orders, too: they come after their start, which nobody awaits."""
        for member, order in orders.items():
            if member.state == "starting":
                self._send(member, *order, awaited=False)
        return self._ask({member: order for member, order in orders.items() if member.state == "up"})

    def _await(self, tickets: Mapping[Member, Ticket], until: float) -> None:
        while any(ticket in self._owed for ticket in tickets.values()) and time.monotonic() < until:
            self._hear(_SLICE_S)

    def _content(self, member: Member, answer: Answered) -> Any:
        if answer.failure is None:
            return answer.content
        if answer.closed:
            self.close()
        answer.failure.add_note(f"On {member.place}.")
        raise answer.failure

    def _hear(self, timeout_s: float) -> None:
        """Takes what has come, once there is something; pings, and sees who is lost and who is there."""
        self._require_open()
        warned, was_cut_short = list[tuple[str, type[Warning]]](), self._is_cut_short
        self._is_cut_short = was_cut_short or bool(self._batches)  # a Ctrl-C may lose the answer of one
        try:
            self._listen(timeout_s, warned)
            self._is_cut_short = was_cut_short
        finally:
            for text, category in warned:  # last: filters may make errors of them
                warnings.warn(text, category, stacklevel=caller_stacklevel())

    def _listen(self, timeout_s: float, warned: list[tuple[str, type[Warning]]]) -> None:
        """What `_hear` does. warned: receives the warnings of nodes."""
        now = time.monotonic()
        for member in self._members:
            if member.is_met and member.pinged_at <= member.heard_at and now - member.pinged_at > PING_S:
                member.pinged_at = now
                self._send(member, "ping", beside=True, awaited=False)
        for ticket, data in self._engine.wait([*self._owed], timeout_s).items():
            if ticket not in self._owed:
                continue  # of a node that was lost meanwhile
            member, name = self._owed.pop(ticket)
            member.heard_at = max(time.monotonic(), member.pinged_at)
            if isinstance(data, HostGone):
                self._lose(member, data.reason, is_final=data.is_final)
                continue
            answer: Answered = opened(data)
            warned += tell(member, answer)
            if name == "meet":
                self._meet(member, answer)
            elif name == "start":
                self._is_started(member, answer)
            elif name:
                self._answers[ticket] = answer
        for member in self._members:
            silent_s = time.monotonic() - member.pinged_at
            if member.is_met and member.pinged_at > member.heard_at and silent_s > self._engine.node_timeout:
                self._lose(member, f"nothing was heard from it for {silent_s:.3g} s")
            elif not member.is_met:
                self._look_for_room(member, time.monotonic() - member.launched_at)

    # ---- starts

    def _launch(self, member: Member) -> None:
        """Begins to start a node host, and asks what there is."""
        member.host = self._engine.start(member.index, len(member.collectors))
        member.version, member.state, member.is_met, member.is_said = 0, "starting", False, False
        member.launched_at, member.pinged_at = time.monotonic(), 0.0
        self._send(member, "meet", [*self._modules], [os.path.abspath(folder) for folder in sys.path])

    def _look_for_room(self, member: Member, waited_s: float) -> None:
        """Says it where a node host does not begin. Raises ConfigError where that is one of the first."""
        is_over = waited_s >= self._plan.processes.start_timeout_s and not member.restarts
        if waited_s < _ROOM_S or (member.is_said and not is_over):
            return
        room = self._engine.room(member.index)
        text = f"node {member.index} has not begun in {waited_s:.3g} s: {room or 'its process is slow to start'}"
        if is_over:
            raise ConfigError(f"{text}. {'Ask for less with muster.Node, or add machines' if room else _SLOW}")
        if room and member.restarts:
            warnings.warn(text, RuntimeWarning, stacklevel=caller_stacklevel())
        elif room:
            say(text)
        member.is_said = bool(room)

    def _meet(self, member: Member, answer: Answered) -> None:
        """Checks what a node has, and has it start its collectors. Raises ConfigError."""
        met: Met = self._content(member, answer)
        member.is_met, member.where, member.node_id = True, met.host, met.node_id
        if met.missing:
            error = missing_text(self._modules[met.missing[0]], met.missing[0], member.place)
        else:
            versions = compare_versions(versions_here(), met.versions, member.place)
            error = versions.error
            if versions.warning:
                warnings.warn(versions.warning, UserWarning, stacklevel=caller_stacklevel())
        if not error:
            self._send(member, "start", member.plan, self._seeds_of(member), self._kept(member.envs))
        elif member.restarts:
            self._lose(member, error)
        else:
            raise ConfigError(error)

    def _is_started(self, member: Member, answer: Answered) -> None:
        if not member.restarts:
            member.started = self._content(member, answer)
        elif answer.failure is not None or answer.content.fields != self._fields:
            self._lose(member, "its collectors could not be started again as they were")
            return
        member.state = "up"

    # ---- losses

    def _lose(self, member: Member, reason: str, *, is_final: bool = False) -> None:
        """Gives up a node host; begins to start another where that may help, and raises NodeLost otherwise."""
        member.state, member.reason, member.is_met = "lost", reason, False
        member.host.kill()
        self._owed = {ticket: one for ticket, one in self._owed.items() if one[0] is not member}
        self._batches.pop(member, None)
        never = is_final or self._plan.max_restarts is None or not self._image[0]  # not even a first batch
        if never or len(self._up()) < self._engine.min_nodes:
            self.close()
            raise self._lost(member)
        try:
            self._budget.spend(member.index, reason)
        except BaseException:
            self.close()
            raise
        self._notes.append(
            f"{member.place} is lost: {reason}. The parts of its {len(member.collectors)} collectors are masked until "
            "another is in its place"
        )
        member.restarts += 1
        self._launch(member)

    def _seeds_of(self, member: Member) -> list[int | None]:
        seeds = [self._seeds[k] for k in member.collectors]
        if not member.restarts:
            return seeds
        keys = 0, member.restarts  # a collector's own successors have one number
        return [
            None if seed is None else int(np.random.SeedSequence(seed, spawn_key=keys).generate_state(1)[0])
            for seed in seeds
        ]

    def _kept(self, envs: range) -> Attributes:
        return {env: {name: value.data for name, value in self._attributes[env].items()} for env in envs}

    def _lost(self, member: Member) -> NodeLost:
        return NodeLost(member.name, member.where, member.reason)

    def _require_open(self) -> None:
        if self._closed:
            raise ClosedError("the nodes' collectors are closed")


def _image_of(weights: SharedWeights) -> Image:
    version, image = weights.image()
    return version, np.frombuffer(image, np.uint8)


def _block(layout: BatchLayout) -> Any:
    return np.empty(layout.block_bytes, np.uint8)
