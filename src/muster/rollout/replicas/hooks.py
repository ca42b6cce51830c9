"""The fates of the replicas in a pool: who comes after one, what is known of each, and what they end with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from muster.errors import CollectorError, MusterError, WorkerName
from muster.hosts.questions import Again, Kept
from muster.pool.deaths import Nouns
from muster.pool.messages import Failed, Message
from muster.pool.place import Budget, Plan
from muster.pool.pool import Pool
from muster.pool.resources import MemoryPlan, figures
from muster.pool.verbs import Hooks, Successor
from muster.rollout.replicas.plans import ReplicaFields
from muster.rollout.replicas.replica import COUNTS, Begin


class ReplicaFailed(Exception):
    """The exception of a replica, until the learner's side makes the user's error of it.

    name: of the collector.  is_final: restarting the replica's envs did not help.
    """

    def __init__(self, name: WorkerName, failed: Failed, is_final: bool = False) -> None:
        super().__init__(name, failed, is_final)
        self._name, self._failed, self._is_final = name, failed, is_final

    def __str__(self) -> str:
        return str(self.error())

    def error(self) -> BaseException:
        """The user's error."""
        failed, error = self._failed, self._failed.original()
        if error is None or not self._is_final:
            if not isinstance(error, MusterError):
                about = f"\n{failed.about}" if failed.about else ""
                raised, error = error, CollectorError(self._name, f"{failed.type_name}: {failed.message}{about}")
                error.__cause__ = raised
            error.add_note(f"In the collector's process:\n{failed.traceback.rstrip()}")
        for note in getattr(self, "__notes__", ()):
            error.add_note(note)
        return error


def seed_after(seed: int | None, *keys: int) -> int | None:
    """The seed of one that comes after another with this seed. keys: which one."""
    return None if seed is None else int(np.random.SeedSequence(seed, spawn_key=keys).generate_state(1)[0])


