"""The process on another machine that holds a resident of a `FarPool`: from an order to a report, both of them bytes.

It passes on the user's objects unopened: packed recipes, policies, functions, arguments, results and exceptions.
"""

from __future__ import annotations

import fcntl
import importlib
import os
import pickle
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from muster.errors import ClosedError, UnknownMessage
from muster.pool.engine import Parcel
from muster.pool.limits import CloseLimits
from muster.pool.logs import of_print
from muster.pool.messages import Answer, Build, Close, Closed, Failed, Message, Post, Question, Ready, unopened
from muster.pool.notices import say_by
from muster.pool.worker import Resident
from muster.transport.mail import dumps

_MOST_BYTES = 4 << 20  # of taken lines that a file keeps


# ---- messages


@dataclass(eq=False)
class Meet(Message):
    """The first order. resident: ``"module:Class"`` of a `FarResident`.  name: of the place, for people."""

    resident: str
    name: str


@dataclass(eq=False)
class Ping(Message):
    """Asks for a sign of life, and for what has happened."""


@dataclass(eq=False)
class Met(Message):
    """The answer to `Meet`. host, node_id: the machine's names.  content: what `FarResident.meet` has returned."""

    host: str
    node_id: str
    content: Any


@dataclass
class Report:
    """The answer to an order, and what has happened since the last one.

    logs, lost_logs: see `LogInbox`.  warned: warnings, as their texts and classes.  said: see `say`.
    """

    answer: Message | None = None
    logs: bytes = b""
    lost_logs: int = 0
    warned: list[tuple[str, type[Warning]]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)


def parcel_of(content: object) -> list[Any]:
    """A message on its way: a pickle, and the memory of the arrays in it, which is not copied."""
    buffers: list[pickle.PickleBuffer] = []
    with unopened():
        head = pickle.dumps(content, protocol=5, buffer_callback=buffers.append)
    return [head, *(np.frombuffer(one.raw(), np.uint8) for one in buffers)]


def opened(parcel: Parcel) -> Any:
    """The content of a parcel, with arrays that lie in the parcel's memory."""
    head, *buffers = parcel
    return pickle.loads(head, buffers=buffers)


# ---- the process


class FarResident(Resident):
    """A resident on another machine. Its process may be asked while it is busy."""

    @classmethod
    def meet(cls, greeting: Any) -> Any:
        """Answers the owner's greeting, before there is a plan."""

    def __init__(self, plan: Any, here: FarWorker) -> None:
        """Builds it."""

    def answer_now(self, question: Any) -> Any:
        """Answers a question, or takes a message, in a thread of its own while others are answered."""

    def close(self, closes: Callable[[int], None], limits: CloseLimits | None = None) -> Any:
        """Closes it. limits: None for those of the plan."""


class FarWorker:
    """A resident in this process, once it has a plan. host, node_id: the machine's names, for people and the engine."""

    def __init__(self, host: str, node_id: str) -> None:
        self.host, self._node_id = host, node_id
        self._happened, self._guard = Report(), threading.Lock()
        self._name, self._prints = "", _Prints()
        self._kind: type[FarResident] = FarResident
        self._resident: FarResident | None = None
        warnings.simplefilter("always", UserWarning)
        warnings.simplefilter("always", RuntimeWarning)
        warnings.showwarning = self._note
        say_by(self._say)

    def answer(self, order: Parcel) -> Parcel:
        """Carries out an order, after those before; returns a report."""
        return self._reported(order, beside=False)

    def answer_beside(self, order: Parcel) -> Parcel:
        """Carries out an order at once, in a thread of its own; returns a report."""
        return self._reported(order, beside=True)

    def take_logs(self, data: bytes, lost: int) -> None:
        """Takes log records for the next report, see `LogInbox`."""
        with self._guard:
            self._happened.logs += data
            self._happened.lost_logs += lost

    def close(self) -> None:
        """Closes the resident, where the owner is gone."""
        if self._resident is not None:
            self._resident.close(lambda _: None)

    def _reported(self, order: Parcel, *, beside: bool) -> Parcel:
        head, *parcel = order
        try:
            message = pickle.loads(head)
            answer = self._carried_out(message, opened(parcel), beside)
        except Exception as error:  # the owner raises it
            message, answer = None, Failed.of(error, dumps)
        lines = self._prints.take(self._name, ends_lines=not beside or isinstance(message, Close))
        with self._guard:
            report, self._happened = self._happened, Report()
        report.answer, report.logs = answer, report.logs + lines
        return parcel_of(report)

    def _carried_out(self, message: Message, content: Any, beside: bool) -> Message:
        match message:
            case Meet(resident, name):
                module, _, kind = resident.partition(":")
                self._kind, self._name = getattr(importlib.import_module(module), kind), f"{name} ({self.host})"
                return Met(self.host, self._node_id, self._kind.meet(content))
            case Build():
                self._resident = self._kind(content, self)
                return Ready(self._resident.facts())
            case Post():
                self._built.take(content)
                return Answer(None)
            case Question():
                return Answer(self._built.answer_now(content) if beside else self._built.answer(content))
            case Ping():
                return Answer(None)
            case Close():
                return Closed(self._built.close(lambda _: None, content))
        raise UnknownMessage(f"a far worker knows no such message: {message!r:.200}")

    @property
    def _built(self) -> FarResident:
        if self._resident is None:
            raise ClosedError("the far worker has no resident yet")
        return self._resident

    def _note(self, message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
        with self._guard:
            self._happened.warned.append((str(message), category))

    def _say(self, text: str) -> None:
        with self._guard:
            self._happened.said.append(text)


class _Prints:
    """Takes the place of this process's stdout and stderr for the workers that it starts: files, which take all."""

    def __init__(self) -> None:
        self._files = {name: os.memfd_create(f"muster-{name}") for name in ("stdout", "stderr")}
        self._taken, self._using = dict.fromkeys(self._files, 0), threading.Lock()
        for name, fd in self._files.items():
            fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
            setattr(sys, f"__{name}__", open(fd, "w"))  # noqa: SIM115 - workers get it as long as this process lives

    def take(self, place: str, *, ends_lines: bool) -> bytes:
        """The lines so far, as log records. place: begins each.  ends_lines: takes those that have no end yet, too."""
        with self._using:
            return b"".join(
                of_print(name, f"{place}: {line.decode(errors='replace')}")
                for name, fd in self._files.items()
                for line in self._lines(name, fd, ends_lines)
            )

    def _lines(self, name: str, fd: int, ends_lines: bool) -> list[bytes]:
        size, taken = os.fstat(fd).st_size, self._taken[name]
        data = os.pread(fd, size - taken, taken)
        data = data if ends_lines else data[: data.rfind(b"\n") + 1]
        self._taken[name] += len(data)
        if self._taken[name] > _MOST_BYTES and self._taken[name] == os.fstat(fd).st_size:
            os.ftruncate(fd, 0)
            self._taken[name] = 0
        return data.removesuffix(b"\n").split(b"\n") if data else []
