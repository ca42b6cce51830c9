"""Every exception that Muster raises, in one tree. In brackets the builtin class that users may already catch::

    MusterError
    ├── RecipeError (ValueError)        the arguments do not describe an env
    ├── ConfigError (ValueError)        an option's value makes no sense
    │   └── RunConfigError (UsageError)   the config.json of a run folder holds what no run has
    ├── WrongType (TypeError)           an argument is of the wrong kind
    │   └── NotBuilt (AttributeError)   a muster.lazy was used before it was built
    ├── ActionError (ValueError)        actions that do not fit; nothing was sent
    ├── CannotTravel (TypeError)        an object cannot be sent to the process that needs it
    ├── UsageError (RuntimeError)       a call that makes no sense now
    │   ├── ClosedError                 after close
    │   ├── PendingError                while another call is pending
    │   └── NotPendingError             with nothing to wait for
    ├── EnvError (RuntimeError)         an env raised
    │   └── SpecMismatch (ValueError)   an array or a space is not as promised
    ├── ReplayDiffers (RuntimeError)    an env did not come to a state again
    ├── WorkerError (RuntimeError)      a worker is lost
    │   ├── WorkerDied                  its process or thread ended
    │   ├── WorkerTimeout (TimeoutError)  it hung
    │   ├── CollectorError              a collector raised, not its envs
    │   └── NodeLost                    a node with several collectors is gone
    ├── WaitTimeout (TimeoutError)      a wait's own timeout ran out; nothing is lost
    ├── OneEnvPerProcess (RuntimeError)
    ├── NotEnoughMemory (MemoryError)
    ├── LimitReached (OSError)          a limit of files, processes or sizes leaves no room for workers
    ├── WrongIndex (IndexError)         no element has this index
    ├── UnknownMessage (TypeError)      a worker and its caller disagree on the messages between them
    └── TrainingDiverged (FloatingPointError)

Errors are made from facts, keep these as attributes, and write their own messages: no code edits the `str` of an error.
"""

from __future__ import annotations

import errno
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gymnasium.error

UNCOPYABLE_PAGE = "problems/uncopyable-policies"
_PAGES = Path(__file__).parent / "docs"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the last one by `ulimit -f`


@dataclass(frozen=True)
class WorkerName:
    """The name of a worker in messages. envs: the envs that the worker steps, by the indices that users know."""

    noun: str
    index: int
    envs: range = range(0)

    def __str__(self) -> str:
        named = f" (envs {self.envs[0]} to {self.envs[-1]})" if len(self.envs) > 1 else ""
        return f"{self.noun} {self.index}" + (f" (env {self.envs[0]})" if len(self.envs) == 1 else named)


class MusterError(Exception):
    """The root of Muster's exceptions.

    page: the page of ``docs/`` that says more, also a folder of the installed package; empty where none does.
    batch, failures: where envs have failed, a `Batch` of those that have not, or None, and reports of those that have.
    """

    page = ""
    batch: Any = None
    failures: Any = ()

    def __str__(self) -> str:
        return super().__str__() + more(self.page)

    @property
    def headline(self) -> str:
        """The first line of the message."""
        return (str(self).splitlines() or [type(self).__name__])[0]


class RecipeError(MusterError, ValueError):
    """Arguments that do not describe how to build an env."""


class CannotTravel(MusterError, TypeError):
    """An object cannot be sent to the process that needs it, or must not be copied. The message names the remedy.

    batch: as in EnvError, where an env returned the object in a step.
    """

    def __init__(self, message: str, page: str = "problems/files-and-locks") -> None:
        super().__init__(message)
        self.page = page


