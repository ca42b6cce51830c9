"""The ways of batches from places to their owner: blocks of memory that both share, or parcels from other machines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from muster._core import own
from muster.pool.engine import Ticket
from muster.pool.far_pool import FarPool
from muster.pool.messages import Message
from muster.rollout.fields import Array
from muster.rollout.replicas.batch_memory import BatchLayout, BatchMemory, Block, stop_flag
from muster.rollout.replicas.hooks import PlaceHooks, ReplicaHooks
from muster.rollout.replicas.plans import PoolPlan, ReplicaFields
from muster.rollout.replicas.replica import Collect, Collected
from muster.rollout.replicas.shared_weights import SharedWeights
from muster.rollout.storage import Final, LastInfos, Loss, Storage


class Carrier(ABC):
    """The way of batches. In sync mode all places fill one batch, otherwise each one of its own.

    kind: the class of answers.  gives_up: the question that has places drop what they do, where a stop does not.
    """

    kind: type
    gives_up: Message | None = None

    def __init__(self, plan: PoolPlan) -> None:
        self._plans, self._sync = plan.plans, plan.sync
        self._layouts: list[BatchLayout] = []  # by collector

    def lay_out(self, fields: ReplicaFields) -> None:
        """Says which fields batches have, before the first is ordered."""
        self._layouts = [plan.content.layout(fields) for plan in self._plans]

    @abstractmethod
    def orders(self, places: Sequence[int], afresh: Collection[int]) -> Mapping[int, Message]:
        """The orders for places that are idle; memory for the rows is there. afresh: who begins new episodes."""

    def sent(self, places: Collection[int]) -> None:
        """Notes that the orders of these places were sent."""

    @abstractmethod
    def storage(self, place: int, answer: Any) -> tuple[Storage, int] | None:
        """The storage of the batch that a place fills, and the index of its first env. answer: None for a lost one.

        None: a lost place has no batch of its own.
        """

    @abstractmethod
    def fill(self, place: int, answer: Any, storage: Storage, part: slice) -> Any:
        """Adds the rows and ends of an answer to the storage; returns the weights' version, or versions by env."""

    @abstractmethod
    def finish(self, places: Sequence[int]) -> None:
        """Ends the batch, or the batches, of these places."""

    @abstractmethod
    def stop(self, places: Sequence[int]) -> None:
        """Ends batches that are under way early. For any thread."""

    def follow(self, weights: SharedWeights) -> None:
        """Has places follow `weights`, which have a new version."""


class Blocks(Carrier):
    """A block of shared memory for each batch, which replicas write and the owner reads: nothing is copied.

    Replicas look for weights in the file that they have.
    """

    kind = Collected

    def __init__(self, plan: PoolPlan, memory: BatchMemory, hooks: ReplicaHooks) -> None:
        super().__init__(plan)
        self._memory, self._hooks = memory, hooks
        self._blocks: dict[int, Block] = {}  # by place, the block that it fills

    def orders(self, places: Sequence[int], afresh: Collection[int]) -> Mapping[int, Message]:
        one = self._take(places[0]) if self._sync and places else None
        orders = {}
        for place in places:
            offset, self._blocks[place] = one or self._take(place)
            stop_flag(self._blocks[place])[0] = 0
            orders[place] = Collect(offset, self._hooks.frames[place], place in afresh, place in self._hooks.due)
        return orders

    def storage(self, place: int, answer: Collected | None) -> tuple[Storage, int]:
        if place not in self._blocks:  # one that was lost before it was ordered anything
            _, self._blocks[place] = self._take(place)
        first_env = 0 if self._sync else self._plans[place].envs.start
        return self._layouts[place].storage(self._blocks[place]), first_env

    def fill(self, place: int, answer: Collected, storage: Storage, part: slice) -> int:
        hooks = self._hooks
        hooks.counts[place], hooks.waiting[place] = answer.counts, answer.waiting
        if answer.has_ended:
            hooks.ended.add(place)
        if answer.lost:
            hooks.notes.append(
                f"{hooks.nouns.name(place)} was built again, and what set_attr had set is lost: {answer.lost}. "
                "It goes on with what its constructor gives it: call set_attr again, or give the factory the value"
            )
        hooks.frames[place] += int(storage.mask[:, part].sum())
        storage.add_ends(answer.finals, answer.losses, answer.infos, part.start)
        return answer.version

    def finish(self, places: Sequence[int]) -> None:
        for block in {id(block): block for block in (self._blocks.pop(place, None) for place in places)}.values():
            if block is not None:
                own(block.base)  # the caller's from now on, which a forked child has a copy of

    def stop(self, places: Sequence[int]) -> None:
        for block in [*self._blocks.values()]:  # a copy: another thread may close
            stop_flag(block)[0] = 1

    def _take(self, place: int) -> tuple[int, Block]:
        return self._memory.take_block(self._layouts[place].block_bytes)


