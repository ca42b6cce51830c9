"""Functions that look at, and kill, processes that are not this one's children."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_PF_EXITING = 0x4  # of include/linux/sched.h
_PR_SET_CHILD_SUBREAPER = 36


def stat_of(pid: int) -> list[str]:
    """The fields of /proc/PID/stat from the state on; state ``X`` once there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")  # a process may have any name
    except OSError:
        return ["X", "0"]
    return text.rpartition(")")[2].split()


def is_alive(pid: int) -> bool:
    """Whether a process is alive. A zombie is not: the process that adopted it may never reap it."""
    return stat_of(pid)[0] not in ("Z", "X")


def is_exiting(pid: int) -> bool:
    """Whether a process will be a zombie soon. Its command line may be gone already, so that `running` misses it."""
    state, *rest = stat_of(pid)
    return state != "X" and bool(int(rest[5]) & _PF_EXITING)


def running(word: str) -> set[int]:
    """The living processes with `word` in their command line, without this one."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid() and is_alive(int(entry.name)):
            with contextlib.suppress(OSError):
                if word.encode() in (entry / "cmdline").read_bytes():
                    found.add(int(entry.name))
    return found


def wait_for(word: str) -> None:
    """Waits until a process with `word` in its command line is `running`."""
    deadline = time.monotonic() + 20
    while not running(word):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def left_of(word: str, within_s: float = 20.0) -> set[int]:
    """The processes of `running` that do not end by themselves within the time. Kills them."""
    deadline = time.monotonic() + within_s
    while (left := running(word)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return left


@functools.cache
def adopts_orphans() -> bool:
    """Makes processes whose parent has ended children of this process, so that none can hide. False where it cannot."""
    refused = ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    assert not refused or ctypes.get_errno() == errno.EINVAL  # emulators of other processors do not know the call
    return not refused


def descendants(pid: int) -> dict[str, int]:
    """Living processes below `pid`: their names as ``name pid``, for messages, and their pids."""
    children = _listed_children if Path(f"/proc/self/task/{os.getpid()}/children").exists() else _all_children()
    found: dict[str, int] = {}
    queue = [pid]
    while queue:
        for child in children(queue.pop()):
            try:
                name, _, rest = (
                    Path(f"/proc/{child}/stat").read_text(errors="replace").partition("(")[2].rpartition(")")
                )
            except OSError:
                continue
            if rest.split()[0] != "Z":  # a zombie holds nothing, and its exit code may still be read
                found[f"{name} {child}"] = child
                queue.append(child)
    return found


def shared_memory_of_others() -> set[str]:
    """Entries of /dev/shm that other processes have mapped: neither this one nor its descendants."""
    ours = {os.getpid(), *descendants(os.getpid()).values()}
    used: set[str] = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) not in ours:
            try:
                maps = (entry / "maps").read_text()
            except OSError:
                continue
            used.update(part.split()[0] for part in maps.split("/dev/shm/")[1:])
    return used


def _listed_children(pid: int) -> list[int]:
    """The children of a process as the kernel lists them, by thread. Not every kernel does."""
    listed: list[int] = []
    with contextlib.suppress(OSError):  # the process, or one of its threads, has ended
        for task in os.listdir(f"/proc/{pid}/task"):
            listed += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return listed


def _all_children() -> Callable[[int], list[int]]:
    """Gives the children of each process, from a look at all processes."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            children.setdefault(parent_of(int(entry)), []).append(int(entry))
    return lambda pid: children.get(pid, [])


def named_fd(fd: int | str) -> str:
    """An open fd of this process and what it is of. Raises OSError."""
    return f"{fd} -> {os.readlink(f'/proc/self/fd/{fd}')}"


def parent_of(pid: int) -> int:
    return int(stat_of(pid)[1])


def wait_for_end(pid: int) -> None:
    while is_alive(pid):
        time.sleep(0.01)


def kill_worker(envs: Any, worker: int) -> None:
    """Kills a worker, and returns once it is dead."""
    pid = envs.stats()["workers"][worker]["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_for_end(pid)
