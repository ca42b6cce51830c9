"""Runs a trial in a process of its own, which a crash, a hang or an exit in the env may end."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import IO, Any

from muster._core import EXIT_FDS_CLOSED
from muster.hosts.trial_process import main
from muster.pickling.main_module import Init
from muster.pool.environment import Changes, apply, changed
from muster.pool.inherit_in_caller import with_tracker
from muster.pool.inherit_in_worker import after_fork
from muster.pool.killing import kill_with_all
from muster.pool.launcher import python_command
from muster.pool.launcher_client import worker_environment
from muster.pool.set_up import SetUp
from muster.pool.worker_process import flush_streams
from muster.recipes.recipe import Recipe, pack

STARTING = "starting Python"
"""The stage in which no code of the trial has run yet."""

_STDERR_LINES = 12
_ABORT_S = 2.0


@dataclass(frozen=True)
class Problem:
    """A failure in words: of a worker that was started, or of a trial."""

    text: str

    @property
    def headline(self) -> str:
        """The first line of the text."""
        return self.text.split("\n", 1)[0]


@dataclass
class TrialOutcome:
    """The results that a trial has reported. stage: the one in which it ended early, None if it came to its end.

    how: the early end in words: an exception, a signal, an exit code or a hang.  hung: whether it was a hang.
    detail: the traceback, or the last lines of the trial's stderr with its Python stack.
    """

    results: dict[str, Any] = field(default_factory=dict)
    stage: str | None = None
    how: str = ""
    hung: bool = False
    detail: str = ""

    @property
    def problem(self) -> Problem:
        """The early end."""
        return Problem(f"{self.stage}, it {self.how}")


@dataclass(frozen=True)
class TrialConditions:
    """What a trial's process has of the caller's. changes: of its environment.

    set_up: what it sets up first, where the recipes are packed.  init: `worker_init`, where they are not.
    """

    changes: Changes = field(default_factory=dict)
    set_up: SetUp | None = None
    init: Init | None = None


@dataclass(frozen=True)
class PackedRecipes:
    """Recipes for the process of a trial. They share nothing with this process: ask `shared_by` before a trial."""

    data: bytes

    @classmethod
    def of(cls, recipes: Sequence[Recipe], start_method: str, init: Init | None = None) -> PackedRecipes:
        """What `pack` packs, with its warnings and errors."""
        return cls(pack(recipes, start_method=start_method, fds=[], init=init))  # fds are for what is shared


def run_guarded(
    trial: Callable[..., None],
    recipes: PackedRecipes | Sequence[Recipe] | None,
    *,
    stage_timeout_s: float,
    options: dict[str, Any],
    hash_seed: int | None = None,
    conditions: TrialConditions | None = None,
) -> TrialOutcome:
    """Calls ``trial(*recipes, reporter, **options)`` in a new process, and returns its outcome.

    trial: a function of a module, with options that JSON knows.  recipes: None where the trial takes none; recipes that
    are not packed cannot be sent: then the trial runs in a fork of this process.  stage_timeout_s: limit for each stage
    of the trial, and for each row that it plays.
    """
    conditions = conditions or TrialConditions()
    read, write = os.pipe()
    guard = os.pidfd_open(os.getpid())
    name = f"{trial.__module__}:{trial.__name__}"
    environment = changed(worker_environment(1), conditions.changes)
    if hash_seed is not None:
        environment["PYTHONHASHSEED"] = str(hash_seed)
    with (
        os.fdopen(os.memfd_create("muster-recipe"), "w+b") as packed,
        tempfile.TemporaryFile() as stderr,
        os.fdopen(read, "rb", 0) as reports,
    ):
        try:
            process: _Process
            if recipes is None or isinstance(recipes, PackedRecipes):
                fds: list[int] = []
                if recipes is not None:
                    inherited, fds = with_tracker(())
                    pickle.dump((inherited, conditions.set_up, recipes.data), packed)
                    packed.seek(0)
                arguments = (name, write, guard, options, recipes is not None, fds)
                process = subprocess.Popen(
                    python_command(sys.path, "muster.hosts.trial_process:main", *arguments),
                    env=environment,
                    pass_fds=(write, guard, *fds),
                    stdin=packed,
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    start_new_session=True,
                )
            else:
                own = (recipes, conditions.init)
                process = _Fork(
                    conditions.changes, name, write, guard, options, False, (), *own, stderr=stderr.fileno()
                )
        finally:
            os.close(write)
            os.close(guard)
        try:
            return _listen(process, reports, stderr, stage_timeout_s)
        finally:
            _end(process)


class _Fork:
    """A trial in a fork of this process, with the part of `Popen`'s interface that is needed here."""

    def __init__(self, changes: Changes, *arguments: Any, stderr: int) -> None:
        flush_streams()
        with warnings.catch_warnings():
            # Python warns of other threads: locks that they hold stay held in the fork. A trial that needs one of these
            # locks hangs, and is ended.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pid = os.fork()
        if self.pid:
            return
        try:
            os.setsid()
            after_fork()
            apply(changes)
            null = os.open(os.devnull, os.O_RDWR)
            for fd, target in enumerate((null, null, stderr)):
                os.dup2(target, fd)
            main(*arguments)
        finally:
            os._exit(1)

    def wait(self) -> None:
        with contextlib.suppress(ChildProcessError):  # where the caller ignores SIGCHLD
            os.waitpid(self.pid, 0)


