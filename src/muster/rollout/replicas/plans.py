"""The plans of replicas and of their pools, and the batches that they return."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from muster.backends.process import ENV_PRELOADS
from muster.hosts.recipe_plans import Recipes
from muster.pool.deaths import Nouns
from muster.pool.limits import CloseLimits, Limit, Limits
from muster.pool.place import Plan
from muster.pool.set_up import NO_INIT, Processes
from muster.rollout.fields import Array, Field
from muster.rollout.replicas.batch_memory import BatchLayout
from muster.rollout.storage import Storage
from muster.rollout.weights import Device

# What launchers import for collectors.
PRELOADS = (*ENV_PRELOADS, "muster.rollout.replicas.replica")


@dataclass(frozen=True)
class ReplicaFields:
    """The fields of a replica's rollouts."""

    observation: tuple[Field, ...]
    reward: tuple[Field, ...]
    output: tuple[Field, ...]


PackedPolicy = Sequence[Any] | int
"""A policy's pickle, and its big buffers; empty for random actions. In a plan that is sent, the number of both: they
are the last among the plan's big ones."""


@dataclass(frozen=True)
class ReplicaPlan:
    """The plan of one replica.

    recipes: those of its envs.  first_env: index of its first env among all.
    policy_is_factory: `policy` is a factory, to be called for the policy.
    part: the replica's own part of a batch's envs.  batch_envs: number of envs in a batch.
    max_restarts, replayable: of the envs, see `serial_vec`.
    options: for `Collector`.
    """

    recipes: Recipes
    first_env: int
    policy: PackedPolicy
    policy_is_factory: bool
    part: tuple[int, int]
    batch_envs: int
    max_restarts: int | None
    replayable: bool
    options: Mapping[str, Any]

    def layout(self, fields: ReplicaFields) -> BatchLayout:
        """The layout of the blocks of batch memory that the replica writes into."""
        first, last = self.part
        T = self.options["frames_per_batch"] // (last - first)
        return BatchLayout(
            *(T, self.batch_envs, fields.observation, fields.reward, fields.output), bool(self.options["compact"])
        )


@dataclass(frozen=True)
class PoolPlan:
    """The plan of a `ReplicaPool`. plans: one for each collector; their contents are `ReplicaPlan`s.

    sync, threshold: as below.  about: for `about_pool`.
    """

    plans: Sequence[Plan]
    processes: Processes
    nouns: Nouns
    limits: Limits
    sync: bool
    threshold: float
    about: Mapping[str, Any]

    @property
    def limit(self) -> Limit | None:
        """The limit of each answer."""
        limit_s = self.limits.step_timeout
        return None if limit_s is None else Limit(limit_s, f"{self.nouns.step_timeout}={limit_s}")

    @property
    def close_limits(self) -> CloseLimits:
        """How long each collector has to close its envs."""
        return self.limits.close(max(map(len, self.nouns.envs)))

    def of(self, collectors: range, node: int, policy_device: Device = None) -> PoolPlan:
        """The plan of some collectors, which node `node` runs. Their batches are compact, for the way.

        policy_device: None for that of all.
        """
        own = self.plans[collectors.start : collectors.stop]
        first, count = own[0].envs.start, own[-1].envs.stop - own[0].envs.start
        plans = [replace(plan, info=replace(plan.info, node_index=node)) for plan in own]
        of_node = {"compact": True} | ({} if policy_device is None else {"policy_device": policy_device})
        for plan in plans:
            part = {"part": (plan.envs.start - first, plan.envs.stop - first), "batch_envs": count}
            options = {**plan.content.options, **of_node}
            plan.content = replace(plan.content, options=options, **(part if self.sync else {}))
        env = self.processes.worker_env
        return replace(
            self,
            plans=plans,
            processes=replace(
                self.processes,
                worker_env=env if env is None or callable(env) else [*env][collectors.start : collectors.stop],
                init=NO_INIT,  # the packed recipes have it
            ),
            nouns=replace(
                self.nouns,
                first_worker=collectors.start,
                envs=self.nouns.envs[collectors.start : collectors.stop],
                dying=self.nouns.dying[collectors.start : collectors.stop],
            ),
            threshold=min(self.threshold, len(own)),
            about={**self.about, "first_envs": [*(plan.envs.start for plan in own), own[-1].envs.stop]},
        )


class Filled(NamedTuple):
    """A complete storage.  first_env: its first env's index among all.  versions: int64 ``[n]``, of weights, by env.

    notes: what the user is to be warned of, such as a collector that was replaced.
    """

    storage: Storage
    first_env: int
    versions: Array
    notes: Sequence[str] = ()


def collector_nouns(envs: Sequence[range], **others: Any) -> Nouns:
    """The nouns that errors use for parts of a `MultiCollector`. envs: of each collector that errors may name."""
    return Nouns("collector", "collect_timeout", "the collectors are", tuple(envs), **others)
