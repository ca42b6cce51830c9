"""The learning rate and the clip range over a run, and over a run that goes on for longer than it was to last."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from muster.algorithms.ppo_config import PPOConfig


class Rates(NamedTuple):
    """What one iteration learns with."""

    learning_rate: float
    clip_coef: float


class Schedule:
    """Gives the rates at each step; those that are annealed fall in a line to 0 at the end of the run.

    began_again: the run that was loaded had finished, and starts with its first learning rate again.
    """

    def __init__(self, config: PPOConfig) -> None:
        self._config = config
        self._first_step, self._last_step = 0, config.num_iterations * config.batch_size
        self._total_steps = config.total_steps  # a run ends with these, before the last step where rows are left out
        self._first = Rates(config.learning_rate, config.clip_coef)
        self.began_again = False

    def at(self, steps: int) -> Rates:
        """The rates of the iteration that starts after ``steps`` env steps."""
        length = max(self._last_step - self._first_step, 1)
        left = max(1 - (steps - self._first_step) / length, 0.0)
        return Rates(
            self._first.learning_rate * (left if self._config.anneal_lr else 1),
            self._first.clip_coef * (left if self._config.anneal_clip else 1),
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "first_step": self._first_step,
            "last_step": self._last_step,
            "total_steps": self._total_steps,
            "first": list(self._first),
        }

    def load_state_dict(self, state: Mapping[str, Any], steps: int, learning_rate: float | None = None) -> None:
        """Goes on from the rates that a run had reached after ``steps``, to 0 at the end that the config sets.

        A run that had finished starts with the config's rates again.  learning_rate: starts with this one instead.
        """
        last_step = self._last_step
        self._first_step, self._last_step = int(state["first_step"]), int(state["last_step"])
        finished = steps >= int(state["total_steps"])
        self._first = Rates(*state["first"])
        self.began_again = False
        if self._last_step == last_step and learning_rate is None:
            return
        if finished:
            self._first = Rates(self._config.learning_rate, self._config.clip_coef)
            self.began_again = self._config.anneal_lr and learning_rate is None
        else:
            self._first = self.at(steps)
        if learning_rate is not None:
            self._first = self._first._replace(learning_rate=learning_rate)
        self._first_step, self._last_step = steps, last_step