class PlaceHooks(Hooks):
    """The state of each place of a pool of replicas, and answers of its kind; the pool's finalizer does not hang on it.

    collectors: of each place, by their indices in the pool.  kept: what envs are asked again.
    restarts: true if another comes for a replica that has raised, at once.
    reasons: by place, the sentence about the loss of the one before, until a batch says it.
    seeds: for the next collectors.  frames: collected so far, by place.  replaced: how often, by place.
    notes: for the user, with the next batch.  versions: of the weights that nodes were sent last.
    """

    restarts = False

    def __init__(self, plans: Sequence[Plan], collectors: Sequence[range], nouns: Nouns, kept: Kept) -> None:
        self.plans, self.collectors, self.nouns, self.kept = plans, collectors, nouns, kept
        self.reasons: dict[int, str] = {}
        self.seeds: list[int | None] = [None] * collectors[-1].stop
        self.frames, self.replaced, self.versions = [0] * len(plans), [0] * len(plans), [0] * len(plans)
        self.notes: list[str] = []

    def begin(self, place: int) -> Message:
        """The question that has the collectors of a place begin new episodes, with their seeds and frames."""
        raise NotImplementedError

    def launches(self, seeds: Sequence[int | None]) -> MemoryPlan | None:
        """Takes the seeds of the collectors that start; returns the plan for judging memory meanwhile."""
        raise NotImplementedError

    def started(self, fields: ReplicaFields) -> None:
        """Says what has started."""

    def begins(self, seeds: Sequence[int | None], frames: int) -> None:
        """Takes the seeds of the collectors that begin again, and what all of them together have collected before."""
        self.seeds = [*seeds]
        self.frames = [frames // len(seeds) * len(own) for own in self.collectors]

    def stats(self, pool: Any) -> dict[str, Any]:
        """See `MultiCollector.stats`."""
        raise NotImplementedError

    def nodes(self, pool: Any) -> list[dict[str, Any]]:
        """See `MultiCollector.nodes`."""
        raise NotImplementedError

    def note_loss(self, place: int) -> None:
        """Adds the reason why the rows of a place are masked to the notes, unless that was said."""
        if place in self.reasons:
            self.notes.append(self.reasons.pop(place))

    def lost(self, place: int, reason: str = "") -> Exception | None:
        """The error of a place that is out of reach. reason: empty for that of its loss."""
        return None

    def raised(self, place: int, failed: Failed, is_final: bool = False) -> Exception:
        """The exception for what a place has raised. is_final: restarting its envs did not help."""
        raise NotImplementedError


class ReplicaHooks(PlaceHooks):
    """The hooks of replicas in processes of this machine, one collector each.

    counts: int64 ``[collectors, COUNTS]``, of the current processes.  waiting: shares of their time.
    due: by replica, why it is to be replaced where an episode ends.  ended: those of which one has ended since.
    """

    def __init__(self, plans: Sequence[Plan], nouns: Nouns, max_restarts: int | None, kept: Kept) -> None:
        super().__init__(plans, [range(k, k + 1) for k in range(len(plans))], nouns, kept)
        self.restarts = max_restarts is not None
        self._budget = Budget(max_restarts or 0, nouns)
        self.counts, self._counts_before = np.zeros((2, len(plans), len(COUNTS)), np.int64)
        self.waiting = [1.0] * len(plans)
        self.due: dict[int, str] = {}
        self.ended, self.recycled = set[int](), 0

    def launches(self, seeds: Sequence[int | None]) -> MemoryPlan | None:
        for plan, seed in zip(self.plans, seeds, strict=True):
            plan.seed(seed)
        count = len(self.plans)
        return MemoryPlan(count, count, "error") if count > 1 else None

    def begin(self, place: int) -> Begin:
        return Begin(self.seeds[place])

    def on_lost(self, place: int, reason: str) -> Successor | None:
        """Counts a replica as gone; returns who comes next. Raises WorkerError where that was one too many."""
        if not self.restarts:
            return None
        self.spend(place, reason)
        self._counts_before[place, COUNTS.index("restarts")] += len(self.plans[place].envs)
        said = "was replaced, and its part of this batch is masked. The reason"
        self.reasons[place] = f"{self.nouns.name(place)} {said}: {reason}"
        return self._successor(place)

    def spend(self, place: int, reason: str) -> None:
        """Counts a failure. Raises WorkerError where that was one too many."""
        self._budget.spend(place, reason)

    def recycle(self, place: int) -> Successor:
        """Counts a replica as replaced though it was well; returns who comes next."""
        self.recycled += 1
        return self._successor(place)

    def _successor(self, place: int) -> Successor:
        self._counts_before[place] += self.counts[place]
        self.counts[place] = 0
        self.due.pop(place, None)
        self.ended.discard(place)
        self.replaced[place] += 1
        seed = seed_after(self.seeds[place], self.replaced[place])
        self.plans[place].seed(seed)
        again = Again(self.kept.of(self.plans[place].envs))
        return Successor(self.plans[place].content, [again, Begin(seed)])

    def raised(self, place: int, failed: Failed, is_final: bool = False) -> ReplicaFailed:
        return ReplicaFailed(self.nouns.name(place), failed, is_final)

    def stats(self, pool: Pool) -> dict[str, Any]:
        """See `MultiCollector.stats`."""
        counts = self._counts_before + self.counts
        env_steps, _, restarts = counts.sum(axis=0).tolist()
        processes = pool.processes()
        workers = [
            {"collecting": 1.0 - waiting, "waiting": waiting} | figures(*process) | dict(zip(COUNTS, own, strict=True))
            for process, waiting, own in zip(processes, self.waiting, counts.tolist(), strict=True)
        ]
        running = sum(pid is not None for pid, _ in processes)
        said = {"env_steps": env_steps, "restarts": restarts, "recycled": self.recycled}
        return {**said, "processes": running, "workers": workers}
