"""The seam below a `FarPool`: starts hosts on other machines, and carries messages. No library is named here."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Ticket = Hashable
"""Stands for an answer that is to come."""

Parcel = Sequence[Any]
"""A message in buffers: see `far_worker.parcel_of`."""


@dataclass(frozen=True)
class Site:
    """A place for a host. cpus: those that it may have; its share of the collectors is by them.

    collectors: how many; None for that share.  wish: the owner's own, which the engine does not open.
    """

    cpus: float = 1.0
    collectors: int | None = None
    wish: Any = None


@dataclass(frozen=True)
class HostGone:
    """Comes in the place of an answer: the host has ended. reason: why, in words.

    is_final: whether the engine can start no other, either.
    """

    reason: str
    is_final: bool = False


class Host(ABC):
    """One host: a process that holds a `FarWorker`."""

    @abstractmethod
    def ask(self, order: Parcel, *, beside: bool = False) -> Ticket:
        """Has it answer an order, after those before. Does not wait, nor raise where it has ended. For any thread.

        beside: at once, while it is busy with others: by `FarWorker.answer_beside`.
        """

    @abstractmethod
    def kill(self) -> None:
        """Ends it, whatever it does. The answers that it owes are dropped."""


class Engine(ABC):
    """Starts hosts and waits for them.

    name: what they run on, for messages.  node_timeout: seconds of silence after which a node is lost.  min_nodes: with
    fewer that are up, a loss is an error.  remedy: against a lack of room, in words.
    """

    name: str = ""
    node_timeout: float = 15.0
    min_nodes: int = 1
    remedy: str = "Ask for less, or add machines"

    @abstractmethod
    def places(self, most: int) -> Sequence[Site]:
        """The places for hosts, at most `most` unless more were asked for."""

    @abstractmethod
    def start(self, index: int, collectors: int) -> Host:
        """Begins to start a `FarWorker` for the i-th place, and so many collectors; orders may be given at once.

        Again for the same place where the one before is lost.
        """

    @abstractmethod
    def wait(self, tickets: Collection[Ticket], timeout_s: float) -> Mapping[Ticket, Parcel | HostGone]:
        """All answers that have come, once there is one, or none at the timeout."""

    def room(self, index: int) -> str:
        """The wishes of the i-th place's host, and what is free, in words; empty once it has its place."""
        return ""

    def store_bytes(self) -> float:
        """The least memory that a machine has for messages on their way; what is over goes by disk."""
        return math.inf

    def why_ended(self) -> str:
        """The reason why no host is there any more, nor can come; empty as long as one may."""
        return ""

    @abstractmethod
    def close(self) -> None:
        """Ends all that it has started. For any time."""
