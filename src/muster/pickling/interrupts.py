"""Signals held back while something is done that must be done as a whole."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal makes enums of all, which takes ten times as long
import contextlib
import os
import threading
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
    _held: ClassVar[dict[int, Any]] = {}  # handlers, by signal
    _came: ClassVar[dict[int, Any]] = {}  # frames, by signal
    _main: ClassVar[int | None] = threading.main_thread().ident

    def __enter__(self) -> Self:
        self._counts = threading.get_ident() == self._main
        if not self._counts:
            return self
        if not Uninterrupted._depth:
            self._came.clear()  # what another signal's handler has kept from being run
            try:
                for number, handler in zip(_NUMBERS, map(_signal.getsignal, _NUMBERS), strict=True):
                    if callable(handler):
                        self._held[number] = handler
                        set_handler(number, _note)
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
        if cls._came and threading.get_ident() == cls._main:
            _run(dict(cls._held))

    @classmethod
    def in_child(cls) -> None:
        """Holds nothing back in a process that was forked meanwhile."""
        cls._depth, cls._main = 0, threading.main_thread().ident
        cls._came.clear()
        _give_back()


def _note(number: int, frame: Any) -> None:
    Uninterrupted._came[number] = frame


def _give_back() -> None:
    """Gives signals back to their handlers, and runs those whose signals have come."""
    held, handlers = Uninterrupted._held, dict(Uninterrupted._held)
    raised: BaseException | None = None
    while held:
        try:
            for number in list(held):
                set_handler(number, held[number])
                del held[number]
        except BaseException as error:  # of a signal that comes now
            raised = error
    if Uninterrupted._came:
        _run(handlers)
    if raised is not None:
        raise raised


def _run(handlers: dict[int, Any]) -> None:
    came = Uninterrupted._came
    with contextlib.ExitStack() as all_of_them:  # even where one raises
        while came:
            number, frame = came.popitem()
            all_of_them.callback(handlers[number], number, frame)


os.register_at_fork(after_in_child=Uninterrupted.in_child)
