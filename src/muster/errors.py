"""Every exception that Muster raises, in one tree.

``except MusterError`` catches them all. Each class also inherits from the builtin, or the Gymnasium error, that users
of the peers already catch.
"""

from __future__ import annotations

from typing import Any

import gymnasium.error


class MusterError(Exception):
    """The root of Muster's exceptions."""


class RecipeError(MusterError, ValueError):
    """What was handed over does not say how to build an env."""


class CannotTravel(MusterError, TypeError):
    """An object cannot be sent to the process that needs it. The message names its path, its type and the remedy.

    batch: as in EnvError, where it was an env that gave the object in a step.
    """

    batch: Any = None


class EnvError(MusterError, RuntimeError):
    """An env raised. ``__cause__`` is the original exception where it could be rebuilt here.

    env_index, worker_index: where.  step: env steps into its episode (0 = in reset, None = while building).
    original_type: qualified name of the original exception's class.  worker_traceback: the traceback as the worker
    printed it.  batch: a `Batch` of the envs that did not fail in the same call, or None.
    """

    batch: Any = None

    def __init__(
        self,
        message: str,
        *,
        env_index: int | None = None,
        worker_index: int | None = None,
        step: int | None = None,
        original_type: str | None = None,
        worker_traceback: str | None = None,
    ) -> None:
        super().__init__(message)
        self.env_index = env_index
        self.worker_index = worker_index
        self.step = step
        self.original_type = original_type
        self.worker_traceback = worker_traceback


class SpecMismatch(EnvError, ValueError):
    """An array or a space does not have the shape, dtype or layout that was promised."""


class WorkerError(MusterError, RuntimeError):
    """A worker is lost. The vector env it belonged to is closed, unless ``on_failure="restart"``."""

    def __init__(
        self,
        message: str,
        *,
        worker_index: int | None = None,
        env_indices: tuple[int, ...] = (),
        exit_code: int | None = None,
    ) -> None:
        super().__init__(message)
        self.worker_index = worker_index
        self.env_indices = env_indices
        self.exit_code = exit_code


class WorkerDied(WorkerError):
    """A worker process ended. ``exit_code`` is negative for a signal, as in ``subprocess``."""


class WorkerTimeout(WorkerError, TimeoutError):
    """A worker took longer than ``start_timeout`` or ``step_timeout`` and was killed. The message holds its stack."""


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
    """There is nothing to wait for."""

    def __init__(self, message: str, name: str = "step") -> None:
        gymnasium.error.NoAsyncCallError.__init__(self, message, name)


class ConfigError(MusterError, ValueError):
    """An option has a value that makes no sense, alone or beside the others."""


class TrainingDiverged(MusterError, FloatingPointError):
    """Gradients are no longer finite. The policy still holds the weights from before that step."""


class OneEnvPerProcess(MusterError, RuntimeError):
    """An env class declares ``metadata["one_per_process"] = True``, but several of its envs were to share a process."""


class NotEnoughMemory(MusterError, MemoryError):
    """The envs asked for would need more memory than there is, going by the first ones that were built."""


class UnknownMessage(MusterError, TypeError):
    """A worker, or its caller, was sent what it has no answer for. A worker process or thread ends by it."""


class CollectorError(WorkerError):
    """A collector process could not collect, though its envs could: most often its policy raised. ``__cause__`` is the
    original exception where it could be rebuilt here."""
