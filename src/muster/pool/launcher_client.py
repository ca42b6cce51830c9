"""The start of worker processes: by the launcher (forkserver, spawn) or by forking the caller (fork)."""

from __future__ import annotations

import contextlib
import errno
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

from muster._core import set_death_signal, set_process_name
from muster.pickling.interrupts import Uninterrupted, new_in_child
from muster.pickling.main_module import Init
from muster.pool.environment import Surroundings, changed, changes_of, search_path
from muster.pool.launcher import HEADER, fill_standard_fds, lead, leave_terminal, python_command
from muster.pool.set_up import Processes
from muster.pool.worker import main
from muster.pool.worker_process import close_all_own, disown, flush_streams, own, readable
from muster.transport.big_arrays import memfd
from muster.transport.channel import watched_s

# Environment variables that native libraries read when they are loaded.
_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
# The launcher's first answer takes 0.3 s of imports, later ones only a fork.
_ANSWER_S = 60.0
_INTERRUPTIBLE_S = 0.5


class _Key(NamedTuple):
    """The purpose of a launcher. limits: the variables for thread pools, which a preloaded library has read."""

    pid: int
    method: str
    threads: int
    limits: tuple[str, ...]
    preloads: tuple[str, ...]
    hash_seed: int | None


class LauncherLost(Exception):
    """Raised where the launcher process has ended, or is out of step, and another is needed."""


class LauncherClient:
    """The caller's end of a launcher process, which all vector envs of a caller share and the last of them ends."""

    _running: ClassVar[dict[_Key, LauncherClient]] = {}
    _keepers = 0
    # Reentrant: garbage collection may close a dropped vector env, and so call `release`, in the middle of `acquire`.
    _lock: ClassVar[Any] = new_in_child(threading.RLock())

    @classmethod
    def acquire(
        cls, method: str, threads: int, preloads: Sequence[str], hash_seed: int | None = None
    ) -> LauncherClient:
        """The running launcher for this process, start method, thread limits, modules and hash seed, or a new one.

        preloads: modules that it imports before it forks; no worker is forked from it by "spawn", so none is for that.
        """
        limits = tuple(worker_environment(os.environ, threads)[name] for name in _THREAD_VARIABLES)
        imports = ("muster.pool.worker", *preloads) if method == "forkserver" else ()
        key = _Key(os.getpid(), method, threads, limits, imports, hash_seed)
        with cls._lock:
            client = cls._running.get(key)
            if client is not None:
                client._users += 1  # before it is asked: meanwhile garbage collection may release the last other user
                if client.is_usable():
                    return client
                client.release()
            client = cls._running[key] = cls(key)
            client._users = 1
            return client

    @classmethod
    @contextlib.contextmanager
    def kept(cls) -> Iterator[None]:
        """Keeps the launchers that the last user releases meanwhile, for the next one."""
        with cls._lock:
            cls._keepers += 1
        try:
            yield
        finally:
            with cls._lock:
                cls._keepers -= 1
            for client in [one for key, one in cls._running.items() if key.pid == os.getpid()]:
                client._end_unused()

    def __init__(self, key: _Key) -> None:
        self._key = key
        self._users = 0
        self._in_step = True  # False while the answer to a request is still to come
        self._request_lock = threading.Lock()
        with contextlib.ExitStack() as theirs_only, contextlib.ExitStack() as ours_on_failure:
            self._control, theirs = socket.socketpair()
            ours_on_failure.enter_context(self._control)
            theirs_only.enter_context(theirs)
            caller = os.pidfd_open(os.getpid())
            theirs_only.callback(os.close, caller)
            fds = (theirs.fileno(), caller)
            self._process = subprocess.Popen(
                python_command(search_path(), "muster.pool.launcher:main", *fds, key.preloads),
                env=worker_environment(os.environ, key.threads, key.hash_seed),
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                process_group=0,
            )
            ours_on_failure.pop_all()
        own(self._control.fileno())

    def is_usable(self) -> bool:
        return self._in_step and self._process.poll() is None

    def release(self) -> None:
        """Counts one user less; the last one ends the launcher."""
        with self._lock:
            self._users -= 1
        self._end_unused()

    def _end_unused(self) -> None:
        with self._lock:
            is_current = self._running.get(self._key) is self
            if self._users or (self._keepers and is_current and self.is_usable()):
                return
            if is_current:
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

    def start(
        self, name: str, surroundings: Surroundings, is_apart: bool, fds: Mapping[str, int]
    ) -> tuple[int, int, int]:
        """Starts a worker on `fds`; returns its pid, its pidfd and the pipe that its exit code will come by.

        name: of its process.  is_apart: whether it leads a session.
        """
        request = {
            "method": self._key.method,
            "name": name,
            "fds": list(fds),
            "surroundings": surroundings,
            "is_apart": is_apart,
        }
        body = pickle.dumps(request)
        with contextlib.ExitStack() as ours_on_failure:
            status_read, status_write = os.pipe()
            ours_on_failure.callback(os.close, status_read)
            try:
                pid, pidfd = self._request(body, [*fds.values(), status_write])
            except ConnectionError as error:
                raise LauncherLost from error
            finally:
                os.close(status_write)
            ours_on_failure.pop_all()
        return pid, pidfd, status_read

    def _request(self, body: bytes, fds: Sequence[int]) -> tuple[int, int]:
        """Sends the launcher a request to start a worker on `fds`; returns the worker's pid and pidfd."""
        with self._request_lock:
            if not self._in_step:  # an interrupt has left an answer, which would be taken for that to this request
                raise LauncherLost
            self._in_step = False
            # The body goes as a file: a launcher that is stopped does not read, and a half of it would be in its way.
            with open(memfd("request"), "w+b", buffering=0) as file:
                file.write(body)
                socket.send_fds(self._control, [HEADER.pack(len(body))], [file.fileno(), *fds])
            began = watched_s()
            while not readable([self._control.fileno()], _INTERRUPTIBLE_S):
                Uninterrupted.let_through()  # ends what asks for the worker: only where that is the lesser evil
                if watched_s() - began > _ANSWER_S:
                    self._process.kill()  # stopped, or stuck: it must not start this worker later, after another one
            answer, pidfds, _, _ = socket.recv_fds(self._control, HEADER.size, 1)
            if len(answer) < HEADER.size:
                raise LauncherLost
            self._in_step = True
        (pid,) = HEADER.unpack(answer)
        if not pidfds:  # the kernel drops fds above this process's limit; the worker ends as its channel closes
            number = -pid if pid < 0 else errno.EMFILE
            raise OSError(number, os.strerror(number))
        return pid, pidfds[0]


