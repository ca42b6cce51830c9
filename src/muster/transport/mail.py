"""The mail, which carries what has no place in the slab from worker to caller and back.

It is used rarely, and never by a step of plain numbers. Each object is a pickle at a place of its own in a sparse
memfd, so that writing never waits for a reader: a pipe would fill up while the caller waits for a worker that waits for
the pipe.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import pickle
import threading
from typing import Any, Protocol

from muster.errors import ClosedError, MusterError
from muster.pickling.functools_pickling import dumps as by_value

_BOX_BYTES = 1 << 32  # lengths are uint32

# The boxes take turns in the file: a limit of its size (`ulimit -f`) then counts what is written. First come short
# chunks, as most messages are short; longer ones after that cost long messages few calls.
_FIRST_BYTES, _CHUNK_BYTES = 1 << 14, 1 << 20


class Mail(Protocol):
    """Boxes that hold one object each. The stepping loops of all backends write and read through this interface."""

    lends_objects: bool
    """Whether `get` returns the same object that was put, not a copy."""

    def own(self, objects: list[Any]) -> list[Any]:
        """Copies of `objects`, as `get` would return them."""

    def put(self, box: int, value: object) -> int:
        """Stores `value`; returns a length, more than 0, to pass to `get`."""

    def get(self, box: int, length: int) -> Any:
        """The object in `box`; None for length 0."""

    def append(self, box: int, value: object, at: int) -> int:
        """Stores `value` in `box` behind what `append` has stored up to `at`, without touching it; returns the end.

        The other side may read what lies before the end while more is appended.
        """

    def appended(self, box: int, at: int, end: int) -> list[Any]:
        """The objects that `append` has stored in `box` between `at` and `end`."""


class SharedMail:
    """Mail between processes. Objects are pickled, so that each side has its own. shares_main: see `dumps`."""

    lends_objects = False

    def __init__(self, fd: int, num_boxes: int, *, shares_main: bool = False) -> None:
        self._fd = fd
        self._num_boxes = num_boxes
        self._shares_main = shares_main
        # Held while the fd is used: once it is closed, its number may soon be another file's. The thread that holds the
        # lock may be the one that closes, in a signal handler.
        self._using = threading.RLock()

    def close(self) -> None:
        """Makes all other methods raise ClosedError from now on. The owner of the fd closes it after that."""
        with self._using:
            self._fd = -1

    def own(self, objects: list[Any]) -> list[Any]:
        try:
            copies: list[Any] = pickle.loads(dumps(objects, shares_main=True))
        except Exception:  # `put` will raise a clearer error
            return objects
        return copies

    def put(self, box: int, value: object) -> int:
        return self.append(box, value, 0)

    def get(self, box: int, length: int) -> Any:
        return pickle.loads(self._read(box, 0, length)) if length else None

    def append(self, box: int, value: object, at: int) -> int:
        data = dumps(value, shares_main=self._shares_main)
        if at + len(data) >= _BOX_BYTES:
            raise MusterError(
                f"{len(data)} bytes of pickled objects are too many for one step of one env: its place in the mail has "
                f"{_BOX_BYTES}; leave some out, or write them to a file and send its path"
            )
        view = memoryview(data)
        while view:
            place, room = self._place(box, at)
            with self._using:
                written = os.pwrite(self._open_fd(), view[:room], place)
            view, at = view[written:], at + written
        return at

    def appended(self, box: int, at: int, end: int) -> list[Any]:
        data, values = io.BytesIO(self._read(box, at, end)), []
        while data.tell() < end - at:
            values.append(pickle.load(data))
        return values

    def _read(self, box: int, at: int, end: int) -> bytes:
        parts = []
        while at < end:
            place, room = self._place(box, at)
            with self._using:
                part = os.pread(self._open_fd(), min(room, end - at), place)
            if not part:
                raise MusterError(f"the mail holds {end - at} bytes less than announced")
            parts.append(part)
            at += len(part)
        return b"".join(parts)

    def _place(self, box: int, at: int) -> tuple[int, int]:
        """The place in the file of what lies at `at` in a box, and the bytes of the box that follow there."""
        if at < _FIRST_BYTES:
            return box * _FIRST_BYTES + at, _FIRST_BYTES - at
        chunk, inside = divmod(at - _FIRST_BYTES, _CHUNK_BYTES)
        place = self._num_boxes * _FIRST_BYTES + (chunk * self._num_boxes + box) * _CHUNK_BYTES + inside
        return place, _CHUNK_BYTES - inside

    def _open_fd(self) -> int:
        if self._fd < 0:
            raise ClosedError("this vector env was closed in the middle of a call; make another one")
        return self._fd


class LocalMail:
    """Mail within one process: passes the objects themselves."""

    lends_objects = True

    def __init__(self) -> None:
        self._boxes: dict[int, object] = {}
        self._lists: dict[int, list[object]] = {}

    def own(self, objects: list[Any]) -> list[Any]:
        return [_copied(one) for one in objects]

    def put(self, box: int, value: object) -> int:
        self._boxes[box] = value
        return 1

    def get(self, box: int, length: int) -> Any:
        return self._boxes.pop(box) if length else None

    def append(self, box: int, value: object, at: int) -> int:
        self._lists[box] = [*self._lists.get(box, ())[:at], value]
        return at + 1

    def appended(self, box: int, at: int, end: int) -> list[Any]:
        return self._lists[box][at:end]


def _copied(value: Any) -> Any:
    with contextlib.suppress(Exception):
        return copy.deepcopy(value)
    with contextlib.suppress(Exception):  # a MappingProxyType can only be pickled
        return pickle.loads(by_value(value))
    return value  # an object that cannot be copied is passed itself


def dumps(value: object, *, shares_main: bool = False) -> bytes:
    """Pickles by reference where possible, else by value: what `__main__` defines exists in one process only.

    shares_main: the other process is a fork of this one, or the other way round, and has the same `__main__`.
    """
    try:
        data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    except Exception:
        return by_value(value)
    # A name that pickle wrote for an object of __main__ names nothing, or something else, in the other process.
    if b"__main__" in data and not shares_main:
        return by_value(value)
    return data
