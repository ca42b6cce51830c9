"""The caller's handle of one worker process, and how one comes about."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from muster.backends.launch import WorkerProcess, close_own, fork_worker, own
from muster.backends.worker import STACK_SIGNAL, main
from muster.recipe import Recipe
from muster.transport.channel import Channel, ChannelClosed
from muster.transport.slab import memfd

# Its pid, its pidfd, and the pipe that will tell its exit code, where it is no child of this process.
Started = tuple[int, int, int | None]

_STACK_S = 0.5


@dataclass
class WorkerHandle:
    """One worker as the caller sees it. first, last: its envs are first to last - 1."""

    index: int
    first: int
    last: int
    process: WorkerProcess
    channel: Channel
    seen: tuple[int, ...] = ()  # its state when it last changed, and when that was
    seen_at: float = 0.0


def launch_worker(
    line: int,
    envs: range,
    shared_fds: Mapping[str, int],
    start: Callable[[Mapping[str, int]], Started],
    *,
    shares_main: bool,
) -> WorkerHandle:
    """Starts a worker by `start`, which is given the fds of `launcher.WORKER_FDS`. shares_main: see `mail.dumps`."""
    ours, theirs = Channel.pair()
    stderr_read, stderr_write = os.pipe()
    tail = memfd(f"tail-{line}")
    caller = os.pidfd_open(os.getpid())
    fds = {
        **shared_fds,
        "channel": theirs.fileno(),
        "tail": tail,
        "stderr_read": stderr_read,
        "stderr_write": stderr_write,
        "stdout": _stream_fd(sys.__stdout__, 1),
        "stderr": _stream_fd(sys.__stderr__, 2),
        "caller": caller,
    }
    own(ours.fileno())
    try:
        pid, pidfd, status = start(fds)
    except BaseException:
        close_own(ours.detach())
        os.close(tail)
        os.close(stderr_read)
        raise
    finally:
        theirs.close()
        os.close(stderr_write)
        os.close(caller)
    process = WorkerProcess(pid, pidfd, status, tail, stderr_read)
    channel = Channel(ours, functools.partial(_watch_process, process), shares_main=shares_main)
    return WorkerHandle(line, envs.start, envs.stop, process, channel)


def fork_worker_for(recipes: Sequence[Recipe], fds: Mapping[str, int]) -> Started:
    """Forks the caller into a worker for `recipes`, which are inherited."""
    copies = {name: os.dup(fd) for name, fd in fds.items()}
    try:
        pid, pidfd = fork_worker(lambda fds: main(fds, recipes), copies)
    finally:
        for fd in copies.values():
            os.close(fd)
    return pid, pidfd, None


def python_stack(process: WorkerProcess) -> str:
    """What a worker that hangs is doing, as faulthandler tells it."""
    before = process.tail_size()
    process.send_signal(STACK_SIGNAL)
    deadline = time.monotonic() + _STACK_S
    while process.tail_size() == before and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)  # the report is written line by line
    text = process.tail() if process.tail_size() != before else ""
    return text or "(none: the process does not react to signals; it may be stopped or in the kernel)"


def name_workers(workers: Sequence[WorkerHandle]) -> str:
    """``worker 1 has`` or ``workers 0, 2 have``."""
    names = ", ".join(str(worker.index) for worker in workers)
    return f"worker {names} has" if len(workers) == 1 else f"workers {names} have"


def _watch_process(process: WorkerProcess, waited_s: float) -> None:
    if process.has_ended():
        raise ChannelClosed


def _stream_fd(stream: Any, fallback: int) -> int:
    try:
        return int(stream.fileno())
    except (AttributeError, OSError, ValueError):
        return fallback
