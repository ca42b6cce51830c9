"""The env and the worker that are being built or stepped here, for factories and lazy arguments that differ per env."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from typing import Any

import numpy as np

from muster._core import running
from muster.errors import UsageError

SEED_BITS = 31  # of a seed that an env may get: simulators in C take an int


@dataclass(frozen=True)
class WorkerInfo:
    """The env and the worker that the calling code runs in.

    env_index: the env that is built, stepped, reset, called or closed; None elsewhere in a worker.
    worker_index: the index of the worker that builds and steps the env.
    num_envs, num_workers: how many envs and workers there are in all.
    seed: the seed that the worker derived its global generators from, None where there is none.
    node_index: the index of the node that the worker runs on; 0 where there is one machine.
    unique_indices: the `unique_index` of the env; where `env_index` is None, those of all envs of the worker.
    """

    env_index: int | None
    worker_index: int
    num_envs: int
    num_workers: int
    seed: int | None
    node_index: int = 0
    unique_indices: tuple[int, ...] = ()

    @property
    def unique_index(self) -> int:
        """The lowest number that no other env had when this one's vector env was made, for ports, folders and devices.

        No two envs that a program and the processes that it has started run at a time have the same one: not those of
        two vector envs, of collectors and an evaluation, or on one node of a cluster. `env_index` begins at 0 in each
        vector env. The number is taken until the vector env is closed, and what replaces an env or a worker keeps it.
        In `worker_init` it is that of the worker's first env. Raises UsageError where there is no env.
        """
        if not self.unique_indices:
            raise UsageError("unique_index is a number that envs have, and this code runs for none")
        return self.unique_indices[0]


def seeds_of_envs(sequence: np.random.SeedSequence, count: int = 1) -> list[int]:
    """Seeds for ``env.reset``."""
    return [int(word) % 2**SEED_BITS for word in sequence.generate_state(count)]


class _Here(threading.local):
    """The innermost context of a thread: its info, and what `running` returned when it began.

    That is an EnvHost and the index of its env. Where `running` returns something else now, an env is stepped inside
    that context, and the env's info counts.

    No ContextVar is set here: garbage collection closes envs in contexts of their own, and may begin within anybody's
    ``ContextVar.set``. Before Python 3.12 that goes on with memory that the inner one has freed.
    """

    entered: tuple[WorkerInfo | None, tuple[Any, int] | None] | None = None


_here = _Here()

# In the tasks of an env: its info, and the `entered` of the thread that runs them. Where that is another, garbage
# collection has begun something else in the middle of a task.
_of_task: ContextVar[tuple[WorkerInfo, object] | None] = ContextVar("muster_env", default=None)


def get_worker_info() -> WorkerInfo | None:
    """The WorkerInfo of the worker or env that this code runs in.

    None elsewhere, for example in the caller and in threads that an env has started.

    >>> import muster
    >>> with muster.make_vec("CartPole-v1", num_envs=3) as envs:
    ...     envs.call(lambda env, env_index: muster.get_worker_info().env_index)
    (0, 1, 2)
    >>> print(muster.get_worker_info())
    None
    """
    # The core knows which env this thread steps or resets: a context for each step would take too long.
    stepped, entered, task = running(), _here.entered, _of_task.get()
    if task is not None and stepped is None and (entered is None or entered is task[1]):
        return task[0]
    if stepped is not None and (entered is None or stepped != entered[1]):
        env_host, i = stepped
        info: WorkerInfo = env_host.info_of(i)
        return info
    return None if entered is None else entered[0]


@contextmanager
def worker_info_context(info: WorkerInfo | None) -> Iterator[None]:
    """Makes ``get_worker_info()`` return ``info`` in this thread until the context ends; contexts nest."""
    outer, _here.entered = _here.entered, (info, running())
    try:
        yield
    finally:
        _here.entered = outer


def context_of(info: WorkerInfo) -> Context:
    """A context for tasks of this thread, in which ``get_worker_info()`` returns ``info``, and in what they start."""
    context = copy_context()
    context.run(_of_task.set, (info, _here.entered))
    return context
