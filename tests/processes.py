"""Looking at, and killing, processes that are not this one's children."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

_PF_EXITING = 0x4  # of include/linux/sched.h


def stat_of(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; state ``X`` once there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["X", "0"]


def is_alive(pid: int) -> bool:
    """A zombie, which whoever adopted it may leave unreaped, is not."""
    return stat_of(pid)[0] not in ("Z", "X")


def is_exiting(pid: int) -> bool:
    """Whether it will be a zombie soon. It may have lost its command line already, so that `running` passes it by."""
    state, *rest = stat_of(pid)
    return state != "X" and bool(int(rest[5]) & _PF_EXITING)


def running(word: str) -> set[int]:
    """The living processes with `word` in their command line, but for this one."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid() and is_alive(int(entry.name)):
            with contextlib.suppress(OSError):
                if word.encode() in (entry / "cmdline").read_bytes():
                    found.add(int(entry.name))
    return found


def wait_for(word: str) -> None:
    """Until one is `running`."""
    deadline = time.monotonic() + 20
    while not running(word):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def left_of(word: str, within_s: float = 20.0) -> set[int]:
    """Those of `running` that do not end by themselves within the time; they are killed."""
    deadline = time.monotonic() + within_s
    while (left := running(word)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return left


def parent_of(pid: int) -> int:
    return int(stat_of(pid)[1])


def wait_for_end(pid: int) -> None:
    while is_alive(pid):
        time.sleep(0.01)


def kill_worker(envs: Any, worker: int) -> None:
    """Returns once it is dead."""
    pid = envs.stats()["workers"][worker]["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_for_end(pid)
