"""The fates of nodes: met, started, lost and followed by others; and a replica pool with nodes as its places."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from muster.errors import ConfigError, NodeLost, WorkerError
from muster.hosts.questions import Again, Kept
from muster.introspection import caller_stacklevel
from muster.pool.deaths import Nouns
from muster.pool.engine import Engine
from muster.pool.far_pool import FarHooks, FarPool
from muster.pool.far_worker import Met
from muster.pool.messages import Failed, Message
from muster.pool.notices import say
from muster.pool.place import Budget, Plan
from muster.pool.unique_indices import tree
from muster.pool.verbs import Successor
from muster.rollout.cluster.node_probe import compare_versions, missing_text, versions_here
from muster.rollout.cluster.node_resident import AskStats, BeginAll, Greeting, NodePlan, Shared
from muster.rollout.cluster.nodes import Node, RayCluster, shares
from muster.rollout.cluster.ray_engine import RayEngine
from muster.rollout.replicas.carriers import Parcels
from muster.rollout.replicas.hooks import PlaceHooks, ReplicaFailed, seed_after
from muster.rollout.replicas.plans import PoolPlan, ReplicaFields
from muster.rollout.replicas.replica import AskFields
from muster.rollout.replicas.replica_pool import ReplicaPool
from muster.worker_info import WorkerInfo

_STATS_S = 2.0


class NodeHooks(PlaceHooks, FarHooks):
    """The hooks of nodes.

    A node that is lost is masked until another is in its place, and nobody waits for that.
    """

    def __init__(
        self,
        plan: PoolPlan,
        plans: Sequence[Plan],
        collectors: Sequence[range],
        nouns: Nouns,
        engine: Engine,
        kept: Kept,
    ) -> None:
        super().__init__(plans, collectors, nouns, kept)
        self._plan, self._engine = plan, engine
        self._budget = Budget(plan.limits.restarts or 0, nouns)
        self._machines: list[tuple[str, str]] = [("a machine", "")] * len(plans)
        self._reasons, self._stats = [""] * len(plans), [dict[str, Any]() for _ in plans]
        self._has_started = False

    def launches(self, seeds: Sequence[int | None]) -> None:
        self.seeds = [*seeds]
        for plan, own in zip(self.plans, self.collectors, strict=True):
            plan.content = replace(plan.content, seeds=seeds[own.start : own.stop])

    def met(self, place: int, met: Met) -> tuple[str, str]:
        self._machines[place] = met.host, met.node_id
        there = met.content if isinstance(met.content, Mapping) else {}
        return compare_versions(versions_here(), there, self._name(place))

    def started(self, fields: ReplicaFields) -> None:
        self._has_started = True
        needed = 2 * self._plan.plans[0].content.layout(fields).block_bytes  # one is read, one is written
        if needed > (there := self._engine.store_bytes()):
            warnings.warn(
                f"batches on their way take up to {needed / 1e6:,.0f} MB, and a node of {self._engine.name} has "
                f"{there / 1e6:,.0f} MB for them: they will go by disk. Give it more "
                "(`ray start --object-store-memory`) or ask for fewer frames_per_batch",
                UserWarning,
                stacklevel=caller_stacklevel(),
            )
        machines = zip(self.collectors, self._machines, strict=True)
        each = ", ".join(f"{len(own)} on {host}" for own, (host, _) in machines)
        count = f"{len(self.plans)} node{'s' * (len(self.plans) > 1)}"
        say(f"{len(self.seeds)} collectors on {count} of {self._engine.name}: {each}")

    def begin(self, place: int) -> BeginAll:
        return BeginAll([self.seeds[k] for k in self.collectors[place]], self.frames[place])

    def on_lost(self, place: int, reason: str) -> Successor | None:
        self._reasons[place] = reason
        if self._plan.limits.restarts is None:
            return None
        self._budget.spend(place, reason)
        parts = f"The parts of its {len(self.collectors[place])} collectors are masked until another is in its place"
        self.reasons[place] = f"{self._name(place)} is lost: {reason}. {parts}"
        self.replaced[place] += 1
        return Successor(replace(self.plans[place].content, seeds=self._next_seeds(place)))

    def again(self, place: int) -> Sequence[Message]:
        self.versions[place] = 0
        begin = BeginAll(self._next_seeds(place), self.frames[place])
        return Again(self.kept.of(self.plans[place].envs)), begin, AskFields()

    def _next_seeds(self, place: int) -> list[int | None]:
        """The seeds of a successor: a collector's own successors have one number."""
        return [seed_after(self.seeds[k], 0, self.replaced[place]) for k in self.collectors[place]]

    def lost(self, place: int, reason: str = "") -> NodeLost:
        host, _ = self._machines[place]
        return NodeLost(self.nouns.name(place), host, reason or self._reasons[place])

    def raised(self, place: int, failed: Failed, is_final: bool = False) -> Exception:
        error: BaseException | None = failed.original()
        if isinstance(error, ReplicaFailed):
            error = error.error()
        if not isinstance(error, Exception):
            error = WorkerError(self.nouns.name(place), f"failed: {failed.type_name}: {failed.message}")
        missing = missing_text(error, self._name(place))
        if why := self._engine.why_ended():  # that failure is a part of it
            error, error.__cause__ = self.lost(place, why), error
        elif missing and not self._has_started:
            error, error.__cause__ = ConfigError(missing), error
        else:
            error.add_note("\n".join(filter(None, (missing, f"On {self._name(place)}."))))
        return error

    def stats(self, pool: FarPool) -> dict[str, Any]:
        """As of replicas here; of a node that does not answer, the last that is known, as stale."""
        fresh = dict(enumerate(self._stats)) if pool.closed else pool.ask_now(pool.reachable, AskStats(), _STATS_S)
        for place, stats in fresh.items():
            self._stats[place] = stats
        known = [(place, stats) for place, stats in enumerate(self._stats) if stats]
        sums = {
            key: sum(stats[key] for _, stats in known) for key in ("env_steps", "restarts", "recycled", "processes")
        }
        sums["restarts"] += sum(count * len(plan.envs) for count, plan in zip(self.replaced, self.plans, strict=True))
        of_node = {place: {"node": place} | ({} if place in fresh else {"stale": True}) for place, _ in known}
        return {**sums, "workers": [one | of_node[place] for place, stats in known for one in stats["workers"]]}

    def nodes(self, pool: FarPool) -> list[dict[str, Any]]:
        there = pool.reachable
        return [
            {
                "index": place,
                "host": host,
                "node_id": node_id,
                "state": "up" if place in there else "lost" if pool.closed else "starting",
                "collectors": self.collectors[place],
                "policy_version": self.versions[place],
                "reason": self._reasons[place],
            }
            for place, (host, node_id) in enumerate(self._machines)
        ]

    def _name(self, place: int) -> str:
        return f"node {place} ({self._machines[place][0]})"


