"""The terminal while a policy trains: one live line, and a line for each env that failed and was restarted."""

from __future__ import annotations

import errno
import math
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any, cast

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn

from muster.doctor.plain_console import PlainConsole
from muster.errors import DISK_FULL
from muster.rollout.storage import Loss

RECENT_S = 10.0
PLAIN_EVERY_S = 10.0
ROOM = 100  # columns of a line that has steps/s and an evaluation
SAID_AT_ONCE = 5  # restarts of one rollout


class EnduringOutput:
    """A stream for what a run says. Where it takes nothing for now, the run goes on all the same."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with _enduring():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with _enduring():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _enduring() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (*DISK_FULL, errno.EIO):  # the last one of a terminal that has gone
            raise


def run_console() -> Console:
    """A console on stdout for what a run says."""
    return PlainConsole(highlight=False, soft_wrap=True, file=cast(IO[str], EnduringOutput(sys.stdout)))


class TrainingDisplay:
    """Steps, steps/s, mean return and time left on one line, for use in a ``with`` block.

    In a terminal the line is redrawn in place; a file or a pipe receives a new line every 10 s.
    steps: env steps that the run had made before.
    """

    def __init__(self, console: Console, total_steps: int, *, steps: int = 0) -> None:
        self._console, self._total_steps, self._begun_at = console, total_steps, steps
        self._printed_at = time.monotonic()
        self._evaluation = ""
        self._line = Progress(
            BarColumn(bar_width=None, complete_style="blue", finished_style="green"),
            TextColumn("{task.description}"),
            console=console,
            transient=True,
            # Only ``update`` draws the line: a thread that draws would take time from the training.
            auto_refresh=False,
            speed_estimate_period=RECENT_S,
            get_time=time.monotonic,
            expand=True,
            disable=not console.is_terminal,
        )
        self._task = self._line.add_task("collecting the first rollout", total=total_steps, completed=steps)
        self._line.advance(self._task, 0)  # from here its speed counts

    def update(self, steps: int, mean_return: float, *, evaluated: float | None = None) -> None:
        """Shows the state after ``steps`` env steps; mean_return may be nan.

        evaluated: the mean return of an evaluation, shown until the next one.
        """
        if evaluated is not None:
            self._evaluation = f" (eval {format_return(evaluated)})"
        self._line.update(self._task, completed=steps)
        (task,) = self._line.tasks
        # Rich has none where an iteration takes longer than what is recent.
        speed = task.speed or (steps - self._begun_at) / max(task.elapsed or 0, 1e-9)
        parts = (
            f"{steps:{len(f'{self._total_steps:,}')},}/{self._total_steps:,} steps",
            f"{speed:7,.0f} steps/s",
            f"return {format_return(mean_return):>6}{self._evaluation}",
            f"{format_seconds(max(self._total_steps - steps, 0) / speed):>4} left",
        )
        if self._console.is_terminal:
            has_room = not self._evaluation or self._console.width >= ROOM
            styled = f"{parts[0]}  " + f"[dim]{parts[1]}[/]  " * has_room + f"[bold]{parts[2]}[/]  [dim]{parts[3]}[/]"
            self._line.update(self._task, description=styled, refresh=True)
        elif time.monotonic() - self._printed_at >= PLAIN_EVERY_S:
            self._printed_at = time.monotonic()
            self._console.print("  ".join(parts), soft_wrap=True)

    def __enter__(self) -> TrainingDisplay:
        self._line.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._line.stop()


def format_return(value: float) -> str:
    return "none yet" if math.isnan(value) else f"{value:,.1f}"


def format_seconds(seconds: float) -> str:
    """A duration as ``42 s``, ``3 min 20 s``, ``2 h 5 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def say_restarts(losses: Sequence[Loss], console: Console, *, begun_at: int, num_envs: int) -> None:
    """Says which of ``num_envs`` envs were restarted in a rollout that began at step ``begun_at``, and why.

    Those beyond the fifth are counted.
    """
    for loss in losses[:SAID_AT_ONCE]:
        reason = next((line.strip() for line in loss.reason.splitlines() if line.strip()), "it is not known why")
        step = begun_at + loss.time * num_envs
        said = f"env {loss.env} was restarted at step {step:,}: {reason}"
        console.print(f"[yellow]{escape(said)}[/]")
    if more := len(losses[SAID_AT_ONCE:]):
        restarts = f"{more} more restart{'s' * (more > 1)} of envs"
        console.print(f"[yellow]{restarts} until step {begun_at + (losses[-1].time + 1) * num_envs:,}[/]")


@contextmanager
def restarts_unwarned() -> Iterator[None]:
    """Keeps collectors from warning of restarts that are said in lines."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"env \d+ failed and was replaced", RuntimeWarning)
        yield
