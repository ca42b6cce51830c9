"""Which env and worker is being built or stepped here, for factories and lazy arguments that must differ per env."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class WorkerInfo:
    """Where the code that asks runs.

    env_index: the env that is built, stepped, reset, called or closed; None elsewhere in a worker.
    worker_index: of the worker that builds and steps it.
    seed: the seed that the worker derived its global generators from, None where there is none.
    """

    env_index: int | None
    worker_index: int
    num_envs: int
    num_workers: int
    seed: int | None


class Host(Protocol):
    """Whoever runs envs: `workers.env_host.EnvHost`."""

    def info_of(self, i: int) -> WorkerInfo: ...


Running = tuple[Host, int]  # the host's i-th env


def _nothing() -> Running | None:
    return None


_running: Callable[[], Running | None] = _nothing  # what this thread steps or resets
# And what was running when that was set: what runs now instead is further inside, and knows better.
_current: ContextVar[tuple[WorkerInfo, Running | None] | None] = ContextVar("muster_worker_info", default=None)


def get_worker_info() -> WorkerInfo | None:
    """The WorkerInfo of the worker or env that this code runs in.

    None elsewhere: in the caller, for one, and in threads that an env has started.
    """
    running, told = _running(), _current.get()
    if running is not None and (told is None or running != told[1]):
        host, i = running
        return host.info_of(i)
    return None if told is None else told[0]


def ask_for_running(ask: Callable[[], Running | None]) -> None:
    """Has `ask` tell which env this thread steps or resets: a context for each step would take too long."""
    global _running
    _running = ask


@contextmanager
def worker_info_context(info: WorkerInfo) -> Iterator[None]:
    """Make ``get_worker_info()`` return ``info`` in this thread until the context ends; contexts nest."""
    token = _current.set((info, _running()))
    try:
        yield
    finally:
        _current.reset(token)
