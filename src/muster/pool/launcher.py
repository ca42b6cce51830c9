"""The launcher: a small, single-threaded process that is the parent of a caller's fresh workers.

Why does the caller not fork them itself? A fork of the caller would copy the locks that its threads hold, and its
memory. And a worker could not distinguish the end of the thread that forked it from the end of the caller. The launcher
never runs user code, so its forks are clean. When the caller is gone, by whatever signal, the launcher kills the
workers and ends.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import gc
import importlib
import json
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

from muster._core import set_death_signal, set_process_name
from muster.errors import UsageError
from muster.pool.environment import Surroundings
from muster.pool.notices import say
from muster.pool.worker_process import ignore_user_signals, kill_group, kill_left, kill_with_all

HEADER = struct.Struct("<q")  # the size of a request; and the answer: a pid, or below 0 an errno
# The most fds that come with a request to start a worker: the request, those of the worker, the pipe for its status.
MOST_FDS = 64


class Launcher:
    """The launcher's loop. Requests come over `control`; each worker's exit status goes back over a pipe of its own."""

    def __init__(self, control: socket.socket, caller_pidfd: int) -> None:
        self._control = control
        self._caller_pidfd = caller_pidfd
        self._workers: dict[int, tuple[int, int]] = {}  # by pidfd: pid and status pipe
        self._poller = select.poll()
        self._poller.register(control, select.POLLIN)
        self._poller.register(caller_pidfd, select.POLLIN)

    def run(self) -> NoReturn:
        while True:
            for fd, _ in self._poller.poll():
                if fd in self._workers:
                    self._reap(fd)
                elif fd == self._caller_pidfd or not self._serve():
                    self._end()

    def _serve(self) -> bool:
        """Serves one request; False if there will be no more."""
        with contextlib.suppress(ConnectionError):  # the caller ended meanwhile
            header, fds, _, _ = socket.recv_fds(self._control, HEADER.size, MOST_FDS)
            if len(header) < HEADER.size:
                return False
            (length,) = HEADER.unpack(header)
            try:
                request = pickle.loads(os.pread(fds[0], length, 0)) if fds else {"fds": []}
                if len(fds) <= 1 + len(request["fds"]):  # the kernel drops those above this process's limit
                    raise OSError(errno.EMFILE, "")
                os.close(fds.pop(0))
                os.set_inheritable(fds[-1], False)
                pid = self._start(request, dict(zip(request["fds"], fds, strict=False)), fds[-1])
                pidfd = os.pidfd_open(pid)
            except OSError as error:  # of this worker; the others stay
                for fd in fds:
                    os.close(fd)
                self._control.sendall(HEADER.pack(-(error.errno or errno.EIO)))
                return True
            *worker_fds, status = fds
            self._workers[pidfd] = (pid, status)
            self._poller.register(pidfd, select.POLLIN)
            for fd in worker_fds:
                os.close(fd)
            socket.send_fds(self._control, [HEADER.pack(pid)], [pidfd])
            return True
        return False

    def _start(self, request: dict[str, Any], fds: dict[str, int], status: int) -> int:
        if request["method"] == "spawn":
            around: Surroundings = request["surroundings"]
            process = subprocess.Popen(
                python_command(around.path, f"{__name__}:spawned", fds, request["name"]),
                env=around.environ,
                cwd=around.existing_folder(),
                umask=around.umask,
                pass_fds=list(fds.values()),
                stdin=subprocess.DEVNULL,
                process_group=None if request["is_apart"] else 0,
                start_new_session=request["is_apart"],
            )
            process.returncode = 0  # set, so that Popen does not wait for the process: `_reap` does
            return process.pid
        pid = os.fork()
        if pid == 0:
            self._become_worker(request, fds, status)
        return pid

    def _become_worker(self, request: dict[str, Any], fds: dict[str, int], status: int) -> NoReturn:
        try:
            set_death_signal(signal.SIGKILL)  # this signal also reaches a stopped process
            set_process_name(request["name"])
            lead(is_apart=request["is_apart"])
            for fd in (self._control.detach(), self._caller_pidfd, status, *self._workers):
                os.close(fd)
            for _, pipe in self._workers.values():
                os.close(pipe)
            request["surroundings"].adopt()
            from muster.pool.worker import main

            main(fds)
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(1)

    def _reap(self, pidfd: int) -> None:
        pid, status = self._workers.pop(pidfd)
        self._poller.unregister(pidfd)
        kill_left(pid, pidfd, os.getsid(pid))
        _, raw = os.waitpid(pid, 0)
        with contextlib.suppress(BrokenPipeError):
            os.write(status, str(os.waitstatus_to_exitcode(raw)).encode())
        os.close(status)
        os.close(pidfd)

    def _end(self) -> NoReturn:
        for pid, _ in self._workers.values():
            kill_with_all(pid, os.getsid(pid), partial(os.kill, pid))
            kill_group(pid)
        os._exit(0)


def python_command(path: Sequence[str], entry: str, *arguments: Any) -> list[str]:
    """The command line of a fresh Python that calls `entry`, under this one's ``-O``, ``-X`` and ``-W``.

    path: the new process's ``sys.path``; imports pass over entries that are no str.  entry: ``"module:function"``.
    arguments: the function's, of JSON's types. Raises UsageError where it is not known which program Python is.

    Flags that decide what Python reads when it starts, such as ``-E`` and ``-S``, are left out: the environment and the
    path are passed as they are here. -P is added: a json.py in the working directory must not hide the standard
    library's; and without -P Python 3.13.0 cannot import NumPy where the working directory has been deleted.
    """
    if not sys.executable:
        raise UsageError(
            f"workers run the Python that sys.executable names, which is {sys.executable!r} here, as where a program "
            'embeds Python; set it to the path of a Python that has the same packages, or pass context="fork"'
        )
    flags = ["-O"] * sys.flags.optimize
    flags += [f"-X{name}" if value is True else f"-X{name}={value}" for name, value in sys._xoptions.items()]
    flags += [f"-W{option}" for option in sys.warnoptions]
    module, function = entry.split(":")
    code = (
        "import sys, json; arguments, *sys.path[:] = map(json.loads, sys.argv[1:]); "
        f"from {module} import {function}; {function}(*arguments)"
    )
    entries = [entry for entry in path if isinstance(entry, str)]  # each by itself: one argument has 128 KiB at most
    return [sys.executable, *flags, "-P", "-c", code, *map(json.dumps, (arguments, *entries))]


def lead(*, is_apart: bool) -> None:
    """Gives this process a group; a session only where it is apart, see docs/adr/0001-launcher.md."""
    if is_apart:
        os.setsid()
    else:
        os.setpgid(0, 0)


def leave_terminal() -> None:
    """Gives up the caller's terminal: the kernel stops background processes that use their terminal."""
    with contextlib.suppress(OSError):  # there is none
        terminal = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            fcntl.ioctl(terminal, termios.TIOCNOTTY)
        finally:
            os.close(terminal)


