"""Logging in a worker: as the caller has set it up, with the caller's own handlers behind the loggers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from muster.pickling import is_plain
from muster.pool.logs import append, handlers_of, map_flag, target_of
from muster.worker_info import get_worker_info

_SENT = "_muster_sent"
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
        fields = {name: value for name, value in vars(record).items() if name not in _MADE_OF}
        plain: dict[str, Any] = {name: value if is_plain(value) else _text(value) for name, value in fields.items()}
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

    levels: the caller's; None in a fork, which has them, and the handlers too, whose place is taken. Its filters go:
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

        drops_handlers: removes other handlers beside them, and all filters: copies of the caller's, whose script was
        run here.
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
        return f"<{type(value).__name__}, whose repr raised {type(error).__name__}>"
