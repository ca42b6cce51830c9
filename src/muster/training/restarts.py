"""Envs that failed and were restarted while a run trained, in one line each."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape

from muster.rollout.storage import Loss

SAID_AT_ONCE = 5  # of one rollout


def say_restarts(losses: Sequence[Loss], console: Console, *, begun_at: int, num_envs: int) -> None:
    """Says which of ``num_envs`` envs were restarted in a rollout that began at step ``begun_at``, and why.

    Those beyond the fifth are counted.
    """
    for loss in losses[:SAID_AT_ONCE]:
        reason = next((line.strip() for line in loss.reason.splitlines() if line.strip()), "it is not known why")
        step = begun_at + loss.time * num_envs
        said = f"env {loss.env} was restarted at step {step:,}: {reason}"
        console.print(f"[yellow]{escape(said)}[/]", soft_wrap=True)
    if more := len(losses) - SAID_AT_ONCE if len(losses) > SAID_AT_ONCE else 0:
        restarts = f"{more} more restart{'s' * (more > 1)} of envs"
        console.print(f"[yellow]{restarts} until step {begun_at + (losses[-1].time + 1) * num_envs:,}[/]")


@contextmanager
def restarts_unwarned() -> Iterator[None]:
    """Keeps collectors from warning of restarts that are said in lines."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"env \d+ failed and was replaced", RuntimeWarning)
        yield
