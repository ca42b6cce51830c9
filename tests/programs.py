"""Python programs that tests run: each a process in a session of its own, with default signal handlers.

`run` and `start` take the words that would follow ``python`` in a shell: a file, or ``-c`` and code, then arguments.
The process is a fork of one that has imported NumPy, Gymnasium, Muster, and the modules of `imports`: it starts in
milliseconds. Tests of an interpreter's start or of imports, and Python's options but ``-P`` and ``-W``, take
``fresh=True``. Whatever a test leaves running is killed after it (`end_all`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from processes import adopts_orphans, descendants, named_fd, stat_of
from program_server import PID, Request

ALWAYS = ("numpy", "gymnasium", "gymnasium.vector", "muster", "muster.vector.make")
TORCH = ("torch", "tensordict")
TORCHRL = (*TORCH, "torchrl", "torchrl.envs", "torchrl.collectors")  # sets multiprocessing's start method to spawn
SB3 = (*TORCH, "stable_baselines3")

_SERVER = Path(__file__).with_name("program_server.py")
_started: list[Program] = []
_servers: dict[tuple[str, ...], _Server] = {}


def run(*words: Any, input: str | None = None, timeout: float = 100.0, check: bool = False, **options: Any) -> Any:
    """The `subprocess.CompletedProcess` of a program. check: its status has to be 0. options: those of `start`."""
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with start(*words, **options) as program:
        out, err = program.communicate(input, timeout)
    assert not check or program.returncode == 0, err
    return subprocess.CompletedProcess(program.args, program.returncode, out, err)


def start(*words: Any, fresh: bool = False, imports: tuple[str, ...] = (), **options: Any) -> Program:
    """A program that runs. Its stdin is empty, stdout and stderr are pipes of text. options: others, of `Popen`."""
    environ = dict(os.environ) if options.get("env") is None else options["env"]
    # Output comes as from a new shell: where it is unbuffered, the parts of two lines get mixed.
    options["env"] = {name: value for name, value in environ.items() if name != "PYTHONUNBUFFERED"}
    given = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    kind = Program if fresh or not adopts_orphans() else functools.partial(ForkedProgram, imports)
    program = kind([sys.executable, *map(os.fspath, words)], start_new_session=True, **{**given, **options})
    _started.append(program)
    return program


def servers() -> dict[int, str]:
    """The pids of the servers, and the fds by which this process speaks to them."""
    return {server.process.pid: named_fd(server.control.fileno()) for server in _servers.values()}


def end_all() -> None:
    """Kills what is left of the programs that have been started, and of their sessions."""
    while _started:
        _started.pop().end()


class Program(subprocess.Popen[str]):
    """A process that is ended with all that it has started when its block is left by an exception."""

    def end(self) -> None:
        for pid in {self.pid, *descendants(self.pid).values(), *_session(self.pid)}:
            if pid != self.pid or self.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.wait()
        for file in (self.stdin, self.stdout, self.stderr):
            if file is not None:
                file.close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.end()
        super().__exit__(kind, error, trace)


class ForkedProgram(Program):
    """A program whose process comes from a server. All else is Popen's: pipes, waiting, signals."""

    def __init__(self, imports: tuple[str, ...], *args: Any, **options: Any) -> None:
        self._imports = imports
        super().__init__(*args, **options)

    def _execute_child(self, *args: Any) -> None:
        """Makes the process once Popen has made the pipes."""
        given = inspect.signature(super()._execute_child).bind(*args).arguments  # type: ignore[misc]
        request = _request(given["args"][1:], given["cwd"], given["env"])
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        stdin, _, _, stdout, _, stderr = fds = [given[name] for name in pipes]
        try:
            self.pid = _server_with(self._imports).fork(request, [stdin, stdout, stderr])
            self._child_created = True
        finally:
            self._close_pipe_fds(*fds)  # type: ignore[attr-defined]


class _Server:
    """A process of program_server.py. It ends with this one."""

    def __init__(self, imports: tuple[str, ...]) -> None:
        self.control, theirs = socket.socketpair()
        with theirs:
            words = ["-P", _SERVER, str(theirs.fileno()), *ALWAYS, *imports]
            # NumPy's threads would be there before the first fork.
            environ = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
            environ.pop("PYTHONUNBUFFERED", None)
            self.process = subprocess.Popen(
                [sys.executable, *words], pass_fds=[theirs.fileno()], env=environ, start_new_session=True, cwd="/"
            )

    def fork(self, request: Request, fds: list[int]) -> int:
        file = os.memfd_create("request")
        os.write(file, json.dumps(asdict(request)).encode())
        os.lseek(file, 0, os.SEEK_SET)
        socket.send_fds(self.control, [b"?"], [*fds, file])
        os.close(file)
        (pid,) = PID.unpack(self.control.recv(PID.size))
        return int(pid)


def _server_with(imports: tuple[str, ...]) -> _Server:
    if imports not in _servers:
        _servers[imports] = _Server(imports)
    return _servers[imports]


def _request(words: list[str], cwd: Any, environ: dict[str, str]) -> Request:
    code, warn, own_folder = None, [], True
    while words[0].startswith("-"):
        option, *words = words
        if option == "-P":
            own_folder = False
        elif option == "-W":
            warn.append(words.pop(0))
        elif option == "-c":
            code, words = words[0], ["-c", *words[1:]]
            break
        else:
            raise ValueError(f"a program with the option {option} needs fresh=True")
    for name in (environ.keys() | os.environ.keys()) - {"PYTHONPATH", "PYTHONUNBUFFERED"}:
        if name.startswith("PYTHON") and environ.get(name) != os.environ.get(name):
            raise ValueError(f"a program with another {name} needs fresh=True")
    return Request(list(words), code, warn, own_folder, os.fspath(cwd or os.getcwd()), environ)


def _session(pid: int) -> set[int]:
    pids = {int(entry) for entry in os.listdir("/proc") if entry.isdigit()}
    return {one for one in pids if stat_of(one)[3:4] == [str(pid)]}
