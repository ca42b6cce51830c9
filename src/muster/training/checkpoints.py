"""The states that a run keeps: the newest, copies of it at regular steps, and the one that did best in evaluations."""

from __future__ import annotations

import math
import os
import time
from pathlib import Path
from typing import NamedTuple

from muster.algorithms import PPO
from muster.errors import UsageError
from muster.training.run_folder import RunFolder, read_checkpoint

CHECKPOINT_EVERY_S = 60.0
BEST = "best.pt"
COPIES = "checkpoints"  # the folder of the copies, in the run's


class Evaluation(NamedTuple):
    """What a policy reached in whole episodes, by its likeliest actions."""

    steps: int  # of the training, so far
    mean_return: float
    mean_length: float  # in env steps


class Checkpoints:
    """Saves a run's states into its folder, while it trains.

    checkpoint.pt is at least as new as every other one, so that no other is beyond what a run goes on from.

    steps: env steps that the run had made before.  every: env steps between two copies, None for no copies.
    keep: how many copies stay, the newest; None for all.

    best: the evaluation of the state in best.pt, also of what the run had done before; None without one.
    """

    def __init__(self, folder: RunFolder, *, steps: int, every: int | None = None, keep: int | None = None) -> None:
        self._folder, self._every, self._keep = folder, every, keep
        self._steps = steps
        self.best = _best_of(folder.path)
        self._saved_at = -math.inf

    def save(self, ppo: PPO, evaluation: Evaluation | None = None, *, now: bool = False) -> None:
        """Saves what is due after an iteration. evaluation: of its state.  now: saves checkpoint.pt in any case."""
        due = self._every is not None and ppo.steps // self._every > self._steps // self._every
        self._steps = ppo.steps
        is_best = evaluation is not None and (self.best is None or evaluation.mean_return > self.best.mean_return)
        if not (now or due or is_best or time.monotonic() - self._saved_at > CHECKPOINT_EVERY_S):
            return
        state = ppo.state_dict()
        self._folder.save_checkpoint(state)
        self._saved_at = time.monotonic()
        if due:
            self._folder.save_checkpoint(state, f"{COPIES}/{_name_of(ppo.steps)}")
            copies = _copies_in(self._folder.path)
            for old in copies[: len(copies) - self._keep] if self._keep is not None else ():
                old.unlink(missing_ok=True)
        if evaluation is not None and is_best:
            self._folder.save_checkpoint({**state, "evaluation": evaluation._asdict()}, BEST)
            self.best = evaluation


def find_checkpoint(run: Path, checkpoint: str | os.PathLike[str] | None) -> Path:
    """The file of a checkpoint of the run in the folder ``run``.

    checkpoint: the steps or the name of a copy, or another file's name in the folder, such as "best"; with or without
    .pt; or a path. None for the newest. Raises UsageError, which lists what there is.
    """
    if checkpoint is None:
        return run / "checkpoint.pt"
    name = os.fspath(checkpoint)
    steps = name.replace("_", "")
    names = [*([_name_of(int(steps))] if steps.isdecimal() else []), name, f"{name}.pt"]
    paths = [folder / one for folder in (run / COPIES, run) for one in names]
    for path in (*paths, Path(name)):
        if path.is_file():
            return path
    there = [path.stem for path in (run / "checkpoint.pt", run / BEST, *_copies_in(run)) if path.is_file()]
    raise UsageError(f"{run} has no checkpoint {name!r}, which is no file either; it has: {', '.join(there) or 'none'}")


def _best_of(run: Path) -> Evaluation | None:
    """The evaluation that best.pt holds beside the state. Raises UsageError where the file is damaged."""
    if not (run / BEST).is_file():
        return None
    held = read_checkpoint(run, run / BEST).get("evaluation")
    return None if held is None else Evaluation(**held)


def _name_of(steps: int) -> str:
    return f"{steps:012d}.pt"  # names in the order of the steps


def _copies_in(run: Path) -> list[Path]:
    """The copies, the oldest first."""
    return sorted((run / COPIES).glob("*.pt"))
