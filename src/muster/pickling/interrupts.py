"""Signals held back while something is done that must be done as a whole."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal makes enums of all, which takes ten times as long
import os
import threading
from collections.abc import Callable
from typing import Any, ClassVar, Self

from muster._core import set_handler

# Those for which programs have handlers that raise; to ask for all 64 would take as long as a message.
_NUMBERS = tuple(
    int(getattr(_signal, f"SIG{name}"))
    for name in ("INT", "TERM", "HUP", "QUIT", "ALRM", "USR1", "USR2", "VTALRM", "PROF", "XCPU")
)


class Uninterrupted:
    """Holds signal handlers back while its body runs, and runs them at its end: only there they raise.

    For bodies that are short, or call `let_through` while they wait. Python runs handlers in the main thread alone, so
    nothing is done in others. One within another does nothing.
    """

    _depth: ClassVar[int] = 0
    _came: ClassVar[dict[int, tuple[Callable[..., object], Any]]] = {}  # handlers and frames, by signal
    _main: ClassVar[int | None] = threading.main_thread().ident

    def __enter__(self) -> Self:
        self._counts = threading.get_ident() == self._main
        if self._counts:
            if not Uninterrupted._depth:
                try:
                    _hold()
                except BaseException:  # of a signal that was not held back yet
                    _give_back()
                    raise
            Uninterrupted._depth += 1
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self._counts:
            Uninterrupted._depth -= 1
            if not Uninterrupted._depth:
                _give_back()

    @classmethod
    def let_through(cls) -> None:
        """Runs the handlers of the signals that have come, in a body that may be ended here."""
        if cls._came and cls._depth and threading.get_ident() == cls._main:
            depth, cls._depth = cls._depth, 0
            try:
                _give_back()  # a handler may set others, or keep those that it finds
            finally:
                cls._depth = depth
                _hold()

    @classmethod
    def in_child(cls) -> None:
        """Holds nothing back in a process that was forked meanwhile."""
        cls._depth, cls._main = 0, threading.main_thread().ident
        cls._came.clear()
        _give_back()


class _Held:
    """A handler that waits while signals are held back. It may stay: whoever finds it here may set it again later."""

    def __init__(self, handler: Callable[..., object]) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: Any) -> None:
        if Uninterrupted._depth:
            Uninterrupted._came[number] = self.handler, frame
        else:
            self.handler(number, frame)


def _hold() -> None:
    for number, handler in zip(_NUMBERS, map(_signal.getsignal, _NUMBERS), strict=True):
        if callable(handler) and type(handler) is not _Held:
            set_handler(number, _Held(handler))


def _give_back() -> None:
    """Gives signals back to their handlers, and runs the handlers of those that have come, even where one raises."""
    came = Uninterrupted._came
    try:
        for number in _NUMBERS:
            if type(held := _signal.getsignal(number)) is _Held:
                set_handler(number, held.handler)
        for number, (handler, frame) in list(came.items()):
            if number in came:  # a handler that holds signals back, too, has let the others through
                del came[number]  # not by pop(): another handler may raise at its end
                handler(number, frame)
    except BaseException:
        _give_back()
        raise


def new_in_child(lock: Any) -> Any:
    """The lock, which in a process that is forked meanwhile nobody holds: the thread that held it is not there."""
    os.register_at_fork(after_in_child=lock._at_fork_reinit)
    return lock


os.register_at_fork(after_in_child=Uninterrupted.in_child)
