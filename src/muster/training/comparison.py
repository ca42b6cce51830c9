"""Several runs in one picture, and what many seeds of the same run reach together.

The interquartile mean and its interval are those of Agarwal et al. 2021 (arXiv:2108.13264) for one env.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from muster.errors import UsageError
from muster.training.picture import Picture, read_curve
from muster.training.plan import plan_of

RESAMPLES = 2_000
POINTS = 200  # of a drawn curve

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def interquartile_mean(scores: Array) -> Array:
    """The mean of the middle half of `scores` [R, ...] over R runs, ``[...]``: a quarter is cut off at each end.

    As scipy's ``trim_mean(scores, 0.25)``, it leaves out whole runs: none of fewer than 4.
    """
    cut = len(scores) // 4
    middle: Array = np.sort(scores, axis=0)[cut : len(scores) - cut].mean(0)
    return middle


def interval(scores: Array, *, seed: int = 0) -> tuple[Array, Array]:
    """The 95 % bootstrap interval of the interquartile mean of `scores` [R, ...]: its bounds, each ``[...]``."""
    drawn = np.random.default_rng(seed).integers(len(scores), size=(RESAMPLES, len(scores)))
    means = np.stack([interquartile_mean(scores[rows]) for rows in drawn])
    low, high = np.percentile(means, [2.5, 97.5], axis=0)
    return low, high


def compare_runs(paths: Sequence[Path], plot_path: Path) -> dict[str, int]:
    """Draws the runs in the folders ``paths`` into a PNG; returns how many runs each curve stands for, by its label.

    A folder that holds run folders stands for these. Runs that differ in nothing but the seed are one curve. Raises
    UsageError where there is no run, ImportError without matplotlib.
    """
    plans = {run: plan_of(run) for path in paths for run in _runs_in(path)}
    envs = dict.fromkeys(plan.name for plan in plans.values())
    groups: dict[str, list[Path]] = {}
    for run, plan in plans.items():
        label = f"preset {plan.preset} {plan.differences()}".rstrip()
        groups.setdefault(f"{plan.name}, {label}" if len(envs) > 1 else label, []).append(run)
    plot_comparison(groups, plot_path, title=", ".join(envs))
    return {label: len(runs) for label, runs in groups.items()}


def _runs_in(path: Path) -> list[Path]:
    if (path / "config.json").exists():
        return [path]
    runs = sorted(config.parent for config in path.glob("*/config.json"))
    if not runs:
        raise UsageError(f"{path} holds no run: neither it nor a folder in it has a config.json.")
    return runs


def plot_comparison(groups: Mapping[str, Sequence[Path]], plot_path: Path, *, title: str) -> None:
    """Draws a curve for each group of runs into a PNG: the mean return of one, the interquartile mean of several.

    groups: the folders of runs, by the group's label. A group's curve goes as far as all its runs have come.
    Raises ImportError without matplotlib.
    """
    picture = Picture(title)
    for label, paths in groups.items():
        curves = [curve for curve in map(read_curve, paths) if len(curve)]
        if not curves:
            continue
        first, last = max(curve[0, 0] for curve in curves), min(curve[-1, 0] for curve in curves)
        steps = np.linspace(first, max(first, last), POINTS)
        returns = np.stack([np.interp(steps, curve[:, 0], curve[:, 1]) for curve in curves])
        low, high = interval(returns)
        several = f", {len(curves)} seeds" if len(curves) > 1 else ""
        if several:
            picture.axes.set_ylabel("return: interquartile mean of the seeds, in its 95 % interval")
        picture.draw(steps, interquartile_mean(returns), low, high, label=label + several, band=None)
    if not picture.axes.lines:
        picture.say("no episode has ended yet")
    picture.save(plot_path)
