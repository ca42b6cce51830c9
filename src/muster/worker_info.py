"""Which env and worker is being built or stepped here, for factories and lazy arguments that must differ per env."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True)
class WorkerInfo:
    """Where the code that asks runs.

    env_index: the env being built, None outside a build.  worker_index: of the worker that builds and steps it.
    seed: the seed that the worker derived its global generators from, None where there is none.
    """

    env_index: int | None
    worker_index: int
    num_envs: int
    num_workers: int
    seed: int | None


_current: ContextVar[WorkerInfo | None] = ContextVar("muster_worker_info", default=None)


def get_worker_info() -> WorkerInfo | None:
    """The WorkerInfo of the worker or build that this code runs in, None elsewhere (in the caller, for one)."""
    return _current.get()


@contextmanager
def worker_info_context(info: WorkerInfo) -> Iterator[None]:
    """Make ``get_worker_info()`` return ``info`` in this thread until the context ends; contexts nest."""
    token = _current.set(info)
    try:
        yield
    finally:
        _current.reset(token)
