"""Curves of returns over env steps, drawn into a PNG: that of a run from its metrics.csv, or any."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from muster.errors import UsageError, printable
from muster.extras import imports_for
from muster.training.run_folder import METRICS, read_columns, reading, write_named

Rows = np.ndarray[tuple[int, int], np.dtype[np.float64]]
MUTED, GOAL = "#6b7280", "#059669"


class Picture:
    """Axes of returns over env steps, empty at first. Raises ImportError without matplotlib.

    A Figure of its own, without pyplot, leaves the caller's backend and open figures alone.
    """

    def __init__(self, title: str) -> None:
        with imports_for("Plots need", "muster-rl[train]", "matplotlib"), _any_backend():
            from matplotlib import style
            from matplotlib.figure import Figure
            from matplotlib.ticker import EngFormatter, MaxNLocator
        self._styled = partial(style.context, Path(__file__).with_suffix(".mplstyle"))
        with self._styled():
            self.figure: Any = Figure()
            axes = self.axes = self.figure.add_subplot()
            axes.set(title=printable(title), xlabel="env steps", ylabel="return")
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        vars(self.figure)["_repr_png_"] = self.content  # notebooks show it, whatever their backend

    def draw(self, steps: Any, values: Any, low: Any, high: Any, *, label: str, band: str | None) -> None:
        """A curve [R] of the next colour in its band, with its last value. band: the band's label, None for none."""
        with self._styled():
            (line,) = self.axes.plot(steps, values, label=printable(label))
        color = line.get_color()
        self.axes.fill_between(steps, low, high, color=color, alpha=0.13, linewidth=0, label=band)
        self.axes.plot(steps[-1:], values[-1:], "o", color=color, markersize=6, clip_on=False, zorder=5)
        self.axes.annotate(f"{values[-1]:,.1f}", (steps[-1], values[-1]), (9, 0), color=color,
                           textcoords="offset points", weight="bold", va="center", annotation_clip=False)  # fmt: skip

    def say(self, text: str) -> None:
        """Shows a text in the place of curves."""
        self.axes.text(0.5, 0.5, text, transform=self.axes.transAxes, color=MUTED, ha="center", va="center")
        self.axes.set(xticks=[], yticks=[])

    def finished(self) -> Any:
        """The figure, with a legend of what was drawn."""
        handles, _ = self.axes.get_legend_handles_labels()
        if handles and not self.figure.legends:  # below the curves, wherever these go
            with self._styled():
                self.figure.legend(loc="outside lower center", ncols=min(len(handles), 3))
        return self.figure

    def content(self, kind: str = "png") -> bytes:
        """The picture as a file has it."""
        file = io.BytesIO()
        self.finished().savefig(file, format=kind)
        return file.getvalue()

    def save(self, path: Path) -> None:
        """Writes the picture, a PNG or what else the suffix names. Raises UsageError for a suffix that is unknown."""
        try:
            content = self.content(path.suffix[1:] or "png")
        except ValueError as error:
            raise UsageError(f"{path} cannot be written as a picture: {error}") from None
        write_named(path, content)


@contextmanager
def _any_backend() -> Iterator[None]:
    """Imports of matplotlib whatever MPLBACKEND says: a notebook's is refused outside of it, and pictures need none."""
    backend = os.environ.pop("MPLBACKEND", None)
    try:
        yield
    finally:
        if backend is not None:
            os.environ["MPLBACKEND"] = backend


def learning_curve(run: Path, *, title: str, goal: float | None = None) -> Picture:
    """The mean return over env steps of the run in the folder ``run``, in the band of most of the last 100 episodes.

    With several groups of agents, each also has a curve, without a band.

    While no episode has ended the picture says so.  goal: the return that counts as solved, drawn as a line. Raises
    ImportError without matplotlib.
    """
    picture, columns = Picture(title), read_columns(run)
    curve = _curve(run, columns, "mean_return", "low_return", "high_return")
    if len(curve):
        steps, mean, low, high = curve.T
        picture.draw(steps, mean, low, high, label="mean of the last 100 episodes", band="10th to 90th percentile")
        for name in columns:
            if name.startswith("mean_return/") and name.count("/") == 1:
                steps_of, means = _curve(run, columns, name).T
                picture.draw(steps_of, means, means, means, label=f"mean of {name.partition('/')[2]}", band=None)
        picture.axes.set_xlim(0, steps[-1])
        if goal is not None:
            label = f"solved: {goal:,g}"
            picture.axes.axhline(goal, color=GOAL, linewidth=1.2, linestyle=(0, (5, 4)), label=label, zorder=1)
    else:
        picture.say("no episode has ended yet")
    return picture


def read_curve(run: Path) -> Rows:
    """Rows [R, 4] of steps, mean, low and high return; from the first row on in which an episode had ended.

    Raises UsageError where metrics.csv in the folder ``run`` is no run's.
    """
    return _curve(run, read_columns(run), "mean_return", "low_return", "high_return")


def _curve(run: Path, columns: Mapping[str, Any], *names: str) -> Rows:
    """The steps and the columns of these names, in the rows in which the first of them has a value."""
    with reading(run / METRICS):
        table: Rows = np.array([columns[name] if columns else [] for name in ("steps", *names)]).T
        return table[~np.isnan(table[:, 1])]


def drawn(path: Path, draw: Callable[[], object]) -> str:
    """Draws a picture; returns its path, or in words why there is none: a run does not fail by its picture."""
    try:
        draw()
    except Exception as error:
        return f"warning: it could not be drawn: {type(error).__name__}: {error}"
    return str(path)
