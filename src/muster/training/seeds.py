"""The same run by several seeds, one after the other, and what they reach together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.markup import escape

from muster.training import runs
from muster.training.comparison import compare_runs, interquartile_mean, interval
from muster.training.picture import drawn, read_curve
from muster.training.plan import TrainingPlan
from muster.training.run_folder import CHECKPOINT, new_folder, require_none


def train_seeds(
    plan: TrainingPlan, count: int, console: Console, *, run_dir: Path | None, callback: runs.Callback | None = None
) -> runs.Ended:
    """Trains ``count`` runs, from the plan's seed on, each in envs and in a folder ``seed<k>`` of its own.

    At the end, also where an error or a signal is the end of all, comparison.png has what there is.
    run_dir: the folder of these folders, None for a new one in ``runs/``.
    callback: of each run.
    Returns as `runs.train`. Raises as that, and UsageError before anything where one of the folders holds a run.
    """
    seeds = range(plan.config.seed, plan.config.seed + count)
    parent = run_dir or new_folder(Path("runs"), f"{plan.name}-seeds")
    for seed in seeds:
        require_none(parent / f"seed{seed}")
    begun: list[Path] = []
    try:
        for seed in seeds:
            begun.append(parent / f"seed{seed}")
            one = replace(plan, config=replace(plan.config, seed=seed))
            stopped = runs.train(one, console, run_dir=begun[-1], callback=callback).stopped
            if stopped is not None:
                return runs.Ended(begun, stopped)
    finally:
        _print_result([run for run in begun if (run / CHECKPOINT).exists()], parent, console)
    return runs.Ended(begun, None)


def _print_result(found: Sequence[Path], parent: Path, console: Console) -> None:
    picture = parent / "comparison.png"
    comparison = drawn(picture, partial(compare_runs, found, picture)) if found else ""
    curves = [curve for run in found if len(curve := read_curve(run))]
    if not curves:
        return
    last = np.array([curve[-1, 1] for curve in curves])
    low, high = interval(last)
    lines = {
        "seeds": f"[bold]{interquartile_mean(last):,.1f}[/] is the interquartile mean of the last mean returns of "
        f"{len(last)}, {low:,.1f} to {high:,.1f} its 95 % interval",
        "comparison": escape(comparison),
    }
    for name, text in lines.items():
        console.print(f"[dim]{name:>15}[/]  {text}")
