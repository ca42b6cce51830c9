"""An env's exception on its way to the caller."""

from __future__ import annotations

import errno
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any

from muster.envs.attributes import chain
from muster.envs.dm_env import is_dm_env
from muster.errors import CannotTravel, ConfigError, EnvError, MusterError, StepTimeout, UsageError, WrongType, more
from muster.introspection import type_name
from muster.pickling import UserCall
from muster.pool.messages import message_of, portable, rebuilt
from muster.pool.resources import limit

# Errors that an env may raise because it uses a vector env itself, and one about an env. Raised as they are, they would
# seem to be about the vector env that steps this env.
_OF_CALLS = (UsageError, ConfigError, WrongType, StepTimeout)
_MOST_NAMED = 20


@dataclass(frozen=True)
class Failure:
    """An env's exception in a form that can travel to the caller.

    exception: the original, pickled for another process, or None where it cannot be rebuilt there.
    step: the number of env steps in the episode, None while building.  note: added to the error by `add_note`.
    worker_noun: the pool's noun for a worker.  hint: see EnvError.  lost_attributes: those of an AttributesLost.
    """

    env_index: int
    worker_index: int
    step: int | None
    type_name: str
    message: str
    worker_traceback: str
    exception: BaseException | bytes | None
    note: str | None = None
    worker_noun: str = "worker"
    hint: str = ""
    lost_attributes: Mapping[str, str] | None = None

    @classmethod
    def of(
        cls,
        error: BaseException,
        env_index: int,
        worker_index: int,
        step: int | None,
        dumps: Callable[[object], bytes] | None,
        **more: Any,
    ) -> Failure:
        """The report of `error`. dumps: pickles for the caller; None where that is in this process.  more: fields."""
        trace = "".join(traceback.format_exception(error))
        sent = error if dumps is None else portable(error, dumps)
        return cls(env_index, worker_index, step, type_name(error), message_of(error), trace, sent, **more)

    def portable(self, dumps: Callable[[object], bytes]) -> Failure:
        """This failure as it leaves its process. dumps: pickles for who gets it."""
        error = self.exception
        return replace(self, exception=portable(error, dumps)) if isinstance(error, BaseException) else self

    def original(self) -> BaseException | None:
        """The original exception, where it can be rebuilt."""
        return rebuilt(self.exception) if isinstance(self.exception, bytes) else self.exception


class HostFailed(Exception):
    """Raised where a host cannot be built. failure: for the caller."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure


class AttributesLost(MusterError):
    """Attributes of an env that was built again could not be set again. reasons: by name."""

    def __init__(self, reasons: Mapping[str, str]) -> None:
        super().__init__(reasons)
        self.reasons = reasons


def failures_of(results: Sequence[Any]) -> dict[int, Failure]:
    """The failures among the results of envs, by env."""
    return {env: result for env, result in enumerate(results) if isinstance(result, Failure)}


def not_sent_there(result: Any, error: Exception, call: UserCall) -> CannotTravel:
    """The error for the result of a call that cannot be pickled in the worker."""
    return CannotTravel(
        f"a {type_name(result)} cannot be sent from the worker: {error}. Ask for something smaller, such as an "
        f"attribute of it{f', or use {call.in_process}' if call.in_process else ''}"
    )


def not_rebuilt_here(error: Exception) -> CannotTravel:
    """The error for the result of a call that has raised `error` in the caller, where it was unpickled."""
    what = f"the result could be pickled in the worker, but not rebuilt in the caller: {message_of(error)}"
    return CannotTravel(f"{what}. Ask for something plainer, such as an attribute of it")


def to_exception(failure: Failure) -> BaseException:
    """The exception to raise in the caller: an EnvError, caused by the original exception where there is one."""
    original = failure.original()
    own = isinstance(original, EnvError)
    if isinstance(failure.exception, KeyboardInterrupt):  # not pickled, so a Ctrl-C in this process
        return failure.exception
    if isinstance(original, MusterError) and not own and not isinstance(original, _OF_CALLS):
        if failure.hint and isinstance(original, CannotTravel):
            original.add_note(failure.hint)
        return original
    cls = type(original) if isinstance(original, EnvError) else EnvError
    error = cls(
        failure.message if own else f"{failure.type_name}: {failure.message}",
        env_index=failure.env_index,
        worker_index=failure.worker_index,
        step=failure.step,
        original_type=failure.type_name,
        worker_traceback=failure.worker_traceback,
        worker_noun=failure.worker_noun,
        hint=failure.hint,
    )
    error.__cause__ = original
    if original is None or original.__traceback__ is None:
        # What to do stands once more below the traceback, where people look first.
        error.add_note(f"The worker's traceback:\n{failure.worker_traceback.rstrip()}\n{failure.hint}".rstrip())
    if failure.note is not None:
        error.add_note(failure.note)
    return error


def to_one_exception(failures: Sequence[Failure]) -> BaseException:
    """The exception to raise where envs failed in one call: the caller's own Ctrl-C, else the first; notes the rest."""
    first = next((one for one in failures if isinstance(one.exception, KeyboardInterrupt)), failures[0])
    error = to_exception(first)
    # Envs that failed with the same Ctrl-C were not stepped at all, because of it.
    others = [one for one in failures if one is not first and (one.exception is None or one.exception is not error)]
    if others:
        names = ", ".join(f"env {failure.env_index} ({failure.type_name})" for failure in others[:_MOST_NAMED])
        more = f" and {len(others) - _MOST_NAMED} more" if len(others) > _MOST_NAMED else ""
        error.add_note(f"In the same call failed: {names}{more}")
    return error


