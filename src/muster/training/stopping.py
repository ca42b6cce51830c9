"""Ctrl-C, SIGTERM, SIGHUP and SIGQUIT end the work, and never the saving of it. SIGUSR1 and SIGUSR2 ask for the saving.

Slurm, Docker and ``timeout`` send SIGTERM, a terminal or a connection that closes SIGHUP, and Ctrl-\\ SIGQUIT. Slurm
sends a signal of the user's choice some time before a job ends.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeVar

from muster.errors import EnvError, WorkerError
from muster.pool.worker_process import USER_SIGNALS

T = TypeVar("T")

WITHIN_S = 0.5  # a signal for a whole group of processes reaches all of them
_DEFAULTS = {
    signal.SIGINT: signal.default_int_handler,
    **dict.fromkeys((signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT), signal.SIG_DFL),
}

# What `StopSignals.caused` knows how to judge.
STOPS = (KeyboardInterrupt, EnvError, WorkerError)


class StopSignals:
    """Receives these signals within a ``with`` block of the main thread; in other threads they do what they always do.

    The first one raises KeyboardInterrupt, but only in what `call` calls: at any other moment it is noted, for the
    next `call` to raise. Later ones do nothing, except that Ctrl-C then interrupts whatever is under way.
    Signals that the program ignores, or handles itself, stay with that; so do those of processes that envs fork. A
    block within another one receives them alone.

    saves: SIGUSR1 and SIGUSR2 are noted, too, for `save_asked`.
    number: of the signal that came first, None while there was none.
    """

    def __init__(self, *, saves: bool = False) -> None:
        self.number: signal.Signals | None = None
        self._saves, self._save_asked = saves, False
        self._may_raise = False
        self._before: dict[int, Any] = {}
        self._pid = os.getpid()

    @property
    def name(self) -> str:
        """The signal as people call it."""
        if self.number is None:
            return ""
        return "Ctrl-C" if self.number == signal.SIGINT else self.number.name

    def call(self, function: Callable[[], T]) -> T:
        """The result of the function, which the first signal interrupts. Raises KeyboardInterrupt."""
        self._may_raise = True
        try:
            if self.number is not None:
                raise KeyboardInterrupt
            return function()
        finally:
            # A signal before this line still raises here; there is no second one that could raise later.
            self._may_raise = False

    def save_asked(self) -> bool:
        """True if a signal has asked for a save since this was last asked."""
        asked, self._save_asked = self._save_asked, False
        return asked

    def caused(self, error: BaseException) -> bool:
        """True if a signal ended the work. error: one of STOPS; a signal to a whole group may reach workers first."""
        if isinstance(error, KeyboardInterrupt):
            self.number = self.number or signal.SIGINT  # raised by a handler of the program's own
        deadline = time.monotonic() + WITHIN_S
        while self.number is None and self._before and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.number is not None

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number, default in _DEFAULTS.items():
                handler = signal.getsignal(number)
                if handler == default or isinstance(getattr(handler, "__self__", None), StopSignals):
                    self._before[number] = signal.signal(number, self._receive)
            for number in USER_SIGNALS if self._saves else ():
                if signal.getsignal(number) in (signal.SIG_DFL, signal.SIG_IGN):
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._save_asked = True

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            signal.signal(number, self._before[number])
            signal.raise_signal(number)
            return
        again = self.number is not None
        self.number = self.number or signal.Signals(number)
        if number == signal.SIGINT if again else self._may_raise:
            raise KeyboardInterrupt
