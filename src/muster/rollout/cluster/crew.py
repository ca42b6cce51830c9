"""The node hosts of a fleet: started, given orders, listened to, lost and followed by others."""

from __future__ import annotations

import atexit
import os
import sys
import time
import warnings
import weakref
from typing import Any

from muster.errors import ConfigError, NodeLost
from muster.hosts.questions import Kept
from muster.introspection import caller_stacklevel
from muster.pool.closing import close_abandoned
from muster.pool.deaths import Nouns
from muster.pool.notices import say
from muster.pool.place import Budget
from muster.pool.unique_indices import tree
from muster.rollout.cluster.engine import Engine, HostGone, Ticket
from muster.rollout.cluster.member import PING_S, SLICE_S, Member, close_all, tell
from muster.rollout.cluster.node_host import Met, NodePlan, Report, Shared, opened, sealed
from muster.rollout.cluster.node_probe import compare_versions, missing_text, modules_needed, versions_here
from muster.rollout.cluster.nodes import shares
from muster.rollout.replicas.hooks import ReplicaFailed, seed_after
from muster.rollout.replicas.plans import PoolPlan

_ROOM_S = 10.0
_SLOW = "Raise start_timeout, or look into what that machine is busy with"
Warned = list[tuple[str, type[Warning]]]


