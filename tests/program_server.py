"""A process that has imported what programs import, and forks for each program that a test runs.

programs.py starts it as ``python -P program_server.py FD MODULE...``. A question is a `Request` as JSON, in a file in
memory, with the program's stdin, stdout and stderr. The answer is the pid of the fork. Its parent is by then whoever
adopts orphans above this process.
"""

from __future__ import annotations

import builtins
import gc
import importlib
import io
import json
import multiprocessing.process
import os
import signal
import socket
import struct
import sys
import time
import types
import warnings
from dataclasses import dataclass
from importlib.machinery import BuiltinImporter, SourceFileLoader
from typing import Any

_OF_PYTHON = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGPIPE: signal.SIG_IGN,
    signal.SIGXFSZ: signal.SIG_IGN,
}
PID = struct.Struct("q")


@dataclass(frozen=True)
class Request:
    """A program, and the things that a process has from the one that starts it.

    argv: ``sys.argv``.  code: what follows ``-c``; None where ``argv[0]`` is a file.  warn: the options of ``-W``.
    own_folder: whether the program's folder is the first of ``sys.path``.
    """

    argv: list[str]
    code: str | None
    warn: list[str]
    own_folder: bool
    cwd: str
    environ: dict[str, str]


def main() -> None:
    """Serves and, in each fork, runs the program. What a program raises passes through, and ends its process."""
    filters = len(warnings.filters)
    control = socket.socket(fileno=int(sys.argv[1]))
    for name in sys.argv[2:]:
        importlib.import_module(name)
    assert len(os.listdir("/proc/self/task")) == 1, "a fork of a process with threads has locks that nobody opens"
    path = list(sys.path)
    gc.collect()
    gc.freeze()
    request = serve(control)
    take_over(request, path, filters)
    program = new_main(request)
    if request.code is None:
        with open(request.argv[0], "rb") as file:
            code = compile(file.read(), str(program.__file__), "exec", dont_inherit=True)
    else:
        code = compile(request.code, "<string>", "exec", dont_inherit=True)
    sys.excepthook = lambda kind, error, trace: sys.__excepthook__(kind, error.with_traceback(below(trace)), None)
    exec(code, vars(program))


def serve(control: socket.socket) -> Request:
    """Forks for each request. Returns it in the fork, whose fds 0 to 2 are the program's."""
    while True:
        _, fds, _, _ = socket.recv_fds(control, 1, 4)
        if not fds:  # the tests have ended
            os._exit(0)
        reads, writes = os.pipe()
        if (between := os.fork()) == 0:
            between = os.getpid()
            if (pid := os.fork()) != 0:
                os.write(writes, PID.pack(pid))
                os._exit(0)
            while os.getppid() == between:
                time.sleep(0.0005)
            os.setsid()
            for number, fd in enumerate(fds[:3]):
                os.dup2(fd, number)
            with open(fds[3]) as file:
                request = Request(**json.load(file))
            for fd in (control.detach(), reads, writes, *fds[:3]):
                os.close(fd)
            return request
        for fd in (writes, *fds):
            os.close(fd)
        os.waitpid(between, 0)  # now its child has been adopted
        control.send(os.read(reads, PID.size))
        os.close(reads)


def take_over(request: Request, path: list[str], filters: int) -> None:
    """Gives this process the settings that a new one starts with.

    path: ``sys.path`` without a program's own part.  filters: the number of warning filters before all imports.
    """
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, _OF_PYTHON.get(number, signal.SIG_DFL))
    open_streams()
    os.environ.clear()
    os.environ.update(request.environ)
    os.chdir(request.cwd)
    multiprocessing.process.ORIGINAL_DIR = request.cwd  # type: ignore[attr-defined]
    sys.argv[:] = request.argv
    folder = "" if request.code is not None else os.path.dirname(os.path.abspath(request.argv[0]))
    given = filter(None, request.environ.get("PYTHONPATH", "").split(os.pathsep))
    sys.path[:] = [*[folder] * request.own_folder, *given, *path]
    for option in request.warn:
        sys.warnoptions.append(option)
        action, message, category, module = (*option.split(":"), "", "", "")[:4]
        warnings.filterwarnings(action, message, getattr(builtins, category or "Warning"), module)  # type: ignore[arg-type]
        # Behind those of the modules: a new process has its options before it imports any.
        given_by_option: Any = warnings.filters
        given_by_option.insert(len(given_by_option) - 1 - filters, given_by_option.pop(0))
        filters += 1


def open_streams() -> None:
    """Makes the three streams anew. Those of this process remember what their fds once were."""
    for fd, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        old: Any = getattr(sys, name)
        binary = open(fd, f"{mode}b", closefd=False)  # noqa: SIM115
        binary.raw.name = f"<{name}>"
        how: dict[str, Any] = {"encoding": old.encoding, "errors": old.errors, "newline": "\n" if fd else None}
        stream: Any = io.TextIOWrapper(binary, line_buffering=fd == 2 or os.isatty(fd), **how)
        stream.mode = mode
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def new_main(request: Request) -> types.ModuleType:
    """The module `__main__` of the program, as Python makes it."""
    module: Any = types.ModuleType("__main__")
    vars(module).update({name: {} for name in ("__annotations__",) if name in globals()})  # not in every Python
    module.__builtins__ = builtins
    module.__loader__ = BuiltinImporter
    if request.code is None:
        module.__file__, module.__cached__ = os.path.abspath(request.argv[0]), None
        module.__loader__ = SourceFileLoader("__main__", module.__file__)
    sys.modules["__main__"] = module
    return module


def below(trace: types.TracebackType | None) -> types.TracebackType | None:
    """The traceback without this file's frames."""
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    main()
