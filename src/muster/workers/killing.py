"""Ending workers, and what they have started."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable

from muster._core import kill_started


def kill_with_all(pid: int, session: int, send: Callable[[int], object]) -> None:
    """Kills the process `pid` and what it has started. send: sends it a signal, by its number."""
    send(signal.SIGSTOP)  # it is to start nothing more
    kill_started(root=pid, session=session)
    send(signal.SIGKILL)


def kill_left(pid: int, pidfd: int, session: int) -> None:
    """Waits until the worker `pid` has died; kills what it has left. The caller of this is its parent, and reaps it."""
    # While it is a zombie no other process can have its pid, nor its group.
    os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT)
    kill_started(root=pid, session=session)
    kill_group(pid)


def kill_group(pid: int) -> None:
    """Kills the worker `pid` and its process group."""
    # It has died before it had one, or only such are left as run by another user.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
