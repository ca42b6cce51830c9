"""The parts that make a vector env."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from gymnasium.vector import AutoresetMode

from muster.backends.base import Backend
from muster.backends.recovery import Recovery
from muster.hosts.env_facts import EnvFacts
from muster.spaces.tree import SpaceNode
from muster.transport.infos import InfoReader
from muster.vector.action_writers import ActionWriter
from muster.vector.batched_spaces import BatchedSpaces
from muster.vector.raisers import Raiser


@dataclass(frozen=True)
class Parts:
    """The parts in which one kind of vector env differs from another.

    spaces: makes the vector env's spaces from those of its envs; raises SpecMismatch for an env that does not agree.
    trees: makes the trees of one env's observations and actions.
    writer: makes the object that writes the actions that the core does not write.
    raiser: raises the exception for envs that failed.
    lenient: whether other libraries' vector envs are followed in what they take: envs may be stepped before their
        first reset, and rewards and flags be whatever numbers and bools can be made of.
    reward_key: the key of the infos that have an env's reward of several numbers; None where it is an error.
    raise_closed: raises the ClosedError for a call after `close`, where its words are not Muster's own.
    """

    spaces: Callable[[Sequence[EnvFacts]], BatchedSpaces]
    trees: Callable[[EnvFacts, BatchedSpaces], tuple[SpaceNode, SpaceNode]]
    writer: Callable[..., ActionWriter]
    raiser: Raiser
    lenient: bool
    reward_key: str | None = None
    raise_closed: Callable[[], NoReturn] | None = None


@dataclass(frozen=True)
class SteppingOptions:
    """The options of one vector env's stepping. max_restarts: None where a failure is an error at once."""

    autoreset_mode: AutoresetMode
    copy: bool = True
    check_finite: bool = False
    max_restarts: int | None = None
    caller_steps: bool = False


@dataclass(frozen=True)
class Assembled:
    """The parts of one vector env, put together by `assemble`. facts: those of env 0."""

    backend: Backend
    parts: Parts
    options: SteppingOptions
    facts: EnvFacts
    spaces: BatchedSpaces
    writer: ActionWriter
    info_reader: InfoReader
    recovery: Recovery | None