class Crew:
    """The node hosts of a fleet. The arguments: see `Fleet`.

    members: all nodes.  answers: by ticket, those that came and that nobody has taken yet.
    seeds: one for each collector, by which successors begin.  notes: what the user is to be told with the next batch.
    """

    def __init__(self, plan: PoolPlan, kept: Kept, engine: Engine) -> None:
        self._plan, self._kept, self._engine = plan, kept, engine
        self._budget = Budget(plan.limits.restarts or 0, Nouns("node", pool="the collectors are"))
        self._modules = modules_needed(plan)
        self._owed: dict[Ticket, tuple[Member, str]] = {}
        self.answers: dict[Ticket, Report] = {}
        self.seeds: list[int | None] = [None] * len(plan.plans)
        self.notes: list[str] = []
        self.closed, self._listened_at = False, 0.0
        self.members: list[Member] = []
        self._ends = engine, self.members, self._owed, os.getpid()
        self._finalizer = weakref.finalize(self, close_abandoned, close_all, *self._ends)
        self._finalizer.atexit = False
        atexit.register(self._finalizer)  # after the engine's own hooks, so that it runs before them
        shared = Shared()
        places = engine.places(len(plan.plans))
        for index, (place, own) in enumerate(zip(places, shares(len(plan.plans), places), strict=True)):
            envs = range(plan.plans[own.start].envs.start, plan.plans[own.stop - 1].envs.stop)
            of_node = NodePlan.of(plan.of(own, index, place.policy_device), shared)
            self.members.append(Member(index, own, envs, of_node))
        for one in plan.plans:
            one.big.clear()  # the nodes' plans have them

    def up(self) -> list[Member]:
        """The nodes that take orders."""
        return [member for member in self.members if member.state == "up"]

    def send(self, member: Member, *order: Any, beside: bool = False, awaited: bool = True) -> Ticket:
        """Gives an order. awaited: whether anybody takes the answer, from `answers`."""
        ticket = member.host.ask(sealed(order), beside=beside)
        self._owed[ticket] = member, order[0] if awaited else ""
        return ticket

    def is_owed(self, ticket: Ticket) -> bool:
        """Whether that answer is still to come."""
        return ticket in self._owed

    def forget(self, ticket: Ticket) -> Report | None:
        """Returns an answer, if it has come. Nobody takes one that comes later; what it tells besides counts."""
        if ticket in self._owed:
            self._owed[ticket] = self._owed[ticket][0], ""
        return self.answers.pop(ticket, None)

    def content(self, member: Member, answer: Report) -> Any:
        """What a node has answered. Raises what it has failed with."""
        if answer.failure is None:
            return answer.content
        if answer.closed:
            self.close()
        if why := self._engine.why_ended():  # of which that failure is a part
            member.reason, member.failure = why, answer.failure
            raise self.lost(member)
        answer.failure.add_note(f"On {member.place}.")
        raise answer.failure

    def close(self) -> None:
        """Closes all envs, and ends the node hosts."""
        self.closed = True
        if self._finalizer.detach() is not None:
            atexit.unregister(self._finalizer)
            close_all(self._plan.close_limits, *self._ends)

    def take_stats(self, limit_s: float) -> set[Member]:
        """Asks nodes for their figures, beside all else and for any thread; returns those that have answered."""
        until, fresh, warned = time.monotonic() + limit_s, set[Member](), Warned()
        asked = {member.host.ask(sealed(("stats",)), beside=True): member for member in self.up()}
        while asked and time.monotonic() < until:
            for ticket, data in self._engine.wait(asked, SLICE_S).items():
                member = asked.pop(ticket)
                if not isinstance(data, HostGone):
                    answer: Report = opened(data)
                    member.stats = answer.content
                    fresh.add(member)
                    warned += tell(member, answer)
        self._owed |= {ticket: (member, "") for ticket, member in asked.items()}
        for text, category in warned:
            warnings.warn(text, category, stacklevel=caller_stacklevel())
        return fresh

    def listen(self, timeout_s: float, warned: Warned) -> None:
        """Takes what has come, once there is something; pings, and sees who is lost and who is there.

        warned: receives the warnings of nodes.
        """
        now = time.monotonic()
        for member in self.members:
            if member.pinged_at > member.heard_at:  # silence is what is not heard while somebody listens
                member.pinged_at += max(0.0, now - max(self._listened_at, member.pinged_at))
            if member.is_met and member.pinged_at <= member.heard_at and now - member.pinged_at > PING_S:
                member.pinged_at = now
                self.send(member, "ping", beside=True, awaited=False)
        for ticket, data in self._engine.wait([*self._owed], timeout_s).items():
            if ticket not in self._owed:
                continue  # of a node that was lost meanwhile
            member, name = self._owed.pop(ticket)
            member.heard_at = max(time.monotonic(), member.pinged_at)
            if isinstance(data, HostGone):
                self._lose(member, data.reason, is_final=data.is_final)
                continue
            answer: Report = opened(data)
            warned += tell(member, answer)
            if name == "meet":
                self._meet(member, answer, warned)
            elif name == "start":
                self._is_started(member, answer)
            elif name:
                self.answers[ticket] = answer
        for member in self.members:
            silent_s = time.monotonic() - member.pinged_at
            if member.is_met and member.pinged_at > member.heard_at and silent_s > self._engine.node_timeout:
                self._lose(member, f"nothing was heard from it for {silent_s:.3g} s")
            elif not member.is_met:
                self._look_for_room(member, time.monotonic() - member.launched_at, warned)
        self._listened_at = time.monotonic()

    def launch(self, member: Member) -> None:
        """Begins to start a node host, and asks what there is."""
        member.host = self._engine.start(member.index, len(member.collectors))
        member.version, member.state, member.is_met, member.is_said = 0, "starting", False, False
        member.launched_at, member.pinged_at = time.monotonic(), 0.0
        self.send(member, "meet", [*self._modules], [os.path.abspath(folder) for folder in sys.path], tree())

    def _look_for_room(self, member: Member, waited_s: float, warned: Warned) -> None:
        """Says it where a node host does not begin. Raises ConfigError where that is one of the first."""
        is_over = waited_s >= self._plan.limits.start_timeout and not member.restarts
        if waited_s < _ROOM_S or (member.is_said and not is_over):
            return
        room = self._engine.room(member.index)
        text = f"node {member.index} has not begun in {waited_s:.3g} s: {room or 'its process is slow to start'}"
        if is_over:
            raise ConfigError(f"{text}. {'Ask for less with muster.Node, or add machines' if room else _SLOW}")
        if room and member.restarts:
            warned.append((text, RuntimeWarning))
        elif room:
            say(text)
        member.is_said = True  # a head that is asked again and again may be gone at one time, which nobody outlives

    def _meet(self, member: Member, answer: Report, warned: Warned) -> None:
        """Checks what a node has, and has it start its collectors. Raises ConfigError."""
        met: Met = self.content(member, answer)
        member.is_met, member.where, member.node_id = True, met.host, met.node_id
        if met.missing:
            error = missing_text(self._modules[met.missing[0]], met.missing[0], member.place)
        else:
            versions = compare_versions(versions_here(), met.versions, member.place)
            error = versions.error
            if versions.warning:
                warned.append((versions.warning, UserWarning))
        if not error:
            self.send(member, "start", member.plan, self._seeds_of(member), member.frames, self._kept.of(member.envs))
        elif member.restarts:
            self._lose(member, error)
        else:
            raise ConfigError(error)

    def _is_started(self, member: Member, answer: Report) -> None:
        if member.started is None:
            member.started = self.content(member, answer)
        elif answer.failure is not None or answer.content.fields != member.started.fields:
            member.failure = answer.failure
            self._lose(member, f"it could not start its collectors again: {answer.failure or 'they have other fields'}")
            return
        member.state = "up"

    def _lose(self, member: Member, reason: str, *, is_final: bool = False) -> None:
        """Gives up a node host; begins to start another where that may help, and raises NodeLost otherwise."""
        member.state, member.reason, member.is_met = "lost", reason, False
        member.host.kill()
        for ticket in [ticket for ticket, one in self._owed.items() if one[0] is member]:
            del self._owed[ticket]
        never = is_final or self._plan.limits.restarts is None or any(one.started is None for one in self.members)
        if never or len(self.up()) < self._engine.min_nodes:
            self.close()
            raise self.lost(member)
        try:
            self._budget.spend(member.index, reason)
        except BaseException:
            self.close()
            raise
        self.notes.append(
            f"{member.place} is lost: {reason}. The parts of its {len(member.collectors)} collectors are masked until "
            "another is in its place"
        )
        member.restarts += 1
        self.launch(member)

    def _seeds_of(self, member: Member) -> list[int | None]:
        seeds = [self.seeds[k] for k in member.collectors]
        if not member.restarts:
            return seeds
        # A collector's own successors have one number.
        return [seed_after(seed, 0, member.restarts) for seed in seeds]

    def lost(self, member: Member) -> NodeLost:
        """The error for a node that is lost."""
        error, failure = NodeLost(member.name, member.where, member.reason), member.failure
        error.__cause__ = failure.error() if isinstance(failure, ReplicaFailed) else failure
        return error