class EnvError(MusterError, RuntimeError):
    """An env raised. ``__cause__`` is the original exception where it could be rebuilt here.

    message: what happened; `str` adds where it happened, from the attributes.
    hint: a line about envs that share a process, or empty.
    env_index, worker_index: the env that raised, and its worker.  step: env steps into its episode (0 = in reset,
    None = while building).
    original_type: qualified name of the original exception's class.  worker_traceback: the traceback as the worker
    printed it.  batch: a `Batch` of the envs that did not fail in the same call, or None.  failures: of those that did.
    """

    def __init__(
        self,
        message: str,
        *,
        env_index: int | None = None,
        worker_index: int | None = None,
        step: int | None = None,
        original_type: str | None = None,
        worker_traceback: str | None = None,
        worker_noun: str = "worker",
        hint: str = "",
    ) -> None:
        super().__init__(message)
        self.message = message
        self.env_index, self.worker_index, self.step = env_index, worker_index, step
        self.original_type, self.worker_traceback, self.worker_noun = original_type, worker_traceback, worker_noun
        self.hint = hint

    def __str__(self) -> str:
        if self.worker_index is None:
            return self.message
        when = "while it was built" if self.step is None else f"step {self.step}"
        happened = f"env {self.env_index} ({self.worker_noun} {self.worker_index}, {when}): {self.message}"
        return f"{happened}\n{self.hint}" if self.hint else happened


class SpecMismatch(EnvError, ValueError):
    """An array or a space does not have the shape, dtype or layout that was promised."""


class ReplayDiffers(MusterError, RuntimeError):
    """An env did not come to a state again, though it had the same seed and the same actions.

    env_index, episode, steps: the env, and its state's episode and steps in it.  built_anew: whether it was, for this.
    what, expected, got: the part that is another, and its values, digests of arrays; without values the reason.
    was_reset: the envs that have begun new episodes since.  result: what `set_states` returns where all envs come to
    their states, with the first observations of these.
    """

    page = "tasks/replay"

    def __init__(
        self,
        env_index: int,
        episode: int,
        steps: int,
        built_anew: bool,
        what: str,
        expected: Any = None,
        got: Any = None,
    ) -> None:
        super().__init__(env_index, episode, steps, built_anew, what, expected, got)
        self.env_index, self.episode, self.steps, self.built_anew = env_index, episode, steps, built_anew
        self.what, self.expected, self.got = what, expected, got
        self.was_reset: tuple[int, ...] = ()
        self.result: Any = None

    @property
    def summary(self) -> str:
        """The facts, without likely causes."""
        came = f"did not come to step {self.steps} of its episode {self.episode} again"
        came += ", also built anew" * self.built_anew
        differs = "" if self.expected is None else f" is {self.got}, expected {self.expected}"
        return f"env {self.env_index} {came}: {self.what}{differs}"

    def __str__(self) -> str:
        causes = (
            " It may draw from a generator that its reset(seed=...) does not seed, keep something from one episode to "
            "the next, share something with another env, or ask a clock or a server; or call() or set_attr() has "
            "changed it, or its caller the observation."
        )
        since = f" Reset since: envs {', '.join(map(str, self.was_reset))}" * bool(self.was_reset)
        return f"{self.summary}.{causes * (self.expected is not None)}{since}{more(self.page)}"


class WorkerError(MusterError, RuntimeError):
    """A worker is lost. The vector env that it belonged to is closed, unless ``on_failure="restart"``.

    worker: its name.  worker_index, env_indices: the worker, and the envs that it stepped.  exit_code: the exit code of
    its process, where known.
    """

    exit_code: int | None = None

    def __init__(self, worker: WorkerName, *facts: Any) -> None:
        super().__init__(worker, *facts)  # all arguments of the class: pickle calls it with `args`
        self.worker, self.worker_index, self.env_indices = worker, worker.index, tuple(worker.envs)

    _joint = " "

    def __str__(self) -> str:
        _, happened = self.args
        return f"{self.worker}{self._joint}{happened}"


