"""A run in its folder, as `muster.train` returns it, to be looked at in Python."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import gymnasium as gym

from muster.training.console import run_console
from muster.training.picture import learning_curve
from muster.training.plan import plan_of
from muster.training.run_folder import read_columns
from muster.training.run_policy import RunPolicy
from muster.training.runs import film_run


class Run:
    """A training run, as `muster.train` returns it.

    path: its folder, which `muster.load_policy`, ``muster eval`` and ``resume=`` take, too.
    objects: the env, the wrappers and the network that were handed over.
    """

    def __init__(self, path: str | os.PathLike[str], objects: Mapping[str, Any] | None = None) -> None:
        self.path = Path(path)
        self._objects = objects or {}

    @property
    def metrics(self) -> dict[str, Any]:
        """The columns of metrics.csv, float64 [R] each, a row for each iteration; nan where there was no value."""
        return read_columns(self.path)

    @cached_property
    def policy(self) -> RunPolicy:
        """The policy that was learnt, as `muster.load_policy` gives it."""
        return RunPolicy(self.path, trust=True, objects=self._objects)

    def plot(self) -> Any:
        """The learning curve, as a matplotlib Figure, which notebooks show."""
        plan = plan_of(self.path)
        spec = gym.registry.get(plan.env.rpartition(":")[2])
        goal = None if spec is None else spec.reward_threshold
        return learning_curve(self.path, title=plan.title, goal=goal).finished()

    def film(self, path: str | os.PathLike[str] | None = None, *, seed: int = 0, max_steps: int | None = None) -> Path:
        """Films an episode by the likeliest actions, and returns where the film lies.

        path: ends in .mp4; None for film.mp4 in the run's folder.  seed: of the env.
        max_steps: after which the film ends; None for those of `muster eval`.
        Raises UsageError where the env renders no frames, and ImportError without PyAV.
        """
        to = self.path / "film.mp4" if path is None else Path(path)
        film_run(self.policy, run_console(), to, seed=seed, max_steps=max_steps)
        return to

    def __repr__(self) -> str:
        return f"<run in {str(self.path)!r}>"
