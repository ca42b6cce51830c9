"""The seam below a fleet: what starts node hosts and carries messages to them and back. Nothing is of any library."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from muster.rollout.weights import Device

Ticket = Hashable
"""Stands for an answer that is to come."""

Parcel = Sequence[Any]
"""A message in buffers: see `node_host.sealed`."""


@dataclass(frozen=True)
class Site:
    """Where a node host is to be. cpus: those that it may have; its share of the collectors is by them.

    collectors: how many; None for that share.  policy_device: None for the collectors' own.
    """

    cpus: float = 1.0
    collectors: int | None = None
    policy_device: Device = None


@dataclass(frozen=True)
class HostGone:
    """What comes in place of an answer: the node host has ended. reason: why, in words.

    is_final: whether the engine can start no other, either.
    """

    reason: str
    is_final: bool = False


class Host(ABC):
    """One node host: a process that holds a `NodeHost`."""

    @abstractmethod
    def ask(self, order: Parcel, *, beside: bool = False) -> Ticket:
        """Has it answer an order, after those before. Does not wait, nor raise where it has ended. For any thread.

        beside: at once, while it is busy with others: by `NodeHost.answer_beside`.
        """

    @abstractmethod
    def kill(self) -> None:
        """Ends it, whatever it does. What it has not answered is dropped."""


class Engine(ABC):
    """Starts node hosts and waits for them.

    name: what they run on, for messages.  node_timeout: seconds of silence after which a node is lost.  min_nodes: with
    fewer that are up, a loss is an error.
    """

    name: str = ""
    node_timeout: float = 15.0
    min_nodes: int = 1

    @abstractmethod
    def places(self, most: int) -> Sequence[Site]:
        """Where node hosts are to be, at most `most` unless more were asked for."""

    @abstractmethod
    def start(self, index: int, collectors: int) -> Host:
        """Begins to start a `NodeHost` for the i-th place, and so many collectors; orders may be given at once.

        Again for the same place where the one before is lost.
        """

    @abstractmethod
    def wait(self, tickets: Collection[Ticket], timeout_s: float) -> Mapping[Ticket, Parcel | HostGone]:
        """All answers that have come, once there is one, or none at the timeout."""

    def room(self, index: int) -> str:
        """What the node host of the i-th place asks for, and what is free, in words; empty once it has its place."""
        return ""

    def store_bytes(self) -> float:
        """The least memory that a node has for messages on their way; what is over goes by disk."""
        return math.inf

    def why_ended(self) -> str:
        """Why no node is there any more, nor can come; empty as long as one may."""
        return ""

    @abstractmethod
    def close(self) -> None:
        """Ends all that it has started. For any time."""
