"""The seam below a fleet: what starts node hosts and carries bytes to them and back. Nothing here is of any library."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

Ticket = Hashable
"""Stands for an answer that is to come."""


@dataclass(frozen=True)
class Place:
    """Where a node host is to be. cpus: those that are free there.  collectors: how many; None for a share by cpus."""

    host: str
    cpus: float = 1.0
    collectors: int | None = None


@dataclass(frozen=True)
class HostGone:
    """What comes in place of an answer: the node host has ended. reason: why, in words."""

    reason: str


class Host(ABC):
    """One node host: a process that holds a `NodeHost`. host, node_id: where; for messages."""

    host: str = ""
    node_id: str = ""

    @abstractmethod
    def ask(self, order: bytes, *, beside: bool = False) -> Ticket:
        """Has it answer an order, after those before. Does not wait, nor raise where it has ended. For any thread.

        beside: at once, while it is busy with others: by `NodeHost.answer_beside`.
        """

    @abstractmethod
    def kill(self) -> None:
        """Ends it, whatever it does. What it has not answered is dropped."""


class Engine(ABC):
    """Starts node hosts and waits for them.

    node_timeout: seconds of silence after which a node is lost.  min_nodes: with fewer that are up, a loss is an error.
    """

    node_timeout: float = 15.0
    min_nodes: int = 1

    @abstractmethod
    def places(self, most: int) -> Sequence[Place]:
        """Where node hosts are to be, at most `most`."""

    @abstractmethod
    def start(self, index: int, plan: bytes) -> Host:
        """Begins to start ``NodeHost(plan)`` for the i-th place; orders may be given at once."""

    @abstractmethod
    def wait(self, tickets: Collection[Ticket], timeout_s: float) -> Mapping[Ticket, bytes | HostGone]:
        """All answers that have come, once there is one, or none at the timeout. A ticket is answered once."""

    @abstractmethod
    def close(self) -> None:
        """Ends all that it has started."""