class WorkerDied(WorkerError):
    """A worker process or thread ended. ``exit_code`` is negative for a signal, as in ``subprocess``.

    doing, cause: what the worker was doing, and the likely cause, in words; of a thread, the exception that ended it.
    last_words: the end of the process's stderr.  hint: a line about envs that share a process, or empty.
    """

    def __init__(
        self,
        worker: WorkerName,
        doing: str,
        exit_code: int | None,
        cause: str,
        last_words: str = "",
        is_thread: bool = False,
        hint: str = "",
    ) -> None:
        super().__init__(worker, doing, exit_code, cause, last_words, is_thread, hint)
        self.doing, self.exit_code, self.cause = doing, exit_code, cause
        self.last_words, self.is_thread, self.hint = last_words, is_thread, hint

    def __str__(self) -> str:
        if self.is_thread:
            return f"{self.worker}, a thread, ended by {self.cause}. It was {self.doing}. The vector env is closed."
        stderr = f"\nThe last lines of its stderr:\n{self.last_words}" if self.last_words else ""
        happened = f"died: {how_ended(self.exit_code)}. It was {self.doing}."
        hint = f"\n{self.hint}" if self.hint else ""
        return f"{self.worker} {happened}\nLikely cause: {self.cause}{hint}{stderr}{more(self.page)}"

    @property
    def page(self) -> str:  # type: ignore[override]  # by the cause
        return "problems/bus-error" if self.exit_code == -signal.SIGBUS else "tasks/restarts"


class WorkerTimeout(WorkerError, TimeoutError):
    """A worker took longer than ``start_timeout`` or ``step_timeout`` and was killed. The message holds its stack.

    doing, limit: what the worker was doing, and the limit, in words.  elapsed_s: seconds without an answer.
    stack: the output of faulthandler; None for a thread, which nothing can kill.  hint: what the stack may mean.
    """

    page = "problems/envs-that-hang"

    def __init__(
        self, worker: WorkerName, doing: str, limit: str, elapsed_s: float = 0, stack: str | None = None, hint: str = ""
    ) -> None:
        super().__init__(worker, doing, limit, elapsed_s, stack, hint)
        self.doing, self.limit, self.elapsed_s, self.stack, self.hint = doing, limit, elapsed_s, stack, hint

    def __str__(self) -> str:
        if self.stack is None:
            remedy = 'A thread cannot be killed, so it is left behind; backend="process" would end it.'
            return f"{self.worker} did not answer within {self.limit} while {self.doing}. {remedy}"
        happened = f"did not answer for {self.elapsed_s:.1f} s ({self.limit}) and was killed; it was {self.doing}."
        return f"{self.worker} {happened}{self.hint}\nIts Python stack:\n{self.stack}{more(self.page)}"


class StepTimeout(MusterError, TimeoutError):
    """One of several envs that wait in a worker took longer than ``step_timeout``; the others go on.

    doing, limit: what it was in, and the limit, in words.  stack: where it was, most recent call first.
    is_left: whether it could not be ended. It runs on, and the env has to be built again.
    """

    def __init__(self, doing: str, limit: str, stack: str = "", is_left: bool = False) -> None:
        super().__init__(doing, limit, stack, is_left)
        self.doing, self.limit, self.stack, self.is_left = doing, limit, stack, is_left

    def __str__(self) -> str:
        end = "left behind: it runs on, and what it returns is dropped" if self.is_left else "cancelled"
        where = f"\nIt was here, most recent call first:\n{self.stack}" if self.stack else ""
        return f"{self.doing} for longer than {self.limit}, and was {end}.{where}{more('tasks/envs-that-wait')}"


class CollectorError(WorkerError):
    """A collector process could not collect, though its envs did not fail: most often its policy raised.

    ``__cause__`` is the original exception where it could be rebuilt here.
    """

    _joint = ": "


class NodeLost(WorkerError):
    """A node, with all its collectors, ended or fell silent. host: its machine.  reason: how it was lost, in words."""

    def __init__(self, worker: WorkerName, host: str, reason: str) -> None:
        super().__init__(worker, host, reason)
        self.host, self.reason = host, reason

    def __str__(self) -> str:
        return f"{self.worker} on {self.host} is lost: {self.reason}"


