"""One worker process as its owner sees it: its death, its last words, its stack, and the fds held for it."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from muster._core import STACK_SIGNAL, WATCHDOG_NAME, kill_started, signal_thread
from muster.pool.resources import stat_of
from muster.transport.big_arrays import memfd

# Slurm sends the one that a job asks for to every process of its step.
USER_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)
_STACK_S = 0.5
_STATUS_S = 5.0
_TAIL_LINES = 20
# A pipe holds no more.
_REST_BYTES = 1 << 16

# The caller's fds for its workers. A forked worker inherits them, and closes all but its own.
_own_fds: set[int] = set()


def ignore_user_signals() -> None:
    """Keeps SIGUSR1 and SIGUSR2 from ending this process and those it starts. Only the main thread can do so."""
    for number in USER_SIGNALS if threading.current_thread() is threading.main_thread() else ():
        signal.signal(number, signal.SIG_IGN)


def own(*fds: int | None) -> None:
    """Notes fds that only the caller may keep open."""
    _own_fds.update(fd for fd in fds if fd is not None)


def open_files(files: dict[str, int], *names: str) -> None:
    """Adds files in memory by their names, fds that only the caller may keep open. One that fails costs none before."""
    for name in names:
        files[name] = memfd(name)
        own(files[name])


def open_eventfd(files: dict[str, int], name: str) -> int:
    """Adds an eventfd that no read blocks on, in the same way, and returns it."""
    files[name] = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    own(files[name])
    return files[name]


def disown(fd: int) -> None:
    """Forgets an fd that is about to be closed."""
    _own_fds.discard(fd)


def close_own(*fds: int | None) -> None:
    """Closes fds noted by `own`."""
    for fd in fds:
        if fd in _own_fds:
            _own_fds.discard(fd)
            os.close(fd)


def close_all_own(spared: Iterable[int]) -> None:
    """Closes, in a fork of the caller, all fds noted by `own` except `spared`; the fork owns none of these."""
    for fd in _own_fds - set(spared):
        os.close(fd)
    _own_fds.clear()


def stream_fd(stream: Any, fallback: int) -> int:
    """The fd of a stream, which may be None or closed."""
    try:
        return int(stream.fileno())
    except (AttributeError, OSError, ValueError):
        return fallback


class WorkerFiles(NamedTuple):
    """The caller's fds of what a worker writes.

    tail: a file of what it wrote to stderr last, and its crash report.  stacks: one of the stacks that it was asked
    for: in the other they would mix with what it prints meanwhile.  stderr: the pipe to its watchdog.
    log: where what it prints goes; None where that is where this process prints.
    """

    tail: int
    stacks: int
    stderr: int
    log: int | None = None


class WorkerProcess:
    """The caller's handle of one worker's process. `fileno` becomes readable when the process has ended."""

    def __init__(
        self, pid: int, pidfd: int, status_fd: int | None, files: WorkerFiles, *, is_apart: bool = False
    ) -> None:
        self.pid = pid
        self._pidfd = pidfd
        self._status_fd = status_fd  # None for a child of this process: `waitpid` returns its status
        self._files = files
        # The worker's; noted now since the caller may leave its session later.
        self._session = pid if is_apart else os.getsid(0)
        self.exit_code: int | None = None  # negative for a signal; None where somebody else has reaped the process
        self._ended = False
        self._released = False
        # One thread may close a pool while another looks at its workers. Reentrant: so may a signal handler.
        self._reaping = threading.RLock()
        self._rest = b""
        own(pidfd, status_fd, *files)

    def fileno(self) -> int:
        return self._pidfd

    def has_ended(self) -> bool:
        """True once the worker has ended; reaps it, and kills what it left running."""
        with self._reaping:
            if not self._ended and readable([self.fileno()], 0.0):
                self.exit_code = self._reap()
                self._ended = True
        return self._ended

    def wait(self, timeout_s: float) -> bool:
        """Waits until the worker has ended, for `timeout_s` at most; returns whether it has."""
        if not self._ended:  # else the fd may be another file's by now
            readable([self.fileno()], timeout_s)
        return self.has_ended()

    def kill(self) -> None:
        """Kills the worker with SIGKILL, and all that it has started."""
        if not self.has_ended():
            kill_with_all(self.pid, self._session, self.send_signal)

    def send_signal(self, number: int) -> None:
        if not self._ended:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def tail(self, stacks: str = "") -> str:
        """The last lines that the worker wrote to stderr, and its crash report, or the `stacks` of one that hangs."""
        self._pass_on_rest()
        size = os.fstat(self._files.tail).st_size
        kept = os.pread(self._files.tail, 1 << 14, max(0, size - (1 << 14)))
        said = (kept + self._rest).decode(errors="replace")
        return "\n".join(_significant_lines(said.splitlines() + stacks.splitlines()))

    def stacks_since(self, start: int) -> str:
        """The stacks that the worker has reported from a place in their file on; the main thread's is the last."""
        return os.pread(self._files.stacks, self.stacks_size() - start, start).decode(errors="replace")

    def ask_for_stack(self) -> None:
        """Has faulthandler write the Python stacks of all threads, even while native code holds the GIL.

        Asks the worker's watchdog: in the main thread a system call that waits would end with EINTR. Only where the
        main thread runs it is asked itself, since its frames must not change meanwhile.
        """
        with contextlib.suppress(OSError):
            process = Path(f"/proc/{self.pid}")
            caught = re.search(r"^SigCgt:\s*(\w+)", (process / "status").read_text(), re.MULTILINE)
            if caught is None or not int(caught[1], 16) >> (STACK_SIGNAL - 1) & 1:
                return  # it starts, or ends: the signal would end it
            if stat_of(self.pid)[1:2] != ["R"]:
                for thread in (process / "task").iterdir():
                    if (thread / "comm").read_text().strip() == WATCHDOG_NAME:
                        signal_thread(self.pid, int(thread.name), STACK_SIGNAL)
                        return
        self.send_signal(STACK_SIGNAL)

    def stacks_size(self) -> int:
        return os.fstat(self._files.stacks).st_size

    def release(self) -> None:
        """Closes the fds that the caller holds for the worker. Its process must have ended."""
        with self._reaping:
            if not self._released:
                self._pass_on_rest()
                close_own(self._pidfd, self._status_fd, *self._files)
                self._released = True

    def _pass_on_rest(self) -> None:
        """Writes to stderr what the worker wrote there last, and did not live to pass on; never waits for a reader."""
        stderr = stream_fd(sys.__stderr__, 2) if self._files.log is None else self._files.log
        poller = select.poll()
        poller.register(stderr, select.POLLOUT)
        with contextlib.suppress(OSError):
            os.set_blocking(self._files.stderr, False)
            for _ in range(_REST_BYTES // select.PIPE_BUF):
                said = os.read(self._files.stderr, select.PIPE_BUF)
                if not said:
                    break
                self._rest += said
                has_room = poller.poll(0) == [(stderr, select.POLLOUT)]  # so much can be written at once
                if has_room:
                    os.write(stderr, said)

    def _reap(self) -> int | None:
        if self._status_fd is not None:
            text = os.read(self._status_fd, 16) if self._has_status(self._status_fd) else b""
            if not text:  # the launcher has died, or is stopped, and the worker is dead, but not what it had started
                self.send_signal(signal.SIGKILL)
                self._kill_orphans()
                return None
            return int(text)
        try:
            kill_left(self.pid, self._pidfd, self._session)
            _, raw = os.waitpid(self.pid, 0)
        except ChildProcessError:  # the caller ignores SIGCHLD, or has waited for all its children
            self._kill_orphans()
            return None
        return os.waitstatus_to_exitcode(raw)

    def _has_status(self, fd: int) -> bool:
        """Waits until the launcher reports the end of the worker, its child; not where it is stopped."""
        deadline = time.monotonic() + _STATUS_S
        while not readable([fd], 0.02) and time.monotonic() < deadline:
            with contextlib.suppress(IndexError):  # reaped meanwhile
                if stat_of(stat_of(self.pid)[2])[1] in "Tt":  # its parent
                    return False
        return bool(readable([fd], 0.0))

    def _kill_orphans(self) -> None:
        """Kills what the worker has left running, where not this code but somebody else reaps the worker."""
        try:
            signal.pidfd_send_signal(self._pidfd, 0)
            is_reaped = False
        except ProcessLookupError:
            is_reaped = True
        kill_started(root=self.pid, session=self._session, is_reaped=is_reaped)


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


def _significant_lines(lines: list[str]) -> list[str]:
    """The last lines; where they are a stack, the first lines of that: they hold the most recent calls."""
    begins = ("Current thread", "Thread 0x")  # of several the main thread's is the last
    current, others = ([at for at, line in enumerate(lines) if line.startswith(one)] for one in begins)
    stacks = current or others
    if not stacks:
        return lines[-_TAIL_LINES:]
    first = min(current + others)  # what stands before is no other thread's stack
    said = lines[max(0, first - 5) : first]
    end = stacks[-1] + _TAIL_LINES - len(said)
    return said + lines[stacks[-1] : end] + lines[max(end, len(lines) - 5) :]


class Poller:
    """Waits for fds that have something to read, or were closed at the other end, each with what it belongs to."""

    def __init__(self) -> None:
        self._poll, self._owners = select.poll(), dict[int, Any]()

    def add(self, fd: int, owner: Any) -> None:
        """Adds an fd. owner: what it belongs to."""
        if fd >= 0:
            self._poll.register(fd, select.POLLIN)
            self._owners[fd] = owner

    def ready(self, timeout_s: float) -> list[Any]:
        """The owners of the fds that are ready within the time, in the order in which they were added."""
        return [self._owners[fd] for fd, _ in self._poll.poll(timeout_s * 1000)]


def readable(fds: Iterable[int], timeout_s: float) -> list[int]:
    """The `fds` that, within the time, have something to read, or were closed at the other end."""
    poller = Poller()
    for fd in fds:
        poller.add(fd, fd)
    return poller.ready(timeout_s)


def flush_streams() -> None:
    """Flushes stdout and stderr, which may be None, closed, or an object that the user has put in their place."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()


def print_at_once() -> None:
    """Has stdout, which may be None or closed, pass on each line that is printed."""
    flush_streams()
    with contextlib.suppress(AttributeError, ValueError):
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]


def python_stacks(processes: Sequence[WorkerProcess]) -> list[str]:
    """The Python stacks of workers that hang, as faulthandler reports them, in the time that one takes.

    Empty for one that does not report any.
    """
    sizes = starts = [process.stacks_size() for process in processes]
    for process in processes:
        process.ask_for_stack()
    deadline, is_whole = time.monotonic() + _STACK_S, not processes
    while not is_whole and time.monotonic() < deadline:
        time.sleep(0.05)  # a report is written line by line: it is whole once it has stopped growing
        before, sizes = sizes, [process.stacks_size() for process in processes]
        grown = zip(processes, starts, before, sizes, strict=True)
        is_whole = all(one.has_ended() or start < was == size for one, start, was, size in grown)
    return [process.stacks_since(start) for process, start in zip(processes, starts, strict=True)]


def last_words(processes: Sequence[WorkerProcess]) -> list[str]:
    """The words that errors quote of workers that hang: the last lines that they wrote, and their Python stacks."""
    none = "(none: the process does not react to signals; it may be stopped or in the kernel)"
    stacks = python_stacks(processes)
    return [one.tail(stack) if stack else none for one, stack in zip(processes, stacks, strict=True)]