def on_nodes(plan: PoolPlan, _: int, kept: Kept, *, cluster: RayCluster | Engine) -> ReplicaPool:
    """Replicas on nodes. Takes the place of `in_processes`."""
    engine = RayEngine(cluster) if isinstance(cluster, RayCluster) else cluster
    count, shared, plans = len(plan.plans), Shared(), list[Plan]()
    try:
        sites = engine.places(count)
        collectors = shares(count, sites)
        for index, (site, own) in enumerate(zip(sites, collectors, strict=True)):
            envs = range(plan.plans[own.start].envs.start, plan.plans[own.stop - 1].envs.stop)
            device = site.wish.policy_device if isinstance(site.wish, Node) else None
            of_node = NodePlan.of(plan.of(own, index, device), shared)
            plans.append(Plan(of_node, WorkerInfo(None, index, len(envs), count, seed=None), envs, len(own)))
        nouns = Nouns("node", pool="the collectors are", envs=tuple(one.envs for one in plans))
        hooks = NodeHooks(plan, plans, collectors, nouns, engine, kept)
        greeting = Greeting([os.path.abspath(folder) for folder in sys.path], tree())
        resident = "muster.rollout.cluster.node_resident:NodeResident"
        pool = FarPool(engine, resident, plans, hooks, plan.limits, nouns, greeting)
        return ReplicaPool(plan, pool, Parcels(plan, pool, hooks), hooks)
    except BaseException:  # nobody else closes it yet
        engine.close()
        raise
