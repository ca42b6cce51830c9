"""The picture of a run's learning curve, drawn from its metrics.csv."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np

from muster.training.picture import Picture, as_written
from muster.training.run_folder import reading

LINE, GOAL = "#2563eb", "#059669"


def plot_learning_curve(metrics_path: Path, plot_path: Path, *, title: str, goal: float | None = None) -> None:
    """Draws mean return over env steps, with the band that holds most of the last 100 episodes, into a PNG.

    While no episode has ended the picture says so.  goal: the return that counts as solved, drawn as a line. Raises
    ImportError without matplotlib.
    """
    picture = Picture(title)
    curve = read_curve(metrics_path)
    if len(curve):
        steps, mean, low, high = curve.T
        label, band = "mean of the last 100 episodes", "10th to 90th percentile"
        picture.draw(steps, mean, low, high, color=LINE, label=label, band=band)
        picture.axes.set_xlim(0, steps[-1])
        if goal is not None:
            label = as_written(f"solved: {goal:,g}")
            picture.axes.axhline(goal, color=GOAL, linewidth=1.2, linestyle=(0, (5, 4)), label=label, zorder=1)
    else:
        picture.say("no episode has ended yet")
    picture.save(plot_path)


def read_curve(metrics_path: Path) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
    """Rows [R, 4] of steps, mean, low and high return; from the first row on in which an episode had ended.

    Raises UsageError where the file is no run's.
    """
    with metrics_path.open(newline="", encoding="utf-8") as file, reading(metrics_path):
        rows = [
            [float(row[name]) for name in ("steps", "mean_return", "low_return", "high_return")]
            for row in csv.DictReader(file)
            if row["mean_return"]
        ]
    return np.array(rows, dtype=np.float64).reshape(-1, 4)
