"""A node of a fleet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from muster.errors import WorkerName
from muster.rollout.cluster.engine import Host
from muster.rollout.cluster.node_host import Started


@dataclass(eq=False)
class Member:
    """One node as the fleet sees it.

    collectors, envs: those of it, by their indices among all.  plan: for its node host.  host: the current node host.
    state: see `Fleet.nodes`.  launched_at: when that was begun.  is_said: whether it was said that there is no room.
    is_met: whether it has spoken.  where, node_id: its machine, once it is known.  started: what it has started first.
    version: of the weights that it was sent last.  heard_at, pinged_at: when it spoke, and was asked to, last.
    reason: why the one before was lost.
    """

    index: int
    collectors: range
    envs: range
    plan: bytes
    host: Host = field(init=False)
    state: str = "starting"
    launched_at: float = 0.0
    is_said: bool = False
    is_met: bool = False
    where: str = "a machine"
    node_id: str = ""
    started: Started | None = None
    version: int = 0
    heard_at: float = 0.0
    pinged_at: float = 0.0
    restarts: int = 0
    reason: str = ""
    stats: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> WorkerName:
        return WorkerName("node", self.index, self.envs)
