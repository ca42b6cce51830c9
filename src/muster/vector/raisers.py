"""Which exception a vector env raises where an env failed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from muster.errors import EnvError
from muster.vector.results import Batch
from muster.workers.failures import Failure, to_exception


class RaisesOriginals:
    """For vector envs that raise the env's own exception, not an EnvError with it as its cause."""

    def _raise_failures(self, failures: Sequence[Failure], batch: Batch | None) -> None:
        if failures:
            raise original_error(failures, 0)


def original_error(failures: Sequence[Failure], which: int) -> BaseException:
    """The env's own exception of one of `failures` where it could be rebuilt in this process, else an EnvError.

    The caller's own Ctrl-C comes first: another env's exception must not swallow it.
    """
    failure = next((one for one in failures if isinstance(one.exception, KeyboardInterrupt)), failures[which])
    error = to_exception(failure)
    original = error.__cause__
    if original is None or type(error) is not EnvError:
        return error
    if isinstance(failure.exception, bytes):
        where = f"env {failure.env_index} (worker {failure.worker_index})"
        original.add_note(f"The traceback of {where}:\n{failure.worker_traceback.rstrip()}")
    return original


@contextmanager
def originals_raised() -> Iterator[None]:
    """Raises the exception of an env's constructor, where it could be rebuilt, in place of the EnvError about it."""
    try:
        yield
    except EnvError as error:
        raise (error.__cause__ if type(error) is EnvError and error.__cause__ is not None else error) from None
