"""The states that a run keeps: the newest, copies of it at regular steps, and the one that did best in evaluations."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import Any, NamedTuple

from muster.algorithms import PPO
from muster.errors import UsageError
from muster.training.run_folder import (
    BEST,
    CHECKPOINT,
    COPIES,
    COPY,
    RunFolder,
    files_in,
    has_file,
    read_checkpoint,
    reading,
    remove_file,
    states_in,
)

CHECKPOINT_EVERY_S = 60.0


class Evaluation(NamedTuple):
    """What a policy reached in whole episodes, by its likeliest actions."""

    steps: int  # of the training, so far
    mean_return: float
    mean_length: float  # in env steps


class Checkpoints:
    """Saves a run's states into its folder, while it trains.

    checkpoint.pt is at least as new as every other one, so that no other is beyond what a run goes on from. A state
    that an OSError keeps out waits for the next `save`; of copies only the newest does.

    steps: env steps that the run had made before.  every: env steps between two copies, None for no copies.
    keep: how many copies stay, the newest; None for all.

    best: the evaluation of the state in best.pt, also of what the run had done before; None without one.
    """

    def __init__(self, folder: RunFolder, *, steps: int, every: int | None = None, keep: int | None = None) -> None:
        self._folder, self._every, self._keep = folder, every, keep
        self._steps = steps
        self.best = _best_of(folder.path)
        self._saved_at = -math.inf
        self._waiting: dict[str, dict[str, Any]] = {}

    def save(self, ppo: PPO, evaluation: Evaluation | None = None, *, now: bool = False) -> None:
        """Saves what is due after an iteration. evaluation: of its state.  now: saves checkpoint.pt in any case."""
        due = self._every is not None and ppo.steps // self._every > self._steps // self._every
        self._steps = ppo.steps
        is_best = evaluation is not None and (self.best is None or evaluation.mean_return > self.best.mean_return)
        is_late = time.monotonic() - self._saved_at > CHECKPOINT_EVERY_S
        if not (now or due or is_best or is_late or self._waiting):
            return
        state = ppo.state_dict()
        waiting = {CHECKPOINT: state, **({f"{COPIES}/{_name_of(ppo.steps)}": state} if due else {})}
        if evaluation is not None and is_best:
            waiting[BEST] = {**state, "evaluation": evaluation._asdict()}
            self.best = evaluation
        older = {name: one for name, one in self._waiting.items() if name == BEST or not due}
        self._waiting = {CHECKPOINT: state, **older, **waiting}
        for name in list(self._waiting):
            self._folder.save_checkpoint(self._waiting[name], name)
            del self._waiting[name]
            if name.startswith(COPIES) and self._keep is not None:
                copies = files_in(self._folder.path, COPIES, COPY)
                for old in copies[: len(copies) - self._keep]:
                    remove_file(self._folder.path, old)
        self._saved_at = time.monotonic()


def find_checkpoint(run: Path, checkpoint: str | os.PathLike[str] | None) -> tuple[Path, str]:
    """A checkpoint of the run in the folder ``run``: a folder, and the name of the file there, as `open_file` takes it.

    checkpoint: the steps or the name of a copy, or another file's name in the folder, such as "best"; with or without
    .pt; or a path. None for the newest. Raises UsageError, which lists what there is.
    """
    if checkpoint is None:
        return run, CHECKPOINT
    name = os.fspath(checkpoint)
    steps = name.replace("_", "")
    names = [*([_name_of(int(steps))] if steps.isdecimal() else []), name, f"{name}.pt"]
    for one in (*(f"{COPIES}/{one}" for one in names), *names):
        if has_file(run, one):
            return run, one
    path = Path(name)
    if path.is_file():
        for folder in path.absolute().parents:
            if folder.samefile(run):
                return run, str(path.absolute().relative_to(folder))
        return path.resolve().parent, path.resolve().name  # the user's own, who may have links
    there = [Path(one).stem for one in states_in(run)]
    raise UsageError(f"{run} has no checkpoint {name!r}, which is no file either; it has: {', '.join(there) or 'none'}")


def _best_of(run: Path) -> Evaluation | None:
    """The evaluation that best.pt holds beside the state. Raises UsageError where the file is damaged."""
    if not has_file(run, BEST):
        return None
    with reading(run / BEST):
        held = read_checkpoint(run, BEST).get("evaluation")
        if held is None:
            return None
        return Evaluation(int(held["steps"]), float(held["mean_return"]), float(held["mean_length"]))


def _name_of(steps: int) -> str:
    return f"{steps:012d}.pt"  # names in the order of the steps
