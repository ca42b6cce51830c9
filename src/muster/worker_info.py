"""Which env and worker is being built or stepped here, for factories and lazy arguments that must differ per env."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True)
class WorkerInfo:
    """Where the code that asks runs.

    env_index: the env that is built, stepped, reset, called or closed; None elsewhere in a worker, and in threads that
        an env has started.  worker_index: of the worker that builds and steps it.
    seed: the seed that the worker derived its global generators from, None where there is none.
    """

    env_index: int | None
    worker_index: int
    num_envs: int
    num_workers: int
    seed: int | None


_current: ContextVar[WorkerInfo | None] = ContextVar("muster_worker_info", default=None)
_ask: Callable[[], WorkerInfo | None] = _current.get


def get_worker_info() -> WorkerInfo | None:
    """The WorkerInfo of the worker or env that this code runs in, None elsewhere (in the caller, for one)."""
    told = _current.get()
    return told if told is not None and told.env_index is not None else _ask() or told


def ask_for_running(ask: Callable[[], WorkerInfo | None]) -> None:
    """Has `ask` tell of the env that this thread steps or resets: a context for each step would take too long."""
    global _ask
    _ask = ask


@contextmanager
def worker_info_context(info: WorkerInfo) -> Iterator[None]:
    """Make ``get_worker_info()`` return ``info`` in this thread until the context ends; contexts nest."""
    token = _current.set(info)
    try:
        yield
    finally:
        _current.reset(token)
