"""The messages between the caller and a worker, which is a process or a thread. `MessageLoop` answers them.

Nobody compares or changes a message. ``frozen=True`` and ``eq`` would make every import of Muster 2.6 ms slower, in the
caller and again in the launcher: `dataclass` compiles each method that it generates.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from muster.errors import UnknownMessage
from muster.hosts.env_facts import EnvFacts
from muster.hosts.failures import Failure
from muster.hosts.requests import HostOptions
from muster.pickling import not_rebuilt
from muster.transport.big_arrays import Place
from muster.transport.slab import Slab, SlabPlan
from muster.worker_info import WorkerInfo
from muster.workers.worker_init import SetUp

T = TypeVar("T")


@dataclass(eq=False)
class Packed:
    """A user's value on its way to another process, pickled apart from its message and once for all workers.

    Unpickling gives the value itself. Where the value cannot be rebuilt it gives a CannotTravel, so that the worker can
    still read the message and answer it.
    """

    data: bytes

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (self.data,)


def _rebuilt(data: bytes) -> Any:
    try:
        return pickle.loads(data)
    except Exception as error:
        send = "Send what it is made of instead, and make it there: envs.call(function) calls function(env, env_index)"
        refusal = not_rebuilt("what was sent to the worker", error, send)
        refusal.__cause__ = error
        return refusal


class Message:
    """A message, or a part of one. Pickled as a call of its class: the default names every field and takes longer."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(vars(self).values())


# ---- to a worker


@dataclass(eq=False)
class Inherited(Message):
    """A worker's part of what its caller passes on, as multiprocessing does to processes that it spawns.

    num_fds: fds that its recipes need, which come with the order.  has_tracker: one more fd comes, the resource
    tracker's.  authkey: by which the caller's processes know each other, for the proxies of a manager.
    """

    num_fds: int
    has_tracker: bool
    authkey: bytes | None


@dataclass(eq=False)
class StartOrder(Message):
    """The first message to a worker process."""

    recipes: bytes  # pickled; empty under fork
    set_up: SetUp | None  # None under fork
    info: WorkerInfo
    first_env: int
    threads: int
    reports_building: bool  # whether the worker sends BuildProgress after each of its first two envs
    awaits_build: bool = False  # whether the worker imports what its recipes need, but builds only after `Build`
    replaces: bool = False  # whether the worker is a replacement: the facts of its envs are known
    inherited: Inherited | None = None  # None under fork
    big_arrays: tuple[Place, ...] = ()  # places of the recipes' big parts in the mail's file


@dataclass(eq=False)
class Build(Message):
    """Lets a worker that awaits this message build its envs."""


@dataclass(eq=False)
class Attach(Message):
    """Makes a host ready to step into the slab. slab: a worker process receives the plan of it."""

    slab: Slab | SlabPlan
    options: HostOptions


@dataclass(eq=False)
class ResetArguments(Message):
    """The arguments of a reset. passes_options: whether the keyword `options` is passed to ``env.reset`` at all."""

    seeds: Sequence[int | None]
    options: Any
    passes_options: bool = True


@dataclass(eq=False)
class Reset(Message):
    """Resets some envs. There is no reply: each env's record in the slab shows when the reset is done."""

    env_ids: Sequence[int]
    arguments: ResetArguments


@dataclass(eq=False)
class Restart(Message):
    """Makes a failed env answer again.

    rebuilds: the env is built again first; in a new worker it is new already.
    resets_now: the answer is a reset; else the env answers without one and the caller fills in the row.
    seed: for the env's first reset.  options: for the reset that is the answer.
    attributes: to be set on the env that is built again, by name.
    """

    env: int
    seed: int | None
    options: Any
    resets_now: bool
    rebuilds: bool
    attributes: Mapping[str, Any]


@dataclass(eq=False)
class SetAgain(Message):
    """Sets attributes of the envs of a new worker, by env and name. There is no reply, see `EnvHost.set_again`."""

    attributes: Mapping[int, Mapping[str, Any]]


@dataclass(eq=False)
class Call(Message):
    """Calls a method, or reads an attribute, of every env. arguments: those of `EnvHost.call`."""

    number: int
    arguments: Any


@dataclass(eq=False)
class SetAttr(Message):
    """Sets an attribute of every env. arguments: those of `EnvHost.set_attr`."""

    number: int
    arguments: Any


@dataclass(eq=False)
class Close(Message):
    """Closes the envs and ends the worker."""


# ---- from a worker


@dataclass(eq=False)
class Unpacking(Message):
    """Reports that a worker begins to rebuild its recipes or, with `done`, has rebuilt them."""

    done: bool


@dataclass(eq=False)
class BuildProgress(Message):
    """The memory of a worker process that has built one env, or two: before the first env, and after each."""

    memory_bytes: tuple[int, ...]

    @property
    def count(self) -> int:
        """Envs built so far."""
        return len(self.memory_bytes) - 1


@dataclass(eq=False)
class EnvsBuilt(Message):
    """Reports that all envs are built; a Failure comes instead where one failed. facts: empty for a replacement."""

    facts: Sequence[EnvFacts]


@dataclass(eq=False)
class Attached(Message):
    """Reports that the host is ready to step."""


@dataclass(eq=False)
class Answer(Message):
    """The results of the `Call` or `SetAttr` with this number, for each env; earlier numbers are dropped."""

    number: int
    results: list[Any]


@dataclass(eq=False)
class ClosingEnv(Message):
    """Reports that the host closes its i-th env now."""

    i: int


@dataclass(eq=False)
class Closed(Message):
    """The errors that closing the envs raised."""

    failures: list[Failure]


def expect(kind: type[T], message: object) -> T:
    """Returns `message` if it is of this kind; else raises UnknownMessage."""
    if not isinstance(message, kind):
        raise UnknownMessage(f"expected {kind.__name__}, got {message!r:.200}")
    return message
