"""The start of worker processes: by the launcher (forkserver, spawn) or by forking the caller (fork)."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NoReturn, TypeVar

from muster._core import kill_started, set_death_signal, set_process_name
from muster.errors import NoFilesLeft
from muster.pool.environment import apply, changed
from muster.pool.killing import kill_left, kill_with_all
from muster.pool.launcher import HEADER, WORKER_FDS, fill_standard_fds, leave_terminal, python_command
from muster.pool.worker import flush_streams
from muster.transport.channel import Channel

# Environment variables that native libraries read when they are loaded.
_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
_TAIL_LINES = 20
# A pipe holds no more.
_REST_BYTES = 1 << 16
# The launcher's first answer takes 0.3 s of imports, later ones only a fork.
_ANSWER_S = 60.0

E = TypeVar("E", "Channel", "WorkerProcess", socket.socket)

# The caller's fds for its workers. A forked worker inherits them, and closes all but its own.
_own_fds: set[int] = set()


def own(*fds: int | None) -> None:
    """Notes fds that only the caller may keep open."""
    _own_fds.update(fd for fd in fds if fd is not None)


def disown(fd: int) -> None:
    """Forgets an fd that is about to be closed."""
    _own_fds.discard(fd)


def close_own(*fds: int | None) -> None:
    """Closes fds noted by `own`."""
    for fd in fds:
        if fd in _own_fds:
            _own_fds.discard(fd)
            os.close(fd)


def stream_fd(stream: Any, fallback: int) -> int:
    """The fd of a stream, which may be None or closed."""
    try:
        return int(stream.fileno())
    except (AttributeError, OSError, ValueError):
        return fallback


class WorkerProcess:
    """The caller's handle of one worker's process. `fileno` becomes readable when the process has ended."""

    def __init__(self, pid: int, pidfd: int, status_fd: int | None, tail_fd: int, stderr_fd: int) -> None:
        self.pid = pid
        self._pidfd = pidfd
        self._status_fd = status_fd  # None for a child of this process, whose status `waitpid` returns
        self._tail_fd = tail_fd
        self._stderr_fd = stderr_fd
        self._session = os.getsid(0)  # also the worker's; noted now since the caller may leave its session later
        self.exit_code: int | None = None  # negative for a signal; None where somebody else has reaped the process
        self._ended = False
        self._released = False
        self._rest = b""
        own(pidfd, status_fd, tail_fd, stderr_fd)

    def fileno(self) -> int:
        return self._pidfd if self._status_fd is None else self._status_fd

    def has_ended(self) -> bool:
        """Whether the worker has ended; reaps it, and kills what it left running."""
        if not self._ended and readable([self], 0.0):
            self.exit_code = self._reap()
            self._ended = True
        return self._ended

    def wait(self, timeout_s: float) -> bool:
        """Waits until the worker has ended, for `timeout_s` at most; returns whether it has."""
        readable([self], timeout_s)
        return self.has_ended()

    def kill(self) -> None:
        """Kills the worker with SIGKILL, and all that it has started."""
        if not self.has_ended():
            kill_with_all(self.pid, self._session, self.send_signal)

    def send_signal(self, number: int) -> None:
        if not self._ended:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def tail(self) -> str:
        """The last lines that the worker wrote to stderr, and its crash report."""
        self._pass_on_rest()
        size = os.fstat(self._tail_fd).st_size
        kept = os.pread(self._tail_fd, 1 << 14, max(0, size - (1 << 14)))
        return "\n".join(_significant_lines((kept + self._rest).decode(errors="replace").splitlines()))

    def tail_size(self) -> int:
        return os.fstat(self._tail_fd).st_size

    def release(self) -> None:
        """Closes the fds that the caller holds for the worker, whose process must have ended."""
        if not self._released:
            self._pass_on_rest()
            close_own(self._pidfd, self._status_fd, self._tail_fd, self._stderr_fd)
            self._released = True

    def _pass_on_rest(self) -> None:
        """Writes to stderr what the worker wrote there last, and did not live to pass on; never waits for a reader."""
        os.set_blocking(self._stderr_fd, False)
        stderr = stream_fd(sys.__stderr__, 2)
        poller = select.poll()
        poller.register(stderr, select.POLLOUT)
        with contextlib.suppress(OSError):
            for _ in range(_REST_BYTES // select.PIPE_BUF):
                said = os.read(self._stderr_fd, select.PIPE_BUF)
                if not said:
                    break
                self._rest += said
                if poller.poll(0) == [(stderr, select.POLLOUT)]:  # so much can be written at once
                    os.write(stderr, said)

    def _reap(self) -> int | None:
        if self._status_fd is not None:
            text = os.read(self._status_fd, 16)
            if not text:  # the launcher has died, and the worker with it, but not what the worker had started
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

    def _kill_orphans(self) -> None:
        """Kills what the worker has left running, where not this code but somebody else reaps the worker."""
        try:
            signal.pidfd_send_signal(self._pidfd, 0)
            is_reaped = False
        except ProcessLookupError:
            is_reaped = True
        kill_started(root=self.pid, session=self._session, is_reaped=is_reaped)


def _significant_lines(lines: list[str]) -> list[str]:
    """The last lines; where they are a stack, the first lines of that: they hold the most recent calls."""
    stacks = [at for at, line in enumerate(lines) if line.startswith("Current thread")]
    if not stacks:
        return lines[-_TAIL_LINES:]
    first = max(0, stacks[-1] - 5)
    end = first + _TAIL_LINES
    return lines[first:end] + lines[max(end, len(lines) - 5) :]


def readable(ends: Sequence[E], timeout_s: float) -> list[E]:
    """The `ends` that, within the time, have something to read, were closed at the other end, or have ended."""
    poller = select.poll()
    by_fd = {end.fileno(): end for end in ends}
    for fd in by_fd:
        poller.register(fd, select.POLLIN)
    return [by_fd[fd] for fd, _ in poller.poll(timeout_s * 1000)]


class LauncherLost(Exception):
    """Raised where the launcher process ended while it started a worker."""


class LauncherClient:
    """The caller's end of a launcher process, which all vector envs of a caller share and the last of them ends."""

    _running: ClassVar[dict[tuple[int, str, int], LauncherClient]] = {}
    # Reentrant: garbage collection may close a dropped vector env, and so call `release`, in the middle of `acquire`.
    _lock = threading.RLock()

    @classmethod
    def acquire(cls, method: str, threads: int) -> LauncherClient:
        """The running launcher for this process, start method and thread limit, or a new one."""
        key = (os.getpid(), method, threads)
        with cls._lock:
            client = cls._running.get(key)
            if client is not None:
                client._users += 1  # before it is asked: meanwhile garbage collection may release the last other user
                if client.is_usable():
                    return client
                client._users -= 1
            client = cls._running[key] = cls(key)
            client._users = 1
            return client

    def __init__(self, key: tuple[int, str, int]) -> None:
        self._key = key
        _, method, threads = key
        self._users = 0
        self._in_step = True
        self._request_lock = threading.Lock()
        with contextlib.ExitStack() as theirs_only, contextlib.ExitStack() as ours_on_failure:
            self._control, theirs = socket.socketpair()
            ours_on_failure.enter_context(self._control)
            theirs_only.enter_context(theirs)
            caller = os.pidfd_open(os.getpid())
            theirs_only.callback(os.close, caller)
            fds = (theirs.fileno(), caller)
            self._process = subprocess.Popen(
                python_command(sys.path, "muster.pool.launcher:main", *fds, method == "forkserver"),
                env=worker_environment(threads),
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                process_group=0,
            )
            ours_on_failure.pop_all()
        own(self._control.fileno())

    def is_usable(self) -> bool:
        """Whether this launcher can start workers."""
        return self._in_step and self._process.poll() is None

    def release(self) -> None:
        """Counts one user less; the last one ends the launcher."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
            if self._running.get(self._key) is self:
                del self._running[self._key]
        disown(self._control.fileno())
        # Shut down before it is closed: a forked child of the caller may hold the socket open.
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        self._control.close()
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def start(self, name: str, changes: Mapping[str, str | None], fds: Mapping[str, int]) -> tuple[int, int, int]:
        """Starts a worker on `fds`; returns its pid, its pidfd and the pipe that its exit code will come by.

        name: of its process.  changes: of its environment.
        """
        _, method, threads = self._key
        request = {
            "method": method,
            "name": name,
            "path": sys.path,
            "cwd": _working_directory(),
            "environ": changed(worker_environment(threads), changes),
        }
        body = pickle.dumps(request)
        with contextlib.ExitStack() as ours_on_failure:
            status_read, status_write = os.pipe()
            ours_on_failure.callback(os.close, status_read)
            try:
                pid, pidfd = self._request(body, [*(fds[name] for name in WORKER_FDS), status_write])
            except ConnectionError as error:
                raise LauncherLost from error
            finally:
                os.close(status_write)
            ours_on_failure.pop_all()
        return pid, pidfd, status_read

    def _request(self, body: bytes, fds: Sequence[int]) -> tuple[int, int]:
        """Sends the launcher a request to start a worker on `fds`; returns the worker's pid and pidfd."""
        with self._request_lock:
            # False until the answer is here: after an interrupt the next answer would be that to this request.
            self._in_step = False
            socket.send_fds(self._control, [HEADER.pack(len(body))], fds)
            self._control.sendall(body)
            if not readable([self._control], _ANSWER_S):
                self._process.kill()  # stopped, or stuck: it must not start this worker later, after another one
            answer, pidfds, _, _ = socket.recv_fds(self._control, HEADER.size, 1)
            if len(answer) < HEADER.size:
                raise LauncherLost
            self._in_step = True
        if not pidfds:  # the kernel drops fds above this process's limit; the worker ends as its channel closes
            raise NoFilesLeft(errno.EMFILE, os.strerror(errno.EMFILE))
        return HEADER.unpack(answer)[0], pidfds[0]


