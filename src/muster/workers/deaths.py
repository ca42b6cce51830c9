"""What happened to a worker, in words: what it was doing, how it ended, and what that usually means."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass

from muster._core import EXIT_FDS_CLOSED, Doing, ticks
from muster.errors import WorkerName
from muster.transport.slab import Slab
from muster.workers.resources import CGROUP, read_text

_STARTED = time.monotonic_ns(), ticks()


def seconds_since(moment: int) -> float:
    """Seconds since a moment of the core's clock."""
    now_ns, now = time.monotonic_ns(), ticks()
    per_second = (now - _STARTED[1]) / max(1, now_ns - _STARTED[0]) * 1e9
    return (now - moment) / max(1.0, per_second)


@dataclass(frozen=True)
class Nouns:
    """What a pool's errors call its parts: whoever runs the pool gives it these.

    envs: for each worker those that it stands for, where users count others than the pool.
    first_worker: the index of the first one.  is_env: a worker is named in place of the one env that it steps.
    """

    worker: str = "worker"
    step: str = "step"
    in_step: str = "in step"
    step_timeout: str = "step_timeout"
    pool: str = "the vector env is"
    envs: tuple[range, ...] = ()
    first_worker: int = 0
    is_env: bool = False

    def name(self, host: int, envs: range = range(0)) -> WorkerName:
        """Worker `host` by its name. envs: those that it steps; none where they are not to be told."""
        return WorkerName(self.worker, self.first_worker + host, self.envs[host] if self.envs else envs)

    def env(self, host: int, env: int) -> str:
        """``env 5``, or nothing where that is the worker."""
        return "" if self.is_env else f"env {self.envs[host][env] if self.envs else env}"

    def doing(self, slab: Slab | None, host: int, busy: list[int]) -> str:
        """``in step of env 5 for 3.2 s``. busy: the envs that the worker owes an answer for."""
        if slab is None:
            return "building its envs"
        state = slab.host(host)
        if state["doing"] != Doing.NOTHING:
            words = {Doing.STEPPING: self.in_step, Doing.RESETTING: "in reset", Doing.TALKING: "answering a call"}
            of_env = "" if self.is_env else f" of env {state['env_index']}"
            return f"{words[state['doing']]}{of_env} for {seconds_since(state['since']):.3g} s"
        if busy:
            return f"about to {self.step}" + ("" if self.is_env else f" envs {', '.join(map(str, busy))}")
        return "waiting for the caller"


NOUNS = Nouns()


def likely_cause(exit_code: int | None) -> str:
    """What an exit code usually means, in words."""
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
    counts = dict(line.split() for line in read_text(CGROUP / "memory.events").splitlines())
    return int(counts.get("oom_kill", 0))
