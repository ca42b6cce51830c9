"""The driver's end of collectors on several nodes: what is ordered, what comes back, and batches of it."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from muster.errors import ClosedError, SpecMismatch
from muster.hosts.failures import Failure
from muster.hosts.questions import EnvQuestion, Kept
from muster.introspection import caller_stacklevel
from muster.pool.notices import say
from muster.rollout.cluster.crew import Crew, Warned
from muster.rollout.cluster.engine import Engine, Ticket
from muster.rollout.cluster.member import SLICE_S, Member
from muster.rollout.cluster.node_host import Image, NodeBatch, Started
from muster.rollout.replicas.batch_memory import BatchLayout
from muster.rollout.replicas.plans import Filled, PoolPlan
from muster.rollout.replicas.shared_weights import SharedWeights, WeightShapes
from muster.rollout.storage import Storage

_STATS_S = 2.0


class Fleet:
    """Runs replicas on several nodes: a `RunsReplicas`. The arguments: see `ReplicaPool`.

    A node whose host ends, or says nothing for `node_timeout`, is lost. With `max_restarts` its part of batches is
    masked until its successor is there; nobody waits for that. Otherwise that raises NodeLost.
    """

    def __init__(self, plan: PoolPlan, kept: Kept, engine: Engine) -> None:
        self._plan, self._kept, self._engine = plan, kept, engine
        self._crew = Crew(plan, kept, engine)
        self._members = self._crew.members
        self._batches: dict[Member, Ticket] = {}  # the batches under way
        self._ready: deque[Filled] = deque()
        self._number = 0  # of the batch
        self._is_cut_short = False
        self._weights: SharedWeights | None = None
        self._image: Image = 0, np.empty(0, np.uint8)

    # ---- what `Replicas` asks for

    def start(self, seeds: Sequence[int | None]) -> None:
        self._crew.seeds[:] = seeds
        for member in self._members:
            self._crew.launch(member)
        while any(member.state != "up" for member in self._members):
            self._hear(SLICE_S)
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
        say(f"{len(self._layouts)} collectors on {on_nodes} of {self._engine.name}: {of_each}")

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
            for member in self._crew.up():
                # One at a time: the next order has what is left out.
                if member.push is None or not self._crew.is_owed(member.push):
                    member.push = self._crew.send(member, "weights", image, beside=True, awaited=False)
                    member.version = max(member.version, image[0])

    def reset(self, seeds: Sequence[int | None], frames: int = 0) -> None:
        self.give_up()
        self._crew.seeds[:] = seeds
        orders = {}
        for member in self._members:
            own = member.collectors
            member.frames = frames // len(seeds) * len(own)
            orders[member] = "reset", seeds[own.start : own.stop], member.frames
        self._ask_there(orders)

    def ask(self, question: EnvQuestion) -> list[Any]:
        """As `ReplicaPool.ask`. Nodes that are out of reach are an error where the question needs all envs."""

        def act() -> list[Any]:
            if question.needs_all:
                self._require_up(self._members)
            orders = {member: ("ask", question.to(member.envs)) for member in self._members}
            answers = self._ask_there(orders) if question.key is not None else self._ask_up(orders)
            if question.needs_all or not answers:
                self._require_up([member for member in self._members if member not in answers])
            for member, of_node in answers.items():
                answers[member] = [_of(member, one) if isinstance(one, Failure) else one for one in of_node]
            return [one for member in self._members for one in answers.get(member) or [None] * len(member.envs)]

        return self._kept.while_asking(question, act)

    def _require_up(self, members: Sequence[Member]) -> None:
        for member in members:
            if member.state != "up":
                raise self._crew.lost(member)

    def stats(self) -> dict[str, Any]:
        """As of `ReplicaPool`, and for any thread; of a node that does not answer, the last that is known, as stale."""
        fresh = {*self._members} if self._crew.closed else self._crew.take_stats(_STATS_S)
        known = [(member, member.stats) for member in self._members if member.stats]
        sums = {key: sum(stats[key] for _, stats in known) for key in ("env_steps", "restarts", "processes")}
        sums["restarts"] += sum(member.restarts * len(member.envs) for member in self._members)
        of_node = {member: {"node": member.index} | ({} if member in fresh else {"stale": True}) for member, _ in known}
        return {**sums, "workers": [one | of_node[member] for member, stats in known for one in stats["workers"]]}

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
        self._crew.close()

    # ---- collecting

    def collect(self) -> Filled:
        if self._is_cut_short:
            self.give_up()
        self._hear(0.0)
        return self._collect_all() if self._plan.sync else self._collect_first()

    def give_up(self) -> None:
        self._ready.clear()
        if not self._crew.closed:
            self._stop()
        for ticket in self._batches.values():
            self._crew.forget(ticket)
        self._batches.clear()
        self._is_cut_short = False
        if self._crew.closed:
            return
        self._ask(dict.fromkeys(self._crew.up(), ("give_up",)))

    def _collect_all(self) -> Filled:
        storage = self._layouts[0].storage(_block(self._layouts[0]))
        versions, missing = np.zeros(storage.N, np.int64), {*self._members}
        self._order(self._crew.up())
        ordered, done, is_stopped = self._image[0], 0, False
        while self._batches:
            self._is_cut_short = True
            self._hear(SLICE_S)
            for member, batch in self._arrived():
                part = slice(member.envs.start, member.envs.stop)
                self._fill(member, storage, part, batch)
                versions[part] = batch.versions
                self._check(member, storage.mask[:, part], batch.versions, ordered)
                missing.discard(member)
                done += len(member.collectors)
            if self._batches and done >= self._plan.threshold and not is_stopped:
                self._stop()
                is_stopped = True
        self._is_cut_short = False
        for member in missing:
            storage.blank(slice(member.envs.start, member.envs.stop))
        if len(missing) == len(self._members):
            raise self._crew.lost(self._members[0])
        storage.finals.sort(key=lambda one: (one.time, one.env))
        storage.losses.sort(key=lambda one: (one.time, one.env))
        return Filled(storage, 0, versions, self._take_notes())

    def _collect_first(self) -> Filled:
        while not self._ready:
            self._order_idle()
            if not self._crew.up():
                raise self._crew.lost(self._members[0])
            self._take_ready(SLICE_S)
        self._order_idle()  # at most one batch of each node waits besides those there
        return self._ready.popleft()._replace(notes=self._take_notes())

    def _order_idle(self) -> None:
        self._order([member for member in self._crew.up() if member not in self._batches])

    def _take_ready(self, timeout_s: float) -> None:
        self._hear(timeout_s)
        for member, batch in self._arrived():
            k = next(k for k, plan in enumerate(self._plan.plans) if plan.envs.start == batch.first_env)
            storage = self._layouts[k].storage(_block(self._layouts[k]))
            self._fill(member, storage, slice(0, storage.N), batch)
            self._ready.append(Filled(storage, batch.first_env, np.array(batch.versions)))  # not the message's memory

    def _order(self, members: Sequence[Member]) -> None:
        assert self._weights is not None
        if members and self._weights.version != self._image[0]:
            self._image = _image_of(self._weights)
        self._number += 1
        was_cut_short, self._is_cut_short = self._is_cut_short, bool(members)
        for member in members:
            image = None if member.version >= self._image[0] else self._image
            self._batches[member] = self._crew.send(member, "collect", self._number, image)
            # After it: a Ctrl-C may come while it is sent.
            member.version, member.number = max(member.version, self._image[0]), self._number
        self._is_cut_short = was_cut_short

    def _arrived(self) -> list[tuple[Member, NodeBatch]]:
        """The batches that have come. Raises what a node has failed with."""
        done = [(member, ticket) for member, ticket in self._batches.items() if ticket in self._crew.answers]
        for member, _ in done:
            del self._batches[member]
        return [(member, self._crew.content(member, self._crew.answers.pop(ticket))) for member, ticket in done]

    def _fill(self, member: Member, storage: Storage, part: slice, batch: NodeBatch) -> None:
        storage.write_columns(part, batch.columns)
        storage.add_ends(batch.finals, batch.losses, batch.infos, part.start)
        member.frames += storage.T * len(range(*part.indices(storage.N)))
        self._crew.notes += batch.notes

    def _check(self, member: Member, mask: Any, versions: Any, ordered: int) -> None:
        """Raises NodeLost where rows have other weights than those that were ordered."""
        if (mask.any(axis=0) & (versions != ordered)).any():
            member.reason = f"it acted with weights {versions.tolist()}, ordered were {ordered}"
            self.close()
            raise self._crew.lost(member)

    def _stop(self) -> None:
        for member in self._batches:
            self._crew.send(member, "stop", member.number, beside=True, awaited=False)

    def _take_notes(self) -> list[str]:
        notes = [*self._crew.notes]
        self._crew.notes.clear()
        return notes

    # ---- orders and answers

    def _ask(self, orders: Mapping[Member, tuple[Any, ...]]) -> dict[Member, Any]:
        """Gives orders between batches; returns the contents of the answers, without those of nodes that were lost."""
        self._require_open()
        if self._is_cut_short:
            self.give_up()
        tickets: dict[Member, Ticket] = {}
        try:
            for member, order in orders.items():
                tickets[member] = self._crew.send(member, *order)
            while any(self._crew.is_owed(ticket) for ticket in tickets.values()):
                self._hear(SLICE_S)
        finally:
            came = {member: self._crew.forget(ticket) for member, ticket in tickets.items()}
        if self._batches:  # those before it, with what they have failed with, as at home
            self._is_cut_short = True
            self._take_ready(0.0)
            self._is_cut_short = False
        return {member: self._crew.content(member, one) for member, one in came.items() if one is not None}

    def _ask_there(self, orders: Mapping[Member, tuple[Any, ...]]) -> dict[Member, Any]:
        """As `_ask`. Nodes that are starting get the orders, too, after their start, which nobody awaits.

        What comes before that order it has itself: seeds, frames and attributes.
        """
        for member, order in orders.items():
            if member.state == "starting" and member.is_met:
                self._crew.send(member, *order, awaited=False)
        return self._ask_up(orders)

    def _ask_up(self, orders: Mapping[Member, tuple[Any, ...]]) -> dict[Member, Any]:
        return self._ask({member: order for member, order in orders.items() if member.state == "up"})

    def _hear(self, timeout_s: float) -> None:
        """Takes what has come, once there is something; pings, and sees who is lost and who is there."""
        self._require_open()
        warned, was_cut_short = Warned(), self._is_cut_short
        self._is_cut_short = was_cut_short or bool(self._batches)  # a Ctrl-C may lose the answer of one
        try:
            self._crew.listen(timeout_s, warned)
            self._batches = {member: one for member, one in self._batches.items() if member.state == "up"}
            self._is_cut_short = was_cut_short
        finally:
            for text, category in warned:  # last: filters may make errors of them
                warnings.warn(text, category, stacklevel=caller_stacklevel())

    def _require_open(self) -> None:
        if self._crew.closed:
            raise ClosedError("the nodes' collectors are closed")


def _image_of(weights: SharedWeights) -> Image:
    version, image = weights.image()
    return version, np.frombuffer(image, np.uint8)


def _of(member: Member, failure: Failure) -> Failure:
    """The failure of an env, with the name of its node."""
    notes = filter(None, (f"On {member.place}.", failure.note))
    return replace(failure, note="\n".join(notes))


def _block(layout: BatchLayout) -> Any:
    return np.empty(layout.block_bytes, np.uint8)
