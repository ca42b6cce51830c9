"""The end of a worker in words: the last thing that it did, its exit code, and the usual cause of that."""

from __future__ import annotations

import errno
import signal
from dataclasses import dataclass

from muster._core import EXIT_FDS_CLOSED, EXIT_NO_THREADS
from muster.errors import WorkerName
from muster.pool.resources import CGROUP, limit, read_text


@dataclass(frozen=True)
class Nouns:
    """The names that a pool's errors use for its parts; the owner of the pool chooses them.

    envs: for each worker the envs to name, where the indices that users know are not those of the pool.
    step_timeout, start_timeout: the arguments that limit a step's time and a start's; empty where the user's call has
    none.  limited: is the first one set?
    first_worker: the index of the first worker.
    starting: what the start of all does, in words.  building: what one does that starts.  rebuilding: a sentence about
    one that still rebuilds what was sent to it.  dying: by worker, a sentence about its death.
    """

    worker: str = "worker"
    step_timeout: str = "step_timeout"
    pool: str = "the vector env is"
    envs: tuple[range, ...] = ()
    first_worker: int = 0
    starting: str = "starting worker processes"
    building: str = "building its envs"
    rebuilding: str = ""
    dying: tuple[str, ...] = ()
    start_timeout: str = "start_timeout"
    limited: bool = False

    @property
    def patience(self) -> str:
        """The sentence about a wait that is long."""
        settable = self.step_timeout and not self.limited
        return f" Set {self.step_timeout}= to end waits for envs that hang." if settable else ""

    def start_limit(self, limit_s: float) -> str:
        """The limit of a start, as the user has set it, or may set it."""
        return f"{self.start_timeout}={limit_s}" if self.start_timeout else f"at most {limit_s} s"

    def name(self, host: int, envs: range = range(0)) -> WorkerName:
        """The name of worker `host`. envs: those that it steps; empty where the name leaves them out."""
        return WorkerName(self.worker, self.first_worker + host, self.envs[host] if self.envs else envs)

    def process_name(self, host: int) -> str:
        """The name of worker `host` in lists of processes, such as ``muster-w3``."""
        return f"muster-{self.worker[0]}{self.first_worker + host}"

    def env(self, host: int, env: int) -> str:
        """The words ``env 5``."""
        return f"env {self.envs[host][env] if self.envs else env}"


NOUNS = Nouns()
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)


def is_from_outside(exit_code: int | None) -> bool:
    """True if it was not the process's own code that has ended it."""
    if exit_code is None or exit_code == EXIT_NO_THREADS:
        return True
    return exit_code < 0 and -exit_code not in (*_CRASHES, signal.SIGABRT)


def likely_cause(exit_code: int | None) -> str:
    """The usual cause of an exit code, in words."""
    if exit_code == EXIT_FDS_CLOSED:
        return "the env closed file descriptors that it had not opened (os.closerange and the like)."
    if exit_code == EXIT_NO_THREADS:
        return f"it could start no thread: {limit(errno.EAGAIN)}."
    if exit_code == -signal.SIGXFSZ:
        return "a file has grown beyond the limit of its size (`ulimit -f`)."
    if exit_code == -signal.SIGKILL:
        if _out_of_memory_kills():
            return "out of memory: the kernel has killed a process of this cgroup. Use fewer workers or envs."
        return "something sent SIGKILL: the kernel's out-of-memory killer, a job scheduler, or a person."
    if exit_code is not None and -exit_code in _CRASHES:
        return "a crash in the env's native code; the stack below, if any, shows where Python called it."
    if exit_code == -signal.SIGABRT:
        return "native code gave up (abort, a failed assertion, an uncaught C++ exception)."
    if exit_code is not None and exit_code >= 0:
        return "the env, or a library it uses, ended the process (os._exit, exit in native code)."
    return "something sent that signal from outside."


def _out_of_memory_kills() -> int:
    counts = dict(line.split() for line in read_text(CGROUP / "memory.events").splitlines())
    return int(counts.get("oom_kill", 0))
