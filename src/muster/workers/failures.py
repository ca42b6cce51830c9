"""An env's exception on its way to the caller."""

from __future__ import annotations

import inspect
import pickle
import traceback
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from types import CodeType
from typing import Any

from muster.envs.attributes import chain
from muster.envs.dm_env import is_dm_env
from muster.errors import ConfigError, EnvError, MusterError, UsageError, WrongType

# What a vector env that the env uses itself may raise: unexplained it would seem to be about the one that steps it.
_OF_CALLS = (UsageError, ConfigError, WrongType)


@dataclass(frozen=True)
class Failure:
    """An exception on its way to the caller.

    exception: the original, pickled for another process, or None where it cannot be rebuilt there.
    step: env steps into the episode, None while building.  note: what to tell besides.
    worker: what the pool calls a worker.
    """

    env_index: int
    worker_index: int
    step: int | None
    type_name: str
    message: str
    worker_traceback: str
    exception: BaseException | bytes | None
    note: str | None = None
    worker: str = "worker"

    def original(self) -> BaseException | None:
        """The original exception, where it can be rebuilt."""
        if not isinstance(self.exception, bytes):
            return self.exception
        try:
            error = pickle.loads(self.exception)
        except Exception:
            return None
        return error if isinstance(error, BaseException) else None


def to_exception(failure: Failure) -> BaseException:
    """What to raise in the caller: an EnvError, its cause the original where there is one."""
    original = failure.original()
    own = isinstance(original, EnvError)
    if isinstance(failure.exception, KeyboardInterrupt):  # one from another process is no Ctrl-C, but the env's
        return failure.exception
    if isinstance(original, MusterError) and not own and not isinstance(original, _OF_CALLS):
        return original
    cls = type(original) if isinstance(original, EnvError) else EnvError
    error = cls(
        failure.message if own else f"{failure.type_name}: {failure.message}",
        env_index=failure.env_index,
        worker_index=failure.worker_index,
        step=failure.step,
        original_type=failure.type_name,
        worker_traceback=failure.worker_traceback,
        worker_noun=failure.worker,
    )
    error.__cause__ = original
    if original is None or original.__traceback__ is None:
        error.add_note(f"The worker's traceback:\n{failure.worker_traceback.rstrip()}")
    if failure.note is not None:
        error.add_note(failure.note)
    return error


def to_one_exception(failures: Sequence[Failure]) -> BaseException:
    """What to raise where envs failed in the same call: the caller's own Ctrl-C, else the first; it names the rest."""
    first = next((one for one in failures if isinstance(one.exception, KeyboardInterrupt)), failures[0])
    error = to_exception(first)
    # Those that hold the same Ctrl-C were not begun with because of it.
    others = [one for one in failures if one is not first and (one.exception is None or one.exception is not error)]
    if others:
        names = ", ".join(f"env {failure.env_index} ({failure.type_name})" for failure in others)
        error.add_note(f"In the same call failed: {names}")
    return error


def reset_note(env: Any, error: BaseException) -> str | None:
    """What to tell besides of an error in a reset: that it may be a reset which does not take Gymnasium's arguments."""
    entered = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
    if isinstance(error, TypeError) and any(_refuses(one, entered) for one in chain(env) if not is_dm_env(one)):
        return "Muster calls it as Gymnasium does: write `def reset(self, *, seed=None, options=None)`."
    return None


def _refuses(env: Any, entered: Set[CodeType]) -> bool:
    """Whether its reset, which is not among the functions `entered`, takes no seed or no options."""
    try:
        inspect.signature(env.reset).bind(seed=None, options=None)
    except Exception as error:  # a TypeError, or it has none, or one that cannot be known
        return isinstance(error, TypeError) and getattr(env.reset, "__code__", None) not in entered
    return False


def portable(error: BaseException, dumps: Callable[[object], bytes]) -> bytes | None:
    """Pickled, if it comes back as what it is: exceptions with arguments of their own often don't."""
    try:
        data = dumps(error)
        return data if type(pickle.loads(data)) is type(error) else None
    except Exception:
        return None


def message_of(error: BaseException) -> str:
    """str(error), also where that raises."""
    try:
        return str(error)
    except Exception as broken:
        return f"<no message: its __str__ raised {type(broken).__name__}>"
