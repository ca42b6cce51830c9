"""Curves of returns over env steps, drawn into a PNG: that of a run from its metrics.csv, or any."""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from muster.errors import UsageError, printable
from muster.extras import imports_for
from muster.training.run_folder import METRICS, read_columns, reading, replace_file, write_named

OF_GROUPS = ("#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#be185d", "#4b5563")
Rows = np.ndarray[tuple[int, int], np.dtype[np.float64]]
INK, MUTED, LINE, GOAL = "#1f2937", "#6b7280", "#2563eb", "#059669"


class Picture:
    """Axes of returns over env steps, empty at first. Raises ImportError without matplotlib.

    A Figure of its own, without pyplot, leaves the caller's backend and open figures alone.
    """

    def __init__(self, title: str) -> None:
        with imports_for("Plots need", "muster-rl[train]", "matplotlib"), _any_backend():
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
            from matplotlib.layout_engine import ConstrainedLayoutEngine
            from matplotlib.ticker import EngFormatter, MaxNLocator
        layout = ConstrainedLayoutEngine(w_pad=0.15, h_pad=0.12)

        class ShownFigure(Figure):
            """A figure that notebooks show, whatever their backend."""

            def _repr_png_(self) -> bytes:
                file = io.BytesIO()
                self.savefig(file, format="png")
                return file.getvalue()

        self.figure = ShownFigure(figsize=(9, 5), dpi=160, facecolor="white", layout=layout)
        FigureCanvasAgg(self.figure)
        axes = self.axes = self.figure.add_subplot()
        axes.set_title(printable(title), loc="left", color=INK, fontsize=13, weight="bold", pad=12, parse_math=False)
        axes.set_xlabel("env steps", color=MUTED)
        axes.set_ylabel("return", color=MUTED)
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(colors=MUTED, length=0)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color("#d1d5db")

    def draw(self, steps: Any, values: Any, low: Any, high: Any, *, color: str, label: str, band: str | None) -> None:
        """A curve [R] in its band, with its last value beside it. band: the band's label, None for none."""
        axes, label = self.axes, printable(label)
        axes.fill_between(steps, low, high, color=color, alpha=0.13, linewidth=0, label=band)
        axes.plot(steps, values, color=color, linewidth=2.2, solid_capstyle="round", label=label)
        axes.plot(steps[-1:], values[-1:], "o", color=color, markersize=6, clip_on=False, zorder=5)
        axes.annotate(as_written(f"{values[-1]:,.1f}"), (steps[-1], values[-1]), (9, 0), textcoords="offset points",
                      color=color, weight="bold", va="center", annotation_clip=False)  # fmt: skip

    def say(self, text: str) -> None:
        """Shows a text in the place of curves."""
        self.axes.text(0.5, 0.5, text, transform=self.axes.transAxes, color=MUTED, ha="center", va="center")
        self.axes.set(xticks=[], yticks=[])

    def finished(self) -> Any:
        """The figure, with a legend of what was drawn."""
        handles, _ = self.axes.get_legend_handles_labels()
        if handles and not self.figure.legends:  # below the curves, wherever these go
            columns = min(len(handles), 3)
            style: dict[str, Any] = {"frameon": False, "labelcolor": MUTED, "fontsize": 9}
            for label in self.figure.legend(loc="outside lower center", ncols=columns, **style).get_texts():
                label.set_parse_math(False)  # a name with two $ in it is no formula
        return self.figure

    def save(self, path: Path, write: Callable[[Path, bytes], None] = write_named) -> None:
        """Writes the picture, a PNG or what else the suffix names. Raises UsageError for a suffix that is unknown."""
        self.finished()
        file = io.BytesIO()
        try:
            self.figure.savefig(file, format=path.suffix[1:] or "png")
        except ValueError as error:
            raise UsageError(f"{path} cannot be written as a picture: {error}") from None
        write(path, file.getvalue())


def as_written(number: str) -> str:
    """The number with the minus sign that the axes have."""
    return number.replace("-", "\N{MINUS SIGN}")


@contextmanager
def _any_backend() -> Iterator[None]:
    """Imports matplotlib whatever MPLBACKEND says: a notebook's is refused outside of it, and pictures need none."""
    backend = os.environ.pop("MPLBACKEND", None)
    try:
        yield
    finally:
        if backend is not None:
            os.environ["MPLBACKEND"] = backend


def plot_learning_curve(run: Path, plot_path: Path, *, title: str, goal: float | None = None) -> None:
    """Draws `learning_curve` into a PNG. Raises as that."""
    # A run's own picture: a pipe in its place has no reader to wait for.
    picture = learning_curve(run, title=title, goal=goal)
    picture.save(plot_path, replace_file)


def learning_curve(run: Path, *, title: str, goal: float | None = None) -> Picture:
    """The mean return over env steps of the run in the folder ``run``, in the band of most of the last 100 episodes.

    Where there are several groups of agents, each has a curve without a band besides.

    While no episode has ended the picture says so.  goal: the return that counts as solved, drawn as a line. Raises
    ImportError without matplotlib.
    """
    picture, columns = Picture(title), read_columns(run)
    curve = _curve(run, columns, "mean_return", "low_return", "high_return")
    if len(curve):
        steps, mean, low, high = curve.T
        label, band = "mean of the last 100 episodes", "10th to 90th percentile"
        picture.draw(steps, mean, low, high, color=LINE, label=label, band=band)
        of_groups = [name for name in columns if name.startswith("mean_return/") and name.count("/") == 1]
        for color, name in zip(itertools.cycle(OF_GROUPS), of_groups, strict=False):
            steps_of, means = _curve(run, columns, name).T
            label = f"mean of {name.partition('/')[2]}"
            picture.draw(steps_of, means, means, means, color=color, label=label, band=None)
        picture.axes.set_xlim(0, steps[-1])
        if goal is not None:
            label = as_written(f"solved: {goal:,g}")
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