def about_gym(env: Any) -> str:
    """The sentence that says how an env of gym, or a coroutine env in a wrapper, becomes one of Gymnasium's."""
    if any(inspect.iscoroutinefunction(getattr(one, "step", None)) for one in chain(env)):
        return "The env's step is a coroutine function, and a wrapper does not await it: write `async def step` there"
    if all(cls.__module__.partition(".")[0] != "gym" for cls in type(env).__mro__):
        return ""
    return (
        "The env is of the package gym: return shimmy.GymV26CompatibilityV0(env=env) in its place, or where it was "
        "written for Gym before 0.26 shimmy.GymV21CompatibilityV0(env=env)"
    )


def reset_note(env: Any, error: BaseException) -> str | None:
    """The hint for a TypeError that comes from a reset which does not take Gymnasium's arguments; else None."""
    entered = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
    if isinstance(error, TypeError) and any(_refuses(one, entered) for one in chain(env) if not is_dm_env(one)):
        return "Muster calls it as Gymnasium does: write `def reset(self, *, seed=None, options=None)`."
    return None


def _refuses(env: Any, entered: Set[CodeType]) -> bool:
    """True if ``env.reset`` takes no seed or no options, and is not among the functions `entered`."""
    try:
        inspect.signature(env.reset).bind(seed=None, options=None)
    except Exception as error:  # a TypeError; others: there is no reset, or its signature is not known
        return isinstance(error, TypeError) and getattr(env.reset, "__code__", None) not in entered
    return False


def about_error(error: BaseException, in_process: str) -> str:
    """The sentence that says what may be done about an exception, if there is one. in_process: an option, in words."""
    if in_process and type_name(error) == "bdb.BdbQuit":
        return f"A debugger has no terminal in a worker: breakpoint() works with {in_process}."
    number = error.errno if isinstance(error, OSError) else vars(error).get("errno")  # ZeroMQ's error has one, too
    if type(number) is int and number == errno.EADDRINUSE:
        own = "Add muster.get_worker_info().unique_index to the port, and each env has its own."
        taken = "If the env does that, another program listens there: begin at another number, or bind port 0."
        return f"Another env, or another program, listens there. {own} {taken}{more('problems/ports-and-devices')}"
    if isinstance(error, SystemExit):
        return more("tasks/restarts").strip()
    return limit(number) if isinstance(error, OSError) and not isinstance(error, BlockingIOError) else ""
