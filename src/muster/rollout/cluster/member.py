"""A node of a fleet: what the driver knows of it, what it tells besides, and how it ends."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from muster.errors import WorkerName
from muster.pool.closing import warn_of_cuts
from muster.pool.limits import CloseLimits
from muster.pool.logs import hand_over
from muster.pool.notices import say
from muster.rollout.cluster.engine import Engine, Host, HostGone, Ticket
from muster.rollout.cluster.node_host import NodePlan, Report, Started, opened, sealed

SLICE_S, PING_S = 0.05, 0.5
_LAST_WORDS_S, _ON_ITS_WAY_S = 1.0, 5.0


@dataclass(eq=False)
class Member:
    """One node as the fleet sees it.

    collectors, envs: those of it, by their indices among all.  plan: for its node host.  host: the current node host.
    state: see `Fleet.nodes`.  launched_at: when that was begun.  is_said: whether it was said that there is no room.
    is_met: whether it has spoken.  where, node_id: its machine, once it is known.  started: what it has started first.
    version: of the weights that it was sent last.  number: of its batch.  frames: all that it has collected.
    reason, failure: why the one before was lost.  push: the order by which it was last sent weights beside its batches.
    heard_at, pinged_at: when it spoke, and was asked to, last.
    """

    index: int
    collectors: range
    envs: range
    plan: NodePlan
    host: Host = field(init=False)
    state: str = "starting"
    launched_at: float = 0.0
    is_said: bool = False
    is_met: bool = False
    where: str = "a machine"
    node_id: str = ""
    started: Started | None = None
    version: int = 0
    number: int = 0
    frames: int = 0
    heard_at: float = 0.0
    pinged_at: float = 0.0
    restarts: int = 0
    reason: str = ""
    failure: BaseException | None = None
    push: Ticket | None = None
    stats: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> WorkerName:
        return WorkerName("node", self.index, self.envs)

    @property
    def place(self) -> str:
        return f"node {self.index} ({self.where})"


def tell(member: Member, answer: Report) -> list[tuple[str, type[Warning]]]:
    """Hands on what has happened on a node besides; returns its warnings, which filters may make errors of."""
    hand_over(answer.logs, answer.lost_logs, {"node_index": member.index, "host": member.where})
    for text in answer.said:
        say(f"{member.place}: {text}")
    return [(f"{member.place}: {text}", category) for text, category in answer.warned]


def close_all(
    limits: CloseLimits, engine: Engine, members: Sequence[Member], owing: Mapping[Ticket, tuple[Member, str]], pid: int
) -> None:
    """Closes the envs of all nodes at once, and ends what the engine has started. Lost nodes are left alone.

    owing: who owes answers, which may tell of something.  pid: the process that has started them: a fork of it has not.
    """
    if os.getpid() != pid:
        return
    until = time.monotonic() + limits.busy_s + min(limits.part_s, limits.call_s) + _ON_ITS_WAY_S
    cuts, pinged_at = list[str](), time.monotonic()
    try:
        closing = {one.host.ask(sealed(("close", limits)), beside=True): one for one in members if one.state == "up"}
        owed = {ticket: one for ticket, (one, _) in owing.items() if one.state == "up"} | closing
        while owed and time.monotonic() < until:
            if not closing:
                until = min(until, time.monotonic() + _LAST_WORDS_S)
            if closing and time.monotonic() - pinged_at > PING_S:  # what nodes say meanwhile comes with the answers
                pinged_at = time.monotonic()
                owed |= {one.host.ask(sealed(("ping",)), beside=True): one for one in closing.values()}
            for ticket, data in engine.wait(owed, SLICE_S).items():
                member = owed.pop(ticket)
                closing.pop(ticket, None)
                if not isinstance(data, HostGone):
                    cuts += [text for text, _ in tell(member, opened(data))]
    finally:
        engine.close()
        warn_of_cuts(cuts)
