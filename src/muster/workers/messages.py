"""The messages between the caller and a worker, be it a process or a thread. `MessageLoop` answers them."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from muster.errors import CannotTravel, UnknownMessage
from muster.recipes.recipe import WorkerInfo
from muster.transport.big_arrays import Place
from muster.transport.slab import Slab, SlabPlan
from muster.workers.env_facts import EnvFacts
from muster.workers.failures import Failure
from muster.workers.options import HostOptions

T = TypeVar("T")


@dataclass(frozen=True)
class Packed:
    """What a user hands over to another process, pickled apart: once for all workers.

    It arrives as what it was made of or, so that a worker can still say for what it came, as a CannotTravel.
    """

    data: bytes

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (self.data,)


def _rebuilt(data: bytes) -> Any:
    try:
        return pickle.loads(data)
    except Exception as error:
        refusal = CannotTravel(
            f"what was sent to the worker cannot be rebuilt there: {type(error).__name__}: {error}\n"
            "  What its __reduce__ or __getstate__ gave does not make it anew, or its module is not found there.\n"
            "  Send what it is made of instead, and make it there: envs.call(function) calls function(env, env_index)"
        )
        refusal.__cause__ = error
        return refusal


class Message:
    """A message, or a part of one. Pickled as the call that makes it: the default names each field and takes longer."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(vars(self).values())


# ---- to a worker


@dataclass(frozen=True)
class StartOrder(Message):
    """The first message to a worker process."""

    recipes: bytes  # pickled; empty under fork
    info: WorkerInfo
    first_env: int
    argv: list[str]
    threads: int
    reports_building: bool  # whether it reports, before all else, each of its first two envs
    awaits_build: bool = False  # whether it imports what its recipes need, but builds only after `Build`
    replaces: bool = False  # it is a replacement: the facts of its envs are known
    big_arrays: tuple[Place, ...] = ()  # where the big parts of the recipes lie


@dataclass(frozen=True)
class Build(Message):
    """Lets a worker that awaits it build its envs."""


@dataclass(frozen=True)
class Attach(Message):
    """Readies a host to step into the slab. slab: for another process its plan."""

    slab: Slab | SlabPlan
    options: HostOptions


@dataclass(frozen=True)
class ResetArguments(Message):
    """What a reset hands over. passes_options: whether envs' `reset` is given the keyword at all."""

    seeds: Sequence[int | None]
    options: Any
    passes_options: bool = True


@dataclass(frozen=True)
class Reset(Message):
    """Resets some envs; the slab says when each is done."""

    env_ids: Sequence[int]
    arguments: ResetArguments


@dataclass(frozen=True)
class Restart(Message):
    """Has a failed env answer anew: built again or, in a new worker, as it is; after a reset or without one.

    seed: for its first reset.  options: for that which it answers with.
    """

    env: int
    seed: int | None
    options: Any
    resets_now: bool
    rebuilds: bool


@dataclass(frozen=True)
class Call(Message):
    """Calls a method, or reads an attribute, of every env. arguments: of `EnvHost.call`."""

    number: int
    arguments: Any


@dataclass(frozen=True)
class SetAttr(Message):
    """Sets an attribute of every env. arguments: of `EnvHost.set_attr`."""

    number: int
    arguments: Any


@dataclass(frozen=True)
class Close(Message):
    """Closes the envs and ends the worker."""


# ---- from a worker


@dataclass(frozen=True)
class Unpacking(Message):
    """A worker begins to rebuild its recipes, or has done so."""

    done: bool


@dataclass(frozen=True)
class BuildProgress(Message):
    """Of a process that has built one env, or two: the memory that it held before the first, and after each."""

    memory_bytes: tuple[int, ...]

    @property
    def count(self) -> int:
        """Envs built so far."""
        return len(self.memory_bytes) - 1


@dataclass(frozen=True)
class EnvsBuilt(Message):
    """All envs stand; else a Failure comes in its place. facts: see `EnvHost.facts`; none of a replacement."""

    facts: Sequence[EnvFacts]


@dataclass(frozen=True)
class Attached(Message):
    """The host is ready to step."""


@dataclass(frozen=True)
class Answer(Message):
    """The results of the `Call` or `SetAttr` of this number, for each env; an earlier number is of no more use."""

    number: int
    results: list[Any]


@dataclass(frozen=True)
class Closed(Message):
    """What closing the envs raised."""

    failures: list[Failure]


def expect(kind: type[T], message: object) -> T:
    """Returns `message`, which is to be of this kind. Raises UnknownMessage."""
    if not isinstance(message, kind):
        raise UnknownMessage(f"expected {kind.__name__}, got {message!r:.200}")
    return message
