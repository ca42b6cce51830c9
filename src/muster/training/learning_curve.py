"""The picture of a run's learning curve, drawn from its metrics.csv."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from muster.extras import imports_for

INK, LINE, GOAL = "#1f2937", "#2563eb", "#059669"
MUTED = "#6b7280"


def plot_learning_curve(metrics_path: Path, plot_path: Path, *, title: str, goal: float | None = None) -> bool:
    """Draws mean return over env steps, with the band that holds most of the last 100 episodes, into a PNG.

    goal: the return that counts as solved, drawn as a line. Returns False, and draws nothing, while no episode has
    ended. Raises ImportError without matplotlib.
    """
    with imports_for("Plots need", "muster-rl[train]", "matplotlib"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import EngFormatter, MaxNLocator

    curve = _read(metrics_path)
    if not len(curve):
        return False
    steps, mean, low, high = curve.T

    # A Figure of our own, without pyplot, leaves the caller's backend and open figures alone.
    figure = Figure(figsize=(9, 5), dpi=160, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.fill_between(steps, low, high, color=LINE, alpha=0.13, linewidth=0, label="10th to 90th percentile")
    axes.plot(steps, mean, color=LINE, linewidth=2.2, solid_capstyle="round", label="mean of the last 100 episodes")
    axes.plot(steps[-1:], mean[-1:], "o", color=LINE, markersize=6, clip_on=False, zorder=5)
    axes.annotate(f"{mean[-1]:,.1f}", (steps[-1], mean[-1]), (9, 0), textcoords="offset points", color=LINE,
                  weight="bold", va="center", annotation_clip=False)  # fmt: skip
    if goal is not None:
        axes.axhline(goal, color=GOAL, linewidth=1.2, linestyle=(0, (5, 4)), label=f"solved: {goal:,g}", zorder=1)

    axes.set_title(title, loc="left", color=INK, fontsize=13, weight="bold", pad=12)
    axes.set_xlabel("env steps", color=MUTED)
    axes.set_ylabel("return", color=MUTED)
    axes.set_xlim(0, steps[-1])
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=MUTED, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#d1d5db")
    axes.legend(facecolor="white", edgecolor="none", labelcolor=MUTED, loc="best", fontsize=9)
    figure.savefig(plot_path)
    return True


def _read(metrics_path: Path) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Rows [R, 4] of steps, mean, low and high return; from the first row on in which an episode had ended."""
    with metrics_path.open(newline="", encoding="utf-8") as file:
        rows = [
            [float(row[name]) for name in ("steps", "mean_return", "low_return", "high_return")]
            for row in csv.DictReader(file)
            if row["mean_return"]
        ]
    return np.array(rows, dtype=np.float64).reshape(-1, 4)
