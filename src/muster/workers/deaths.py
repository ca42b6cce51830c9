"""What happened to a worker, in words: what it was doing, how it ended, and what that usually means."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from muster._core import EXIT_FDS_CLOSED, Doing, ticks
from muster.transport.slab import Slab

_DOING = {Doing.STEPPING: "in step", Doing.RESETTING: "in reset", Doing.TALKING: "answering a call"}
_STARTED = time.monotonic_ns(), ticks()


def seconds_since(moment: int) -> float:
    """Seconds since a moment of the core's clock."""
    now_ns, now = time.monotonic_ns(), ticks()
    per_second = (now - _STARTED[1]) / max(1, now_ns - _STARTED[0]) * 1e9
    return (now - moment) / max(1.0, per_second)


def describe_doing(slab: Slab | None, line: int, busy: list[int]) -> str:
    """``in step of env 5 for 3.2 s``. busy: the envs that it owes an answer for."""
    if slab is None:
        return "building its envs"
    state = slab.line(line)
    if state["doing"] != Doing.NOTHING:
        return f"{_DOING[state['doing']]} of env {state['env_index']} for {seconds_since(state['since']):.3g} s"
    if busy:
        return f"about to step envs {', '.join(map(str, busy))}"
    return "waiting for the caller"


def name_envs(envs: range) -> str:
    """``env 3`` or ``envs 4 to 7``."""
    return f"env {envs[0]}" if len(envs) == 1 else f"envs {envs[0]} to {envs[-1]}"


def explain_death(line: int, envs: range, exit_code: int | None, doing: str, tail: str) -> str:
    """The whole message of WorkerDied."""
    lines = [f"worker {line} ({name_envs(envs)}) died: {_how(exit_code)}. It was {doing}."]
    lines.append(f"Likely cause: {_cause(exit_code)}")
    if tail:
        lines += ["The last lines of its stderr:", tail]
    return "\n".join(lines)


def _how(exit_code: int | None) -> str:
    if exit_code is None:
        return "its exit code is unknown, the launcher process was lost or the caller has reaped it"
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"


def _cause(exit_code: int | None) -> str:
    if exit_code == EXIT_FDS_CLOSED:
        return "the env closed file descriptors that it had not opened (os.closerange and the like)."
    if exit_code == -signal.SIGKILL:
        if _out_of_memory_kills():
            return "out of memory: the kernel has killed a process of this cgroup. Use fewer workers or envs."
        return "something sent SIGKILL: the kernel's out-of-memory killer, a job scheduler, or a person."
    if exit_code in (-signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL, -signal.SIGFPE):
        return "a crash in the env's native code; the stack below, if any, shows where Python called it."
    if exit_code == -signal.SIGABRT:
        return "native code gave up (abort, a failed assertion, an uncaught C++ exception)."
    if exit_code is not None and exit_code >= 0:
        return "the env, or a library it uses, ended the process (os._exit, exit in native code)."
    return "something sent that signal from outside."


def _out_of_memory_kills() -> int:
    try:
        text = Path("/sys/fs/cgroup/memory.events").read_text()
    except OSError:
        return 0
    counts = dict(line.split() for line in text.splitlines())
    return int(counts.get("oom_kill", 0))
