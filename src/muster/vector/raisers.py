"""The exceptions that a vector env raises where envs failed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from muster.errors import EnvError, MusterError
from muster.hosts.failures import Failure, to_exception, to_one_exception
from muster.vector.results import Batch

# Called with at least one failure, and the rows of the envs that did not fail.
Raiser = Callable[[Sequence[Failure], Batch | None], NoReturn]


def raise_env_error(failures: Sequence[Failure], batch: Batch | None) -> NoReturn:
    """Raises the first failure as an EnvError. Its `batch` holds the rows of the envs that did not fail."""
    error = to_one_exception(failures)
    if isinstance(error, MusterError):
        error.batch, error.failures = batch, failures
    raise error


def raise_original(failures: Sequence[Failure], batch: Batch | None) -> NoReturn:
    """Raises the env's own exception for the first of `failures`."""
    raise original_error(failures, 0)


def original_error(failures: Sequence[Failure], which: int) -> BaseException:
    """The env's own exception in ``failures[which]``, if it could be rebuilt in this process; else an EnvError.

    The caller's own Ctrl-C comes first: another env's exception must not swallow it. An env's SystemExit stays an
    EnvError: it would end this process without a word.
    """
    failure = next((one for one in failures if isinstance(one.exception, KeyboardInterrupt)), failures[which])
    return _original_of(to_exception(failure))


def _original_of(error: BaseException) -> BaseException:
    """The env's own exception behind an EnvError, with what the EnvError says of it; `error` where there is none."""
    original = error.__cause__
    if original is None or type(error) is not EnvError or isinstance(original, SystemExit):
        return error
    if original.__traceback__ is None:  # from another process
        where = f"env {error.env_index} ({error.worker_noun} {error.worker_index})"
        original.add_note(f"The traceback of {where}:\n{(error.worker_traceback or '').rstrip()}")
    if error.hint:
        original.add_note(error.hint)
    return original


@contextmanager
def originals_raised() -> Iterator[None]:
    """Raises the exception of an env's constructor, where it could be rebuilt, in place of the EnvError about it."""
    try:
        yield
    except EnvError as error:
        if (original := _original_of(error)) is error:
            raise
        raise original from None
