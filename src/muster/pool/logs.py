"""The log records of workers, on their way to the caller's loggers.

They lie one behind the other in a memfd that all workers of a vector env append to: writing never waits for a reader.
A byte in front of them says to the caller that there are some, which costs a step nothing while there are none. Behind
the byte stand the end of the whole records, and the number of those that found no room.
"""

from __future__ import annotations

import fcntl
import logging
import os
import pickle
import struct
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from muster._core import map_fd
from muster.pickling import is_plain
from muster.worker_info import get_worker_info

# The flag has a page of its own, which stays when the records are removed.
_START = 4096
_LENGTH = struct.Struct("<Q")
_COUNTS, _COUNTS_AT = struct.Struct("<QQ"), 8
_MOST_BYTES = 64 << 20
_READER_S, _WRITER_S = 0.05, 1.0
_OF_WAIT = "_muster_wait"

_log = logging.getLogger("muster")

Place = tuple[str, str]
"""The name of a logger, and the file or stream that one of its handlers writes to."""


class LogInbox:
    """The caller's end. flag: ``flag[0]`` is not 0 while there may be records. fd: stays the caller's.

    take: called with the records that have arrived, see `hand_over`, and the number of those that are lost.
    """

    def __init__(self, fd: int, take: Callable[[bytes, int], None]) -> None:
        self._take = take
        os.ftruncate(fd, _START)
        self._fd = fd
        self.flag = map_flag(fd)
        self._taking = threading.RLock()  # reentrant: a handler may use the vector env

    def deliver(self, *, at_the_end: bool = False) -> None:
        """Hands the records that have arrived to the caller's loggers. at_the_end: looks for them without the flag."""
        if self.flag[0] or at_the_end:
            self._take(*self._taken())

    def _taken(self) -> tuple[bytes, int]:
        """The records, and how many are lost."""
        with self._taking:
            self.flag[0] = 0  # first: whoever writes from now on sets it again
            if not _locks_soon(self._fd, _READER_S):
                self.flag[0] = 1
                return b"", 0
            try:
                size, lost = _COUNTS.unpack_from(self.flag, _COUNTS_AT)
                data = os.pread(self._fd, size, _START)
                os.ftruncate(self._fd, _START)
                _COUNTS.pack_into(self.flag, _COUNTS_AT, 0, 0)
            finally:
                fcntl.lockf(self._fd, fcntl.LOCK_UN)
        return data, lost


