"""Kills workers, and the processes that they have started."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable

from muster._core import kill_started


def kill_with_all(pid: int, session: int, send: Callable[[int], object]) -> None:
    """Kills the process `pid` and all that it has started. send: sends the process a signal, by its number."""
    send(signal.SIGSTOP)  # so that the process starts nothing more
    kill_started(root=pid, session=session)
    send(signal.SIGKILL)


def kill_left(pid: int, pidfd: int, session: int) -> None:
    """Waits until the worker `pid` has died and kills what it has left. Only for its parent, which reaps it later."""
    # While the worker is a zombie, no other process can have its pid, or its group's number.
    os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
    kill_started(root=pid, session=session)
    kill_group(pid)


def kill_group(pid: int) -> None:
    """Kills the worker `pid` and its process group."""
    # The worker died before it had a group, or only processes of another user are left in it.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