def fill_standard_fds() -> list[int]:
    """Opens /dev/null as stdin, stdout or stderr where those are closed; returns the fds that it has opened."""
    filled = []
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
        filled.append(fd)
    os.close(fd)
    return filled


def spawned(fds: dict[str, int], name: str) -> NoReturn:
    """Runs a spawned worker, from its command line. Its death is tied to the launcher's before any other import."""
    set_death_signal(signal.SIGKILL)
    set_process_name(name)
    from muster.pool.worker import main

    main(fds)


def preload(names: Sequence[str]) -> str:
    """Imports modules that workers need, once for all forks; returns why they must not stay, in words, or ""."""
    for name in names:
        try:
            importlib.import_module(name)
        except BaseException as error:
            return f"{name} cannot be imported there ({type(error).__name__}: {error})"
        if (threads := len(os.listdir("/proc/self/task"))) > 1:
            return f"the import of {name} starts threads ({threads - 1}), which a fork would lose"
    gc.collect()
    gc.freeze()
    return ""


def main(control_fd: int, caller_pidfd: int, preloads: Sequence[str], without: str = "") -> NoReturn:
    """Runs the launcher process, from its command line.

    preloads: modules that it imports before it forks.  without: why it has begun again with fewer of them, to be said.
    """
    set_process_name("muster-launcher")
    # The caller's stdout and stderr may be closed in this process: Python marks files that it opens as not inheritable.
    # The fds that come by the socket must not take their places.
    fill_standard_fds()
    leave_terminal()
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # an ignored signal is inherited from the caller
    ignore_user_signals()
    if reason := preload(preloads):
        own = [name for name in preloads if name.partition(".")[0] == "muster"]
        kept = own if len(own) < len(preloads) else []
        said = without or f"workers start without preloaded modules, each of them imports its own: {reason}"
        arguments = python_command(sys.path, f"{__name__}:main", control_fd, caller_pidfd, kept, said)
        os.execv(arguments[0], arguments)
    if without:
        say(without)
    Launcher(socket.socket(fileno=control_fd), caller_pidfd).run()