def hand_over(data: bytes, lost: int, more: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Hands workers' records to this process's loggers.

    data: the records, one behind the other.  lost: number of others.  more: further attributes of each record.
    """
    for fields, ran in _records_in(data):
        _hand_over(logging.makeLogRecord({**fields, **more}), ran)
    if lost:
        _log.warning(
            "%d log records of workers are lost: more than %d MB of them were waiting. They are delivered while "
            "this process waits for envs",
            *(lost, _MOST_BYTES >> 20),
        )


def of_wait(text: str) -> bytes:
    """A warning about a long wait, as a worker's record travels."""
    return _record({"name": _log.name, "msg": text, _OF_WAIT: True})


def of_print(stream: str, text: str) -> bytes:
    """A line that a worker has printed, as its records travel. stream: "stdout" or "stderr"."""
    return _record({"name": f"{_log.name}.{stream}", "msg": text, "env_index": None, "worker_index": None})


def _record(fields: dict[str, Any]) -> bytes:
    data = pickle.dumps(({"levelno": logging.WARNING, **fields}, ()))
    return _LENGTH.pack(len(data)) + data


def hand_over_waits(data: bytes, lost: int) -> None:
    """Hands over what workers that wait for envs themselves say of that, and drops all other records."""
    for fields, ran in _records_in(data):
        if _OF_WAIT in fields:
            _hand_over(logging.makeLogRecord(fields), ran)


def append(fd: int, flag: memoryview, fields: dict[str, Any], ran: Collection[Place]) -> bool:
    """Adds a record in a worker; False where another worker, which was stopped while it wrote, keeps the file.

    fields: its attributes.  ran: where handlers in the worker have written it already. Raises OSError.
    """
    data = pickle.dumps((fields, ran), protocol=pickle.HIGHEST_PROTOCOL)
    if not _locks_soon(fd, _WRITER_S):
        return False
    try:
        size, lost = _COUNTS.unpack_from(flag, _COUNTS_AT)
        if size + len(data) > _MOST_BYTES:
            lost += 1
        else:
            os.pwrite(fd, _LENGTH.pack(len(data)) + data, _START + size)
            size += _LENGTH.size + len(data)
        _COUNTS.pack_into(flag, _COUNTS_AT, size, lost)  # last: what a worker that is killed leaves does not count
        flag[0] = 1
    finally:
        fcntl.lockf(fd, fcntl.LOCK_UN)
    return True


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
    while at < len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size + length
        yield pickle.loads(data[at - length : at])


def _hand_over(record: logging.LogRecord, ran: Collection[Place]) -> None:
    logger = logging.getLogger(record.name)
    if not logger.isEnabledFor(record.levelno):
        return
    passed: Any = False
    try:
        passed = logger.filter(record)  # from Python 3.12 on a filter may return another record
    except Exception:  # as a handler's, below; without a filter's word the record goes nowhere
        logging.Handler().handleError(record)
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


_SENT = "_muster_sent"
_USUAL = frozenset({str, int, float, type(None)})
_MADE_OF = ("msg", "args", "exc_info", _SENT)


@dataclass(frozen=True)
class LogLevels:
    """How a process logs. levels: of those loggers that have their own.  handled: the loggers that have handlers, and
    the lowest level that one of these takes.  disabled: what ``logging.disable`` was called with.
    """

    levels: Mapping[str, int]
    handled: Mapping[str, int]
    disabled: int

    @classmethod
    def current(cls) -> LogLevels:
        """How this process logs."""
        loggers = _loggers()
        taken = {
            name: [h.level for h in one.handlers if not isinstance(h, logging.NullHandler)]
            for name, one in loggers.items()
        }
        return cls(
            levels={name: one.level for name, one in loggers.items() if one.level},
            handled={name: min(levels) for name, levels in taken.items() if levels},
            disabled=logging.root.manager.disable,
        )


class Forwarder(logging.Handler):
    """Stands in a worker for handlers of the caller: sends each record once, to all of them."""

    def __init__(self, fd: int, flag: memoryview, worker: int, level: int = logging.NOTSET) -> None:
        super().__init__(level)
        self._fd = fd
        self._flag = flag
        self._worker = worker

    def emit(self, record: logging.LogRecord) -> None:
        if vars(record).get(_SENT):
            return
        vars(record)[_SENT] = True
        own = [(name, h) for name, h in handlers_of(logging.getLogger(record.name)) if not isinstance(h, Forwarder)]
        ran = {(name, target_of(h)) for name, h in own if record.levelno >= h.level and target_of(h)}
        try:
            try:
                written = append(self._fd, self._flag, self._fields(record), ran)
            except OSError:  # the file is closed, by an env
                written = False
            if not written:
                logging.StreamHandler().handle(record)
        except Exception:  # arguments that do not fit the message
            self.handleError(record)

    def _fields(self, record: logging.LogRecord) -> dict[str, Any]:
        """The record's attributes, and the env's index; what is no plain value as text."""
        plain: dict[str, Any] = {  # most are of a few types, which are asked first: a record has 20 attributes
            name: value if type(value) in _USUAL or is_plain(value) else _text(value)
            for name, value in vars(record).items()
            if name not in _MADE_OF
        }
        if is_plain(record.msg) and is_plain(record.args):
            plain |= {"msg": record.msg, "args": record.args}
        else:
            plain |= {"msg": record.getMessage(), "args": None}
        if record.exc_info and not record.exc_text:
            plain["exc_text"] = logging.Formatter().formatException(record.exc_info)
        info = get_worker_info()
        worker = self._worker if info is None else info.worker_index
        plain |= {"exc_info": None, "env_index": None if info is None else info.env_index, "worker_index": worker}
        return plain | {"processName": f"muster-worker-{worker}"}


class LogForwarding:
    """Has the records of this worker go to the caller's handlers. fd: of the `LogInbox`.

    levels: the caller's; None in a fork, which has them, and handlers that are replaced. Its filters go:
    they run in the caller, for every record that arrives there.
    """

    def __init__(self, fd: int, worker: int, levels: LogLevels | None) -> None:
        self._levels = LogLevels.current() if levels is None else levels
        for one in _loggers().values() if levels is None else ():
            one.handlers.clear()
            one.filters.clear()
            one.propagate = True
        to = fd, map_flag(fd), worker
        self._forwarders = {name: Forwarder(*to, level) for name, level in self._levels.handled.items()}
        logging.lastResort = Forwarder(*to)
        for forwarder in self._forwarders.values():
            forwarder.lock = logging.lastResort.lock  # see `append`
        self.restore()

    def restore(self, *, drops_handlers: bool = False) -> None:
        """Sets the caller's levels, and its handlers' stand-ins where code has removed them.

        drops_handlers: removes all other handlers and all filters: copies of the caller's, since the
        script was run here.
        """
        logging.disable(self._levels.disabled)
        for name, level in self._levels.levels.items():
            logging.getLogger(name).setLevel(level)
        for one in _loggers().values() if drops_handlers else ():
            one.filters.clear()
        for name, forwarder in self._forwarders.items():
            logger = logging.getLogger(name)
            for handler in list(logger.handlers) if drops_handlers else ():
                if handler is not forwarder:
                    logger.removeHandler(handler)
                    handler.close()
            logger.addHandler(forwarder)  # does nothing where it is there


def _loggers() -> dict[str, logging.Logger]:
    known = dict(logging.root.manager.loggerDict)
    return {"root": logging.root} | {name: one for name, one in known.items() if isinstance(one, logging.Logger)}


def _text(value: Any) -> str:
    try:
        return repr(value)
    except Exception as error:
        return f"<{type(value).__name__}: its repr raised {type(error).__name__}>"