class WaitTimeout(MusterError, TimeoutError):
    """A ``timeout`` argument ran out. Nothing is lost: the call stays pending and can be waited for again."""


class ActionError(MusterError, ValueError):
    """Actions of the wrong number, shape, dtype or range. Nothing was sent."""


class UsageError(MusterError, RuntimeError):
    """A call that makes no sense now. The vector env is unchanged; the message says what to call instead."""


class ClosedError(UsageError, gymnasium.error.ClosedEnvironmentError):
    """The vector env is closed, or lives in the process that this one was forked from."""


class PendingError(UsageError, gymnasium.error.AlreadyPendingCallError):
    """Envs still owe an answer to an earlier call."""

    def __init__(self, message: str, name: str = "step") -> None:
        gymnasium.error.AlreadyPendingCallError.__init__(self, message, name)


class NotPendingError(UsageError, gymnasium.error.NoAsyncCallError):
    """No call is pending, so there is nothing to wait for."""

    def __init__(self, message: str, name: str = "step") -> None:
        gymnasium.error.NoAsyncCallError.__init__(self, message, name)


class ConfigError(MusterError, ValueError):
    """An option has a value that makes no sense, alone or with the others.

    option, expected, got: the name of the option in Python, what its value must be, and the value. What is no matter of
    one option has a message alone, in the place of the name.
    """

    def __init__(self, option: str, expected: str = "", got: Any = None) -> None:
        super().__init__(option, expected, got)
        self.option, self.expected, self.got = option, expected, got

    def __str__(self) -> str:
        return self.naming(self.option)

    def naming(self, option: str) -> str:
        """The message, where the option has another name, `option`, such as on a command line."""
        return f"{option} must be {self.expected}, got {self.got!r}" if self.expected else self.option


class RunConfigError(ConfigError, UsageError):
    """The config.json of a run folder holds what no run of this version of Muster has."""


class WrongType(MusterError, TypeError):
    """An argument has a type that cannot be used here."""


class NotBuilt(WrongType, AttributeError):
    """A ``muster.lazy(...)`` was used where nothing has built it. An AttributeError, too, as `hasattr` expects."""


class TrainingDiverged(MusterError, FloatingPointError):
    """Numbers are no longer finite: of an env, or of gradients. The state is that after the last complete iteration."""


class OneEnvPerProcess(MusterError, RuntimeError):
    """An env class declares ``metadata["one_per_process"] = True``, but several of its envs were to share a process."""

    page = "problems/one-instance-library"


class NotEnoughMemory(MusterError, MemoryError):
    """The envs asked for would need more memory than there is, going by the first ones that were built."""

    page = "problems/many-processes"


class UnknownMessage(MusterError, TypeError):
    """A worker, or its caller, received a message that it does not know. A worker process or thread ends with it."""


class LimitReached(MusterError, OSError):
    """A limit of this process, its user or its container leaves no room for what workers need."""

    page = "problems/many-processes"


class WrongIndex(MusterError, IndexError):
    """No element has this index."""


def more(page: str) -> str:
    """The last line of a message, about a page of ``docs/``, which wheels have in the package; empty without one."""
    return f"\nMore: {_PAGES if _PAGES.is_dir() else 'docs'}/{page}.md" if page else ""


def printable(text: str) -> str:
    """The text with escapes in place of control characters: a stranger's text may not move a terminal's cursor."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def printable_lines(text: str) -> str:
    """The text as `printable`, but with its lines and tabs."""
    return "".join(char if char in "\n\t" else printable(char) for char in text)


def how_ended(exit_code: int | None) -> str:
    """The exit code of a process, in words."""
    if exit_code is None:
        return "its exit code is unknown, the launcher process was lost or stopped, or the caller has reaped it"
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"killed by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"killed by signal {-exit_code}"
