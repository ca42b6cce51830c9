"""The wishes of users for a cluster, and the shares of its nodes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from muster.arguments import as_whole, check_options, option
from muster.errors import ConfigError
from muster.pool.engine import Site
from muster.rollout.weights import Device


@dataclass(frozen=True)
class Node:
    """A wish for one node host, the process that runs collectors on a machine of a cluster.

    collectors: how many it runs; None for a share of those that no other wishes for, in proportion to the nodes' CPUs.
    cpus: the CPUs that it asks for; None for one for each of its collectors.
    gpus: the GPUs; fractions share one.
    memory_bytes: the memory.
    resources: others, by the names that machines were started with.
    labels: those that the machine must have.
    policy_device: where its replicas of the policy act; None for MultiCollector's `policy_device`. "cuda" is the GPU
        that the node host was given.

    Raises ConfigError.

    >>> import muster
    >>> learner, actor = muster.Node(collectors=2, gpus=1), muster.Node(collectors=6)
    >>> muster.RayCluster(nodes=[learner, actor]).nodes[0].gpus
    1.0
    """

    collectors: int | None = option(None, "", least=1)
    cpus: float | None = option(None, "", least=0)
    gpus: float = option(0.0, "", least=0)
    memory_bytes: int | None = option(None, "", least=1)
    resources: Mapping[str, float] | None = None
    labels: Mapping[str, str] | None = None
    policy_device: Device = None

    def __post_init__(self) -> None:
        check_options(self)
        _require_named("resources", self.resources, (int, float), "other than CPU, GPU and memory, to numbers")
        _require_named("labels", self.labels, str, "to strings")


@dataclass(frozen=True)
class RayCluster:
    """A cluster of Ray's, for `MultiCollector(cluster=...)`. Making one imports and starts nothing.

    address: the head's ``host:port``; "auto" for the cluster that this process has initialised, the one that
        RAY_ADDRESS names, or this machine's; "local" starts one on 127.0.0.1 alone, and ends it.
    nodes: the number of node hosts, or wishes for each; None for one on each machine that has a free CPU, at most one
        for each collector.
    runtime_env: as for Ray's actors, such as ``{"working_dir": "."}``.
    placement_group: one of Ray's; the i-th node host gets its bundle i; None spreads them over machines.
    node_timeout: seconds without a sign of life after which a node is lost.
    min_nodes: with ``on_failure="restart"``, fewer that are up are an error.

    Raises ConfigError.

    >>> import muster
    >>> cluster = muster.RayCluster("10.0.0.1:6379", nodes=4, min_nodes=3)
    >>> cluster.node_timeout, cluster.min_nodes
    (15.0, 3)
    """

    address: str | None = option("auto", "")
    nodes: int | Sequence[Node] | None = None
    runtime_env: Mapping[str, Any] | None = None
    placement_group: Any = None
    node_timeout: float = option(15.0, "", above=0)
    min_nodes: int = option(1, "", least=1)

    def __post_init__(self) -> None:
        check_options(self)
        wishes = self.nodes if isinstance(self.nodes, Sequence) else ()
        count = len(wishes) or as_whole(self.nodes) or 0
        if (self.nodes is not None and count < 1) or not all(isinstance(node, Node) for node in wishes):
            raise ConfigError("nodes", "None, a number from 1 on, or a list of muster.Node", self.nodes)
        if 0 < count < self.min_nodes:
            raise ConfigError("min_nodes", f"at most the number of nodes, {count}", self.min_nodes)
        _require_named("runtime_env", self.runtime_env, object, "to what Ray takes")
        if self.placement_group is not None and not hasattr(self.placement_group, "bundle_specs"):
            raise ConfigError("placement_group", "one of ray.util.placement_group", self.placement_group)


def _require_named(option: str, value: Any, kinds: Any, words: str) -> None:
    """Raises ConfigError for what is no mapping from names to values of these kinds, or has names of Ray's own."""
    own = ("CPU", "GPU", "memory")
    is_fit = value is None or (
        isinstance(value, Mapping)
        and all(isinstance(name, str) and name not in own and isinstance(one, kinds) for name, one in value.items())
    )
    if not is_fit:
        raise ConfigError(option, f"None, or a mapping from names {words}", value)


def shares(num_collectors: int, places: Sequence[Site]) -> list[range]:
    """The collectors of each node, in order: those it wishes for, or a share of the rest in proportion to its CPUs.

    Raises ConfigError.
    """
    wished = sum(place.collectors or 0 for place in places)
    among = [i for i, place in enumerate(places) if place.collectors is None]
    rest = num_collectors - wished
    if not places or rest < len(among) or (rest and not among):
        raise ConfigError(
            f"num_collectors={num_collectors} cannot be split between {len(places)} nodes: "
            f"{len(places) - len(among)} ask for {wished} in all, each node needs one, and each collector a node"
        )
    # One for each; the others go one by one to the node with the fewest for its CPUs.
    counts = [1 if place.collectors is None else place.collectors for place in places]
    for _ in range(rest - len(among)):
        _, i = min((counts[i] / max(places[i].cpus, 0.001), i) for i in among)
        counts[i] += 1
    return [range(*ends) for ends in itertools.pairwise(itertools.accumulate(counts, initial=0))]