# ---- batches from other machines


@dataclass(eq=False)
class TakeWeights(Message):
    """Has replicas follow weights: see `SharedWeights.image`."""

    version: int
    image: Array


@dataclass(eq=False)
class CollectFor(Message):
    """Asks a node for batch `number`. weights: newer ones than it has, if any."""

    number: int
    weights: TakeWeights | None


@dataclass(eq=False)
class Stop(Message):
    """Ends batch `number` early, if that is under way."""

    number: int


@dataclass(eq=False)
class GiveUp(Message):
    """Drops the batches that are under way: the next ones begin new episodes."""


@dataclass(eq=False)
class NodeBatch(Message):
    """A batch of a node. first_env, versions, notes: as of `Filled`.  columns: of its storage."""

    first_env: int
    columns: list[Array]
    finals: list[Final]
    losses: list[Loss]
    infos: LastInfos
    versions: Array
    notes: Sequence[str]


class Parcels(Carrier):
    """Batches from nodes, with columns that are copied once.

    In sync mode weights ride with the order, and each row that is not masked has to have their version. Otherwise they
    are pushed at once, one push a node at a time: the next order has what is left out.
    """

    kind, gives_up = NodeBatch, GiveUp()

    def __init__(self, plan: PoolPlan, pool: FarPool, hooks: PlaceHooks) -> None:
        super().__init__(plan)
        self._pool, self._hooks = pool, hooks
        self._number = self._ordered = 0  # of the batch, and of its weights
        self._numbers: dict[int, int] = {}  # of batches under way, by place
        self._pushed: dict[int, Ticket] = {}  # the last push, by place
        self._weights: SharedWeights | None = None
        self._image = TakeWeights(0, np.empty(0, np.uint8))

    def orders(self, places: Sequence[int], afresh: Collection[int]) -> Mapping[int, Message]:
        image = self._newest()
        self._ordered = image.version
        self._number += 1
        self._numbers |= dict.fromkeys(places, self._number)  # first: what has begun can be stopped
        plain, with_weights = CollectFor(self._number, None), CollectFor(self._number, image)
        return {one: plain if self._hooks.versions[one] >= image.version else with_weights for one in places}

    def sent(self, places: Collection[int]) -> None:
        for place in places:
            self._hooks.versions[place] = max(self._hooks.versions[place], self._ordered)

    def storage(self, place: int, answer: NodeBatch | None) -> tuple[Storage, int] | None:
        if self._sync:
            layout, first_env = self._layouts[0], 0
        elif answer is not None:
            first_env = answer.first_env
            layout = next(at for plan, at in zip(self._plans, self._layouts, strict=True) if plan.envs[0] == first_env)
        else:
            return None
        return layout.storage(np.empty(layout.block_bytes, np.uint8)), first_env

    def fill(self, place: int, answer: NodeBatch, storage: Storage, part: slice) -> Array:
        ours, theirs = ([(one.dtype, one.shape[1:]) for one in of] for of in (storage.columns(), answer.columns))
        versions = np.array(answer.versions)  # not the message's memory
        wrong = f"its batches have columns {theirs}, expected {ours}" if ours != theirs else ""
        if not wrong:
            storage.write_columns(part, answer.columns)
            storage.add_ends(answer.finals, answer.losses, answer.infos, part.start)
            if self._sync and (storage.mask[:, part].any(axis=0) & (versions != self._ordered)).any():
                wrong = f"it acted with weights {versions.tolist()}, ordered were {self._ordered}"
        if wrong:
            error = self._hooks.lost(place, wrong)
            assert error is not None
            with self._pool.whole():
                raise error
        self._hooks.frames[place] += storage.T * len(range(*part.indices(storage.N)))
        self._hooks.notes += answer.notes
        return versions

    def finish(self, places: Sequence[int]) -> None:
        for place in places:
            self._numbers.pop(place, None)

    def stop(self, places: Sequence[int]) -> None:
        for place in places:
            if place in self._pool.reachable and place in self._numbers and not self._pool.closed:
                self._pool.post_now(place, Stop(self._numbers[place]))

    def follow(self, weights: SharedWeights) -> None:
        self._weights = weights
        if self._sync or not self._number:  # not awaited, nor before the first batch
            return
        image = self._newest()
        for place in self._pool.reachable:
            if place not in self._pushed or not self._pool.owes(self._pushed[place]):
                self._pushed[place] = self._pool.post_now(place, image)
                self._hooks.versions[place] = max(self._hooks.versions[place], image.version)

    def _newest(self) -> TakeWeights:
        assert self._weights is not None
        if self._weights.version != self._image.version:
            version, image = self._weights.image()
            self._image = TakeWeights(version, np.frombuffer(image, np.uint8))
        return self._image
