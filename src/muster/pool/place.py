"""The caller's handle of one worker process, and how that process is started."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from muster.errors import WorkerDied, WorkerName, WorkerTimeout
from muster.pickling import UserCall
from muster.pickling.main_module import Init
from muster.pool.deaths import NOUNS, Nouns, is_from_outside, likely_cause
from muster.pool.launcher_client import WorkerProcess, close_own, disown, fork_worker, own, stream_fd
from muster.pool.usage import Usage
from muster.pool.worker import STACK_SIGNAL, main
from muster.recipes.recipe import Recipe
from muster.transport.channel import Channel
from muster.transport.slab import memfd

# A worker's pid and pidfd, and the pipe that its exit code will come by; None where it is a child of this process.
Started = tuple[int, int, int | None]

_STACK_S = 0.5


@dataclass
class WorkerHandle:
    """The caller's view of one worker: its process, its channel, and its state while it starts or is watched."""

    index: int
    envs: range
    process: WorkerProcess
    channel: Channel
    seen: tuple[int, ...] = ()  # the worker's state after its last change; `seen_at` is the time of that
    seen_at: float = 0.0
    # A replacement starts while the caller continues: its deadline, the reason for it, and the messages that wait.
    starting_until: float | None = None
    replaces: str = ""
    outbox: list[bytes] = field(default_factory=list)
    hint: str = ""  # explains the worker's stack, while the worker rebuilds what was sent to it
    nouns: Nouns = NOUNS
    ready_at: float = 0.0  # the time at which a replacement had started
    launched_at: float = field(default_factory=time.monotonic)
    apart: str = ""  # the sentence of `advise_apart`
    usage_at_start: Usage = field(default_factory=Usage)  # of its process, once it was ready to step

    @property
    def building(self) -> str:
        """The activity, in words, of a worker that is still starting."""
        return f"building its envs for {time.monotonic() - self.launched_at:.3g} s"

    @property
    def name(self) -> WorkerName:
        return self.nouns.name(self.index, self.envs)

    def died(self, doing: str) -> WorkerDied:
        """The error that reports the worker's death. doing: its last activity, in words."""
        self.process.wait(1.0)
        exit_code = self.process.exit_code
        hint = "" if is_from_outside(exit_code) else self.apart
        return WorkerDied(self.name, doing, exit_code, likely_cause(exit_code), self.process.tail(), hint=hint)

    def timed_out(self, doing: str, limit: str, elapsed_s: float) -> WorkerTimeout:
        """The error that reports that the worker hangs, with its Python stack. Does not kill the worker."""
        return WorkerTimeout(self.name, doing, limit, elapsed_s, python_stack(self.process), self.hint)

    def slow_to_start(self, limit_s: float) -> str:
        """The warning, with the Python stack, that the worker is still starting. limit_s: the time that it has."""
        return (
            f"{self.name} has been {self.building}, and may go on until start_timeout={limit_s}.{self.hint}\n"
            f"Its Python stack:\n{python_stack(self.process)}"
        )

    def retire(self) -> None:
        """Kills the worker, and closes the fds that this process holds for it."""
        self.process.kill()
        self.process.wait(5.0)
        if (fd := self.channel.fileno()) >= 0:
            disown(fd)
            self.channel.close()
        self.process.release()


def unpacks_hint(call: UserCall) -> str:
    """The explanation of a stack of a worker that still rebuilds what was sent to it."""
    return (
        f"\nIt has not come further than to rebuild {call.sent()} that were sent to it; the first line of the stack is "
        "in the object that hangs.\nBuild that in the worker instead:\n"
        f"    {call.lazily()}"
    )


def launch_worker(
    host: int,
    envs: range,
    shared_fds: Mapping[str, int],
    start: Callable[[Mapping[str, int]], Started],
    *,
    watch: Callable[[], None],
    shares_main: bool,
    nouns: Nouns,
) -> WorkerHandle:
    """Starts a worker by `start`, which receives the fds of `launcher.WORKER_FDS`.

    watch, shares_main: see `Channel`, `mail.dumps`.
    """
    with contextlib.ExitStack() as theirs_only, contextlib.ExitStack() as ours_on_failure:
        ours, theirs = socket.socketpair()
        own(ours.fileno())
        ours_on_failure.callback(lambda: close_own(ours.detach()))
        theirs_only.enter_context(theirs)
        stderr_read, stderr_write = os.pipe()
        ours_on_failure.callback(os.close, stderr_read)
        theirs_only.callback(os.close, stderr_write)
        tail = memfd(f"tail-{host}")
        ours_on_failure.callback(os.close, tail)
        caller = os.pidfd_open(os.getpid())
        theirs_only.callback(os.close, caller)
        pid, pidfd, status = start(
            {
                **shared_fds,
                "channel": theirs.fileno(),
                "tail": tail,
                "stderr_read": stderr_read,
                "stderr_write": stderr_write,
                "stdout": stream_fd(sys.__stdout__, 1),
                "stderr": stream_fd(sys.__stderr__, 2),
                "caller": caller,
            }
        )
        ours_on_failure.pop_all()
    process = WorkerProcess(pid, pidfd, status, tail, stderr_read)
    return WorkerHandle(host, envs, process, Channel(ours, watch, shares_main=shares_main), nouns=nouns)


def fork_worker_for(
    recipes: Sequence[Recipe], init: Init | None, name: str, changes: Mapping[str, str | None], fds: Mapping[str, int]
) -> Started:
    """Forks the caller into a worker, which inherits `recipes` and `init`. name, changes: see `fork_worker`."""
    with contextlib.ExitStack() as theirs:
        copies = {}
        for key, fd in fds.items():
            copies[key] = os.dup(fd)
            theirs.callback(os.close, copies[key])
        pid, pidfd = fork_worker(lambda fds: main(fds, recipes, init), name, changes, copies)
    return pid, pidfd, None


def python_stack(process: WorkerProcess) -> str:
    """The Python stack of a worker that hangs, as faulthandler reports it."""
    return python_stacks([process])[0]


def python_stacks(processes: Sequence[WorkerProcess]) -> list[str]:
    """The Python stacks of workers that hang, in the time that one takes."""
    if not processes:
        return []
    before = [process.tail_size() for process in processes]
    for process in processes:
        process.send_signal(STACK_SIGNAL)
    deadline = time.monotonic() + _STACK_S
    while time.monotonic() < deadline and any(map(_is_owing, processes, before)):
        time.sleep(0.01)
    time.sleep(0.05)  # the report is written line by line
    none = "(none: the process does not react to signals; it may be stopped or in the kernel)"
    return [none if _is_silent(*one) else one[0].tail() or none for one in zip(processes, before, strict=True)]


def _is_owing(process: WorkerProcess, tail_size: int) -> bool:
    return _is_silent(process, tail_size) and not process.has_ended()


def _is_silent(process: WorkerProcess, tail_size: int) -> bool:
    return process.tail_size() == tail_size


def name_workers(workers: Sequence[WorkerHandle]) -> str:
    """The beginning of a sentence: ``worker 1 has`` or ``workers 0, 2 have``."""
    names = ", ".join(str(worker.index) for worker in workers)
    return f"worker {names} has" if len(workers) == 1 else f"workers {names} have"