_Process = subprocess.Popen[bytes] | _Fork


def _listen(process: _Process, reports: IO[bytes], stderr: IO[bytes], stage_timeout_s: float) -> TrialOutcome:
    outcome = TrialOutcome(stage=STARTING)
    deadline = time.monotonic() + stage_timeout_s
    buffer = b""
    while True:
        if not _readable(reports, deadline - time.monotonic()):
            outcome.hung = True
            outcome.how = f"hung for {stage_timeout_s:g} s"
            # The fault handler answers with the Python stack, also out of a native call that holds the GIL.
            _signal(process, signal.SIGABRT)
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                _wait(process, _ABORT_S)
            break
        chunk = os.read(reports.fileno(), 1 << 16)
        if not chunk:
            break
        *lines, buffer = (buffer + chunk).split(b"\n")
        for line in lines:
            if _take(outcome, json.loads(line)):
                deadline = time.monotonic() + stage_timeout_s
        if outcome.stage is None:
            break  # without waiting for the pipe to close: a process that the env forked may hold it
    if outcome.stage is not None and not outcome.how:
        outcome.how = _how_ended(process)
    if outcome.stage is not None and not outcome.detail:
        stderr.seek(0)
        # The fault handler ends its report with a list of all extension modules.
        said = stderr.read().decode(errors="replace").partition("\n\nExtension modules:")[0]
        outcome.detail = "\n".join(said.splitlines()[-_STDERR_LINES:])
    return outcome


def _take(outcome: TrialOutcome, message: list[Any]) -> bool:
    """Records one message of the trial; returns whether it shows that the trial makes progress."""
    kind, *rest = message
    if kind == "result":
        outcome.results[rest[0]] = rest[1]
    elif kind == "append":
        outcome.results.setdefault(rest[0], []).append(rest[1])
    elif kind == "raised":
        outcome.how, outcome.detail = rest
    elif kind == "stage":
        outcome.stage = rest[0]
    return kind in ("stage", "alive", "append")


def _readable(file: IO[bytes] | int, timeout_s: float) -> bool:
    poller = select.poll()
    poller.register(file, select.POLLIN)
    return bool(poller.poll(max(0.0, timeout_s) * 1000))


def _wait(process: _Process, timeout_s: float) -> os.waitid_result | None:
    """The way `process` has ended; None if it still runs. It is not reaped: a zombie keeps its process id.

    Raises ProcessLookupError or ChildProcessError where the caller ignores SIGCHLD: no exit status is kept then.
    """
    pidfd = os.pidfd_open(process.pid)
    try:
        _readable(pidfd, timeout_s)
        return os.waitid(os.P_PIDFD, pidfd, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    finally:
        os.close(pidfd)


def _end(process: _Process) -> None:
    """Kills `process` and everything in its session, and reaps it."""
    kill_with_all(process.pid, process.pid, partial(_signal, process))
    process.wait()


def _signal(process: _Process, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, number)  # Popen's own `send_signal` would reap it


def _how_ended(process: _Process) -> str:
    try:
        ended = _wait(process, _ABORT_S)
    except (ProcessLookupError, ChildProcessError):
        return "ended the process, nobody knows how, since SIGCHLD is ignored here"
    if ended is None:
        return "closed the pipe for its results and went on"
    if ended.si_code != os.CLD_EXITED:
        try:
            return f"was killed by {signal.Signals(ended.si_status).name}"
        except ValueError:
            return f"was killed by signal {ended.si_status}"
    if ended.si_status == EXIT_FDS_CLOSED:
        return "closed file descriptors that it had not opened (os.closerange and the like)"
    return f"ended the process (exit code {ended.si_status})"
