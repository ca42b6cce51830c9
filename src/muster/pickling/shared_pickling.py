"""Pickling of what multiprocessing shares between processes: as it does itself for a process that it spawns.

Its queues, locks and pipes can only be pickled while a process is being spawned, which receives the fds that they need.
Here `Spawning` stands for that process; the fds travel apart from the pickle, and `receiving` provides them again.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from muster.introspection import module_name

_C_DATA = ctypes.Structure.__mro__[1]
_received: ContextVar[Sequence[int]] = ContextVar("muster_received_fds", default=())


class ReceivedFd:
    """An fd by its place among those that travel with a pickle. multiprocessing calls `detach` to own a copy of it."""

    def __init__(self, index: int) -> None:
        self._index = index

    def detach(self) -> int:
        return os.dup(_received.get()[self._index])


class Fds:
    """Fds that travel inside another pickle than the one that needs them: a pickle in a pickle."""

    def __init__(self, fds: Sequence[int]) -> None:
        self.fds = list(fds)

    def __reduce__(self) -> tuple[Any, ...]:
        if not self.fds:
            return Fds, ((),)
        popen = sys.modules["multiprocessing.context"].get_spawning_popen()
        return _detached, ([ReceivedFd(popen.duplicate_for_child(fd)) for fd in self.fds],)


def _detached(received: Sequence[ReceivedFd]) -> Fds:
    return Fds([one.detach() for one in received])


class Spawning:
    """The process that multiprocessing's objects believe is being spawned. fds: receives those that they need."""

    DupFd = ReceivedFd

    def __init__(self, fds: list[int]) -> None:
        self._fds = fds

    def duplicate_for_child(self, fd: int) -> int:
        """The place of `fd` in the list of fds."""
        if fd not in self._fds:
            self._fds.append(fd)
        return self._fds.index(fd)


@contextlib.contextmanager
def spawning(fds: list[int] | None) -> Iterator[None]:
    """Lets this thread pickle what multiprocessing shares. fds: see `Spawning`; None leaves all as it is."""
    context: Any = sys.modules.get("multiprocessing.context")  # without it there are no such objects
    if fds is None or context is None:
        yield
        return
    before = context.get_spawning_popen()
    context.set_spawning_popen(Spawning(fds))
    try:
        yield
    finally:
        context.set_spawning_popen(before)


@contextlib.contextmanager
def receiving(fds: Sequence[int]) -> Iterator[None]:
    """Provides the fds that travelled with a pickle while that is loaded."""
    token = _received.set(fds)
    try:
        yield
    finally:
        _received.reset(token)


def reduction_of_shared(value: Any) -> tuple[Any, ...] | None:
    """The reduction that multiprocessing has for an object of its own, apart from the object's class; else None.

    For ends of pipes, shared numbers and arrays, and the memory these lie in.
    """
    kind = type(value)
    reduction: Any = sys.modules.get("multiprocessing.reduction")
    if reduction is None or not (module_name(kind).startswith("multiprocessing.") or issubclass(kind, _C_DATA)):
        return None
    reduce = reduction.ForkingPickler(io.BytesIO()).dispatch_table.get(kind)
    reduced: tuple[Any, ...] | None = None if reduce is None else reduce(value)
    return reduced


def reduction_of_memory(value: Any) -> tuple[Any, ...] | None:
    """The reduction of a SharedMemory or ShareableList, which other processes attach by name; else None."""
    shared_memory: Any = sys.modules.get("multiprocessing.shared_memory")
    if shared_memory is None or type(value) not in (shared_memory.SharedMemory, shared_memory.ShareableList):
        return None
    memory = getattr(value, "shm", value)
    return _attached, (*value.__reduce__(), getattr(memory, "_track", True))


def _attached(kind: type, arguments: tuple[Any, ...], tracked: bool) -> Any:
    """A SharedMemory or ShareableList, attached without making this process responsible for its end.

    Python's resource tracker unlinks what a process has attached, once that process ends. Workers share the tracker of
    their caller, which is responsible already, if the caller had one when they started.
    """
    from multiprocessing import resource_tracker

    value = kind(*arguments)
    if not (tracked and _callers_tracker):
        memory = getattr(value, "shm", value)
        resource_tracker.unregister(memory._name, "shared_memory")
    return value


_callers_tracker = False  # whether this worker uses its caller's resource tracker


def use_tracker(fd: int) -> None:
    """Has this process use the resource tracker behind `fd`, as multiprocessing does in processes that it spawns."""
    from multiprocessing import resource_tracker

    global _callers_tracker
    resource_tracker._resource_tracker._fd = fd  # type: ignore[attr-defined]
    _callers_tracker = True


def tracker_fd() -> int | None:
    """The fd of this process's resource tracker; None where none is running."""
    module: Any = sys.modules.get("multiprocessing.resource_tracker")
    return None if module is None else module._resource_tracker._fd
