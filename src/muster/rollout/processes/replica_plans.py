"""Plans of a pool's replicas: which envs and which policy each builds, and where it writes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from muster.pickling.shared_pickling import Fds
from muster.recipes.recipe import Recipe, check_forkable, pack
from muster.rollout.collector_set import CollectorOptions
from muster.rollout.fields import Field
from muster.rollout.processes.batch_memory import BatchLayout
from muster.rollout.processes.policy_travel import pack_factory, pack_policy


@dataclass(frozen=True)
class ReplicaFacts:
    """The facts of a replica that the caller needs: the fields of its rollouts."""

    observation_fields: tuple[Field, ...]
    reward_fields: tuple[Field, ...]
    output_fields: tuple[Field, ...]


@dataclass(frozen=True)
class ReplicaPlan:
    """The plan of one replica: how it is built, and where it writes.

    recipes: those of its envs, packed unless its process inherits them.  fds: what `unpack` needs for them.
    first_env: index of its first env among all.  num_envs: number of all envs.
    policy: packed; None for random actions.  policy_is_factory: `policy` is a factory, to be called for the policy.
    part: the replica's own part of a batch's envs.  batch_envs: number of envs in a batch.
    batch_memory_path, weights_path: the shared memory, as files of the caller's process.
    max_restarts: of envs that raise, see `serial_vec`.
    options: for `Collector`.
    """

    index: int
    recipes: bytes | list[Recipe]
    fds: Fds
    first_env: int
    num_envs: int
    num_collectors: int
    policy: bytes | None
    policy_is_factory: bool
    part: tuple[int, int]
    batch_envs: int
    batch_memory_path: str
    weights_path: str
    max_restarts: int | None
    options: Mapping[str, Any]

    def layout(self, facts: ReplicaFacts) -> BatchLayout:
        """The layout of the blocks of batch memory that the replica writes into."""
        first, last = self.part
        T = self.options["frames_per_batch"] // (last - first)
        compact = bool(self.options["compact"])
        return BatchLayout(
            T, self.batch_envs, facts.observation_fields, facts.reward_fields, facts.output_fields, compact
        )


def plans_for(
    recipes: Sequence[Recipe],
    firsts: Sequence[int],
    policy: Any,
    policy_factory: Callable[[], Any] | None,
    *,
    sync: bool,
    batch_memory_fd: int,
    weights_fd: int,
    collector_options: Mapping[str, Any],
    options: CollectorOptions,
) -> list[ReplicaPlan]:
    """One plan for each part of the recipes. firsts: where each part begins, followed by the end of the last part.

    Raises CannotTravel, and what `check_forkable` raises.
    """
    is_forked = options.context == "fork"
    start_method = "forkserver" if options.context == "auto" else options.context
    if policy_factory is not None:
        sent: bytes | None = pack_factory(policy_factory, start_method)
    else:
        sent = None if policy is None else pack_policy(policy)
    if is_forked:
        check_forkable(recipes)
    files = f"/proc/{os.getpid()}/fd"
    count, num_envs = len(firsts) - 1, len(recipes)
    plans = []
    for k, (first, last) in enumerate(pairwise(firsts)):
        own = recipes[first:last]
        part = (first, last) if sync else (0, last - first)
        batch_envs = num_envs if sync else last - first
        fds: list[int] = []
        # A forked process has the recipes already, whatever they hold.
        packed = list(own) if is_forked else pack(own, start_method=start_method, fds=fds)
        T = -(-collector_options["frames_per_batch"] // batch_envs)
        plans.append(
            ReplicaPlan(
                index=k,
                recipes=packed,
                fds=Fds(fds),
                first_env=first,
                num_envs=num_envs,
                num_collectors=count,
                policy=sent,
                policy_is_factory=policy_factory is not None,
                part=part,
                batch_envs=batch_envs,
                batch_memory_path=f"{files}/{batch_memory_fd}",
                weights_path=f"{files}/{weights_fd}",
                max_restarts=options.restarts,
                options={
                    **collector_options,
                    "frames_per_batch": T * (last - first),
                    "init_random_frames": -(-collector_options["init_random_frames"] // count),
                },
            )
        )
    return plans
