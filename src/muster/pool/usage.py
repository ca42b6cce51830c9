"""The memory, open files and started processes that a process holds, as the kernel's /proc tells them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from muster.pool.resources import read_text


class Usage(NamedTuple):
    """The things that a process holds at one moment; None where it has ended, or the kernel does not tell.

    anonymous_bytes: memory that belongs to no file, with what has been swapped out.  handles: open file descriptors.
    children: processes that it has started, or that those have started, and that still exist.
    """

    anonymous_bytes: int | None = None
    handles: int | None = None
    children: int | None = None


def usage_of(pid: int | None) -> Usage:
    """The usage of process `pid`. Takes well under 0.1 ms: no page table is walked."""
    if pid is None:
        return Usage()
    try:
        handles = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return Usage()
    started = descendants(pid)
    return Usage(anonymous_bytes(pid), handles, None if started is None else len(started))


def anonymous_bytes(pid: int) -> int | None:
    """Bytes of memory of process `pid` that belong to no file; None where it has ended, or the kernel does not tell."""
    lines = (line.split() for line in read_text(Path(f"/proc/{pid}/status")).splitlines())
    held = [int(words[1]) * 1024 for words in lines if words and words[0] in ("RssAnon:", "VmSwap:")]
    return sum(held) if held else None


def descendants(pid: int) -> list[int] | None:
    """The ids of the processes that `pid` has started, and of those that these have; None if the kernel does not tell.

    A process whose parent has ended belongs to nobody here.
    """
    try:
        threads = os.listdir(f"/proc/{pid}/task")
        lists = [_children(pid, thread) for thread in threads]
    except OSError:
        return None
    found = []
    for child in (int(word) for words in lists for word in words):
        found += [child, *(descendants(child) or ())]
    return found


def _children(pid: int, thread: str) -> list[str]:
    try:
        with open(f"/proc/{pid}/task/{thread}/children") as file:
            return file.read().split()
    except OSError:
        if os.path.exists(f"/proc/{pid}/task/{thread}"):  # this kernel has no such file; else the thread has ended
            raise
        return []


def private_bytes(pid: int | None) -> int | None:
    """Bytes of memory that only process `pid` holds; None where it has ended, or the kernel does not tell."""
    if pid is None:
        return None
    private = [
        int(line.split()[1]) * 1024
        for line in read_text(Path(f"/proc/{pid}/smaps_rollup")).splitlines()
        if line.startswith("Private_")
    ]
    return sum(private) if private else None


def own_memory_bytes() -> int:
    """Bytes of memory that only this process holds; 0 where the kernel does not report them."""
    return private_bytes(os.getpid()) or 0