class LauncherOfPool:
    """The launcher that one pool uses, and those that come after it where it ends."""

    def __init__(self, ways: Processes) -> None:
        self._ways = ways
        self._client = self._acquired(ways.preloads)

    def start(self, *worker: Any) -> tuple[int, int, int]:
        """As `LauncherClient.start`, by another launcher where that has ended; at last by one without preloads."""
        own = [name for name in self._ways.preloads if name.startswith("muster.")]  # the others may have ended it
        for preloads in (self._ways.preloads, own):
            try:
                return self._client.start(*worker)
            except LauncherLost:
                self._client.release()
                self._client = self._acquired(preloads)
        return self._client.start(*worker)

    def release(self) -> None:
        """Counts one user less, see `LauncherClient.release`."""
        self._client.release()

    def _acquired(self, preloads: Sequence[str]) -> LauncherClient:
        with standard_fds():
            return LauncherClient.acquire(self._ways.context, self._ways.threads, preloads, self._ways.hash_seed)


@contextlib.contextmanager
def standard_fds() -> Iterator[None]:
    """Occupies fds 0, 1 and 2 where they are closed, so that nothing that is opened meanwhile gets their numbers."""
    held = fill_standard_fds()
    try:
        yield
    finally:
        for fd in held:
            os.close(fd)


def surroundings_of(options: Processes, count: int) -> list[Surroundings]:
    """The surroundings in which each worker starts. Raises ConfigError."""
    around = Surroundings.here()
    forks = options.context == "fork"
    environ = around.environ if forks else worker_environment(around.environ, options.threads, options.hash_seed)
    return [replace(around, environ=changed(environ, changes)) for changes in changes_of(options.worker_env, count)]


def worker_environment(environ: Mapping[str, str], threads: int, hash_seed: int | None = None) -> dict[str, str]:
    """The caller's environment, with limits for those native thread pools that the caller did not limit itself.

    hash_seed: PYTHONHASHSEED; None for the caller's.
    """
    seed = {} if hash_seed is None else {"PYTHONHASHSEED": str(hash_seed)}
    return {**dict.fromkeys(_THREAD_VARIABLES, str(threads)), **environ, **seed}


def fork_worker(
    inherited: tuple[Any, Init | None], name: str, surroundings: Surroundings, is_apart: bool, fds: Mapping[str, int]
) -> tuple[int, int, None]:
    """Forks the caller into a worker, which inherits its plan and `worker_init`. Returns what `launch` expects.

    name: of the child's process.  is_apart: whether it leads a session.
    """
    flush_streams()
    pid = os.fork()
    if pid:
        try:
            return pid, os.pidfd_open(pid), None
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
    try:
        lead(is_apart=is_apart)
        set_process_name(name)
        surroundings.adopt()
        leave_terminal()
        # No death signal that kills: it comes when the thread that forked ends, and would spare the worker's children.
        set_death_signal(signal.SIGCONT)  # the watchdog cannot run while this process is stopped
        close_all_own(spared=fds.values())
        # The worker closes these two, which may be those of its streams.
        main({**fds, "stdout": os.dup(fds["stdout"]), "stderr": os.dup(fds["stderr"])}, inherited)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(1)
