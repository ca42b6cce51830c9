"""What becomes of the replicas in a pool: who comes after one, what they are doing, and what they end with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from muster.errors import CollectorError, MusterError, WorkerName
from muster.hosts.questions import Again, Kept
from muster.pool.deaths import Nouns
from muster.pool.messages import Failed
from muster.pool.place import Budget, Plan
from muster.pool.verbs import Hooks, Successor
from muster.rollout.fields import Array
from muster.rollout.replicas.replica import COUNTS, Begin


class ReplicaFailed(Exception):
    """What a replica has raised, until the learner's side makes the user's error of it.

    name: of the collector.  is_final: restarting the replica's envs did not help.
    """

    def __init__(self, name: WorkerName, failed: Failed, is_final: bool = False) -> None:
        super().__init__(name, failed, is_final)
        self._name, self._failed, self._is_final = name, failed, is_final

    def __str__(self) -> str:
        return str(self.error())

    def error(self) -> BaseException:
        """The user's error."""
        error = self._made()
        for note in getattr(self, "__notes__", ()):
            error.add_note(note)
        return error

    def _made(self) -> BaseException:
        failed, error = self._failed, self._failed.original()
        if self._is_final and error is not None:
            return error
        if not isinstance(error, MusterError):
            about = f"\n{failed.about}" if failed.about else ""
            raised, error = error, CollectorError(self._name, f"{failed.type_name}: {failed.message}{about}")
            error.__cause__ = raised
        error.add_note(f"In the collector's process:\n{failed.traceback.rstrip()}")
        return error


def seed_after(seed: int | None, *keys: int) -> int | None:
    """The seed of one that comes after another with this seed. keys: which one."""
    return None if seed is None else int(np.random.SeedSequence(seed, spawn_key=keys).generate_state(1)[0])


class ReplicaHooks(Hooks):
    """What the pool asks its owner, see `Hooks`; the pool's finalizer does not hang on it.

    restarts: whether others come.
    reasons: by collector, why the one before was lost, until a batch says so.
    seeds: for the next replicas.  kept: what envs are asked again.
    replaced: how often, by collector.  counts: int64 ``[collectors, COUNTS]``, of the current processes.
    """

    def __init__(self, plans: Sequence[Plan], nouns: Nouns, max_restarts: int | None, kept: Kept) -> None:
        self._plans, self._nouns = plans, nouns
        self.restarts = max_restarts is not None
        self._budget = Budget(max_restarts or 0, nouns)
        self.reasons: dict[int, str] = {}
        self.seeds: list[int | None] = [None] * len(plans)
        self.kept = kept
        self.counts, self._counts_before = np.zeros((2, len(plans), len(COUNTS)), np.int64)
        self.replaced = [0] * len(plans)

    def successor(self, place: int, reason: str) -> Successor:
        """Counts a replica as gone; returns who comes next. Raises WorkerError where that was one too many."""
        self._budget.spend(place, reason)
        self._counts_before[place] += self.counts[place]
        self._counts_before[place, COUNTS.index("restarts")] += len(self._plans[place].envs)
        self.counts[place] = 0
        self.reasons[place] = reason
        self.replaced[place] += 1
        seed = seed_after(self.seeds[place], self.replaced[place])
        self._plans[place].seed(seed)
        again = Again(self.kept.of(self._plans[place].envs))
        return Successor(self._plans[place].content, [again, Begin(seed)])

    def counts_so_far(self) -> Array:
        """int64 ``[collectors, COUNTS]``, of all processes so far."""
        return self._counts_before + self.counts

    def on_lost(self, place: int, reason: str) -> Successor | None:
        return self.successor(place, reason) if self.restarts else None

    def raised(self, place: int, failed: Failed, is_final: bool = False) -> ReplicaFailed:
        return ReplicaFailed(self._nouns.name(place), failed, is_final)