@contextlib.contextmanager
def standard_fds() -> Iterator[None]:
    """Occupies fds 0, 1 and 2 where they are closed, so that nothing that is opened meanwhile gets their numbers."""
    held = fill_standard_fds()
    try:
        yield
    finally:
        for fd in held:
            os.close(fd)


def _working_directory() -> str | None:
    """The working directory; None where it has been deleted: a worker then stays in the launcher's."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def worker_environment(threads: int) -> dict[str, str]:
    """The caller's environment, with limits for those native thread pools that the caller did not limit itself."""
    return {**dict.fromkeys(_THREAD_VARIABLES, str(threads)), **os.environ}


def fork_worker(
    run: Callable[[Mapping[str, int]], NoReturn], name: str, changes: Mapping[str, str | None], fds: Mapping[str, int]
) -> tuple[int, int]:
    """Forks the caller; the child calls `run(fds)`, which never returns. Returns the child's pid and pidfd.

    name: of the child's process.  changes: of its environment.
    """
    flush_streams()
    pid = os.fork()
    if pid:
        try:
            return pid, os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
    try:
        os.setpgid(0, 0)
        set_process_name(name)
        apply(changes)
        leave_terminal()
        # No death signal that kills: it comes when the thread that forked ends, and would spare the worker's children.
        set_death_signal(signal.SIGCONT)  # the watchdog cannot run while this process is stopped
        for fd in _own_fds - set(fds.values()):
            os.close(fd)
        _own_fds.clear()
        run(fds)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(1)
