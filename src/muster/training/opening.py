"""A run's envs as they are opened, which is said where it takes long."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from muster.training.plan import TrainingPlan
from muster.training.run_envs import expected_workers, open_run_envs
from muster.vector.vector_env import VectorEnv
from muster.workers.start_notice import starts_unsaid

SAID_AFTER_S = 1.0


def start_run_envs(plan: TrainingPlan, console: Console, num_envs: int | None = None, **options: Any) -> VectorEnv:
    """The envs of `open_run_envs`. What takes longer than a second is said meanwhile."""
    count = plan.config.num_envs if num_envs is None else num_envs
    workers = expected_workers(plan, count, **options)
    on_workers = "" if workers is None else f" on {_several(workers, 'worker')}"
    # A worker that is forked from this process must not inherit the locks of a thread that prints.
    if {**plan.options, **options}.get("context") == "fork":
        return open_run_envs(plan, num_envs, **options)
    with starts_unsaid(), _said_later(console, f"starting {_several(count, 'env')}{on_workers}"):
        return open_run_envs(plan, num_envs, **options)


@contextmanager
def _said_later(console: Console, text: str) -> Iterator[None]:
    """Says the text if the ``with`` block takes long: until its end in a terminal, as a line anywhere else."""
    status = console.status(text)
    say = threading.Timer(SAID_AFTER_S, status.start if console.is_terminal else lambda: console.print(text))
    say.start()
    try:
        yield
    finally:
        say.cancel()
        say.join()
        status.stop()


def _several(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count > 1)}"
