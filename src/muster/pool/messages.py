"""The messages between the owner's end of a pool and the workers in its places.

Nobody compares or changes a message. ``frozen=True`` and ``eq`` would make every import of Muster 2.6 ms slower, in the
caller and again in the launcher: `dataclass` compiles each method that it generates.
"""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from muster.errors import UnknownMessage
from muster.introspection import type_name
from muster.pool.output import INHERIT
from muster.pool.set_up import SetUp
from muster.transport.big_arrays import Place
from muster.worker_info import WorkerInfo

T = TypeVar("T")


class Message:
    """A message, or a part of one. Pickled as a call of its class: the default names every field and takes longer."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), tuple(vars(self).values())


class Sealed(bytes):
    """A message that its sender has pickled already."""


stays_packed: ContextVar[bool] = ContextVar("stays_packed", default=False)
"""True while a message is pickled for somebody who passes it on: packed objects in it stay packed."""


@contextmanager
def unopened() -> Iterator[None]:
    """Sets `stays_packed` in a ``with`` block."""
    token = stays_packed.set(True)
    try:
        yield
    finally:
        stays_packed.reset(token)


# ---- to a worker


@dataclass(eq=False)
class Inherited(Message):
    """A worker's part of what its caller passes on, as multiprocessing does to processes that it spawns.

    num_fds: fds that its plan needs, which come with the order.  has_tracker: one more fd comes, the resource
    tracker's.  authkey: of the caller's processes, for the proxies of a manager.
    """

    num_fds: int
    has_tracker: bool
    authkey: bytes | None


@dataclass(eq=False)
class StartOrder(Message):
    """The first message to a worker process. resident: ``"module:Class"``."""

    resident: str
    info: WorkerInfo
    threads: int
    plan: bytes = b""  # pickled; empty under fork, where the worker has inherited it
    set_up: SetUp | None = None  # None under fork
    inherited: Inherited | None = None  # None under fork
    big_arrays: tuple[Place, ...] = ()  # places of the plan's big parts
    is_judged: bool = False  # whether the owner wants to know what building costs
    awaits_build: bool = False  # whether the worker imports what its plan needs, but builds only after `Build`
    place: int = 0  # in the pool
    output: str = INHERIT  # see `checked_output`


@dataclass(eq=False)
class Build(Message):
    """Lets a worker that awaits this message build its resident."""


@dataclass(eq=False)
class Post(Message):
    """A message for the resident, which nobody answers. content: see `Question`."""

    content: Any = None


@dataclass(eq=False)
class Question(Message):
    """A message for the resident, which it answers. content: for another process the next message has it."""

    content: Any = None


@dataclass(eq=False)
class Close(Message):
    """Has the resident close, and ends the worker."""


# ---- from a worker


@dataclass(eq=False)
class Unpacking(Message):
    """Reports that a worker begins to rebuild its plan or, with `done`, has rebuilt it."""

    done: bool


@dataclass(eq=False)
class Progress(Message):
    """Reports that the resident has done a part of what it was asked for, or of its own building."""

    content: Any = None


@dataclass(eq=False)
class Ready(Message):
    """Reports that the resident is built. facts: what it says of itself."""

    facts: Any


@dataclass(eq=False)
class Failed(Message):
    """An exception that ended a worker's start, or a resident's work.

    exception: pickled, or itself in the same process; None where it cannot be rebuilt.  cause: its ``__cause__``, too.
    about: the sentence about an exception that does not come from the resident, but from what was set up before it.
    """

    type_name: str
    message: str
    traceback: str
    exception: BaseException | bytes | None
    about: str = ""
    cause: BaseException | bytes | None = None

    @classmethod
    def of(cls, error: BaseException, dumps: Callable[[object], bytes] | None, about: str = "") -> Failed:
        """The report of `error`. dumps: pickles for the owner; None where that is in this process."""
        trace = "".join(traceback.format_exception(error))
        sent, cause = (
            one if dumps is None or one is None else portable(one, dumps) for one in (error, error.__cause__)
        )
        return cls(type_name(error), message_of(error), trace, sent, about, cause)

    def original(self) -> BaseException | None:
        """The exception itself; None where it cannot be rebuilt."""
        error, cause = (rebuilt(one) if isinstance(one, bytes) else one for one in (self.exception, self.cause))
        if error is not None and cause is not None:
            error.__cause__ = cause
        return error


@dataclass(eq=False)
class Answer(Message):
    """The resident's answer to the oldest question that it has not answered yet."""

    content: Any


@dataclass(eq=False)
class Closing(Message):
    """Reports that the resident closes its i-th part now."""

    i: int


@dataclass(eq=False)
class Closed(Message):
    """Reports that the resident is closed. content: what it says about that."""

    content: Any


def expect(kind: type[T], message: object) -> T:
    """Returns `message` if it is of this kind; else raises UnknownMessage."""
    if not isinstance(message, kind):
        raise UnknownMessage(f"expected {kind.__name__}, got {message!r:.200}")
    return message


# ---- exceptions on their way to another process


def portable(error: BaseException, dumps: Callable[[object], bytes]) -> bytes | None:
    """The pickled error; None where it would not arrive as the same type, often because of its own constructor."""
    try:
        data = dumps(error)
        return data if type(pickle.loads(data)) is type(error) else None
    except Exception:
        return None


def rebuilt(data: bytes) -> BaseException | None:
    """The exception that `portable` has pickled; None where it cannot be rebuilt here."""
    try:
        error = pickle.loads(data)
    except Exception:
        return None
    return error if isinstance(error, BaseException) else None


def message_of(error: BaseException) -> str:
    """The text ``str(error)``, or a replacement where that raises."""
    try:
        return str(error)
    except Exception as broken:
        return f"<no message: its __str__ raised {type(broken).__name__}>"
