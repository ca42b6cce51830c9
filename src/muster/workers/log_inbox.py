"""The log records of workers, on their way to the caller's loggers.

They lie one behind the other in a memfd that all workers of a vector env append to: writing never waits for a reader.
A byte in front of them tells the caller that there are some, which costs a step nothing while there are none.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import pickle
import struct
import sys
import threading
import time
from collections.abc import Collection, Iterator
from typing import Any

from muster._core import map_fd

# The flag has a page of its own, which stays when the records are removed.
_START = 4096
_LENGTH = struct.Struct("<Q")
_READER_S, _WRITER_S = 0.05, 1.0

Place = tuple[str, str]
"""The name of a logger, and the file or stream that one of its handlers writes to."""


class LogInbox:
    """The caller's end. flag: ``flag[0]`` is not 0 while there may be records. fd: stays the caller's."""

    def __init__(self, fd: int) -> None:
        os.ftruncate(fd, _START)
        self._fd = fd
        self.flag: memoryview = map_fd(fd=fd, size=_START).data
        self._taking = threading.RLock()  # reentrant: a handler may use the vector env

    def deliver(self, *, at_the_end: bool = False) -> None:
        """Hands the records that have arrived to the caller's loggers. at_the_end: looks for them without the flag."""
        if self.flag[0] or at_the_end:
            for fields, ran in _records_in(self._taken()):
                _hand_over(logging.makeLogRecord(fields), ran)

    def _taken(self) -> bytes:
        with self._taking:
            self.flag[0] = 0  # first: whoever writes from now on sets it again
            if not _locks_soon(self._fd, _READER_S):
                self.flag[0] = 1
                return b""
            try:
                data = os.pread(self._fd, os.fstat(self._fd).st_size - _START, _START)
                os.ftruncate(self._fd, _START)
            finally:
                fcntl.lockf(self._fd, fcntl.LOCK_UN)
        return data


def append(fd: int, flag: memoryview, fields: dict[str, Any], ran: Collection[Place]) -> None:
    """Adds a record in a worker. fields: its attributes.  ran: where handlers in the worker have written it already.

    Raises OSError: BlockingIOError where another worker, which was stopped while it wrote, keeps the file.
    """
    data = pickle.dumps((fields, ran), protocol=pickle.HIGHEST_PROTOCOL)
    if not _locks_soon(fd, _WRITER_S):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    try:
        os.pwrite(fd, _LENGTH.pack(len(data)) + data, max(_START, os.fstat(fd).st_size))
        flag[0] = 1
    finally:
        fcntl.lockf(fd, fcntl.LOCK_UN)


def map_flag(fd: int) -> memoryview:
    """The flag, as a worker sees it."""
    flag: memoryview = map_fd(fd=fd, size=_START).data
    return flag


def handlers_of(logger: logging.Logger) -> Iterator[tuple[str, logging.Handler]]:
    """The handlers that a record of `logger` comes to, each with the name of the logger that has it."""
    one: logging.Logger | None = logger
    while one is not None:
        yield from ((one.name, handler) for handler in list(one.handlers))
        one = one.parent if one.propagate else None


def target_of(handler: logging.Handler) -> str:
    """The file or standard stream that a handler writes to; empty for all others."""
    if isinstance(handler, logging.FileHandler):
        return handler.baseFilename
    stream = getattr(handler, "stream", None)
    return next((name for name in ("stdout", "stderr") if stream is not None and stream is getattr(sys, name)), "")


def _records_in(data: bytes) -> Iterator[tuple[dict[str, Any], Collection[Place]]]:
    at = 0
    while at + _LENGTH.size <= len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size + length
        if at > len(data):  # the worker was killed while it wrote
            return
        yield pickle.loads(data[at - length : at])


def _hand_over(record: logging.LogRecord, ran: Collection[Place]) -> None:
    logger = logging.getLogger(record.name)
    if not logger.isEnabledFor(record.levelno):
        return
    passed: Any = logger.filter(record)  # from Python 3.12 on a filter may return another record
    if not passed:
        return
    record = passed if isinstance(passed, logging.LogRecord) else record
    record.levelname = logging.getLevelName(record.levelno)
    found = False
    for name, handler in handlers_of(logger):
        found = True
        if record.levelno < handler.level or (name, target_of(handler)) in ran:
            continue
        try:
            handler.handle(record)
        except Exception:  # what a handler raises concerns logging, and not the call that is waiting for an env
            handler.handleError(record)
    last = logging.lastResort
    if not found and not ran and last is not None and record.levelno >= last.level:
        last.handle(record)


def _locks_soon(fd: int, limit_s: float) -> bool:
    """Locks the file, which others do for microseconds; False where one of them has been stopped meanwhile."""
    deadline = time.monotonic() + limit_s
    while True:
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:  # BlockingIOError, or PermissionError: POSIX allows both
            if time.monotonic() > deadline:
                return False
            time.sleep(0.0002)
