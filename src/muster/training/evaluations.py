"""A policy that trains, judged at regular steps by whole episodes in envs of their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from rich.console import Console

from muster.algorithms.on_policy import OnPolicy, seed_of
from muster.rollout.evaluation import STEPS_PER_EPISODE, NoEpisodeEnded, evaluate
from muster.training.checkpoints import Evaluation
from muster.training.plan import RunOptions, TrainingPlan
from muster.training.run_envs import RunEnvs, open_run_envs


class Evaluations:
    """Plays the same episodes whenever an evaluation is due; training goes on as it would without.

    envs: as `evaluations_of` makes them.  run: has the number of episodes, and how often they are played.
    console: where it is said what went wrong in them.
    """

    def __init__(self, ppo: OnPolicy[Any], envs: RunEnvs, console: Console, run: RunOptions) -> None:
        self._ppo, self._envs, self._console = ppo, envs, console
        self._every, self._episodes = run.eval_every or 1, run.eval_episodes
        # Other ones than PPO draws from the same seed, so that none of the training's episodes is among these.
        self._seed = seed_of(np.random.SeedSequence(ppo.config.seed, spawn_key=(3,)))

    def due(self, before: int) -> bool:
        """True if the iteration that began after ``before`` steps has reached those of an evaluation."""
        return self._ppo.steps // self._every > before // self._every

    def play(self) -> Evaluation | None:
        """The evaluation of the policy as it is now; None where episodes took too long. Raises as `evaluate`."""
        step, limit = f"{self._ppo.steps:,}", self._episodes * STEPS_PER_EPISODE
        restarts = self._envs.stats()["restarts"]
        try:
            options: dict[str, Any] = {"seed": self._seed, "initial_state": self._ppo.network.initial_state}
            options |= {"max_steps": limit, "episode_info": self._ppo.config.episode_info}
            played = evaluate(self._envs, self._ppo.act, episodes=self._episodes, **options)
            ended = len(played.returns)
        except NoEpisodeEnded:
            ended = 0
        if more := self._envs.stats()["restarts"] - restarts:
            self._say(f"{more} restart{'s' * (more > 1)} of envs in the evaluation at step {step}")
        if ended < self._episodes:  # the mean of the rest would favour short ones
            missing = f"{self._episodes - ended} of {self._episodes} episodes"
            self._say(f"The evaluation at step {step} does not count: {missing} had not ended after {limit:,} steps.")
            return None
        means = float(played.returns.mean()), float(played.lengths.mean())
        return Evaluation(self._ppo.steps, *means, played.figures)

    def _say(self, text: str) -> None:
        self._console.print(f"[yellow]{text}[/]")


@contextmanager
def evaluations_of(ppo: OnPolicy[Any], plan: TrainingPlan, console: Console) -> Iterator[Evaluations | None]:
    """The evaluations that the plan asks for; None where it asks for none. Their envs are closed at the end."""
    if plan.run.eval_every is None:
        yield None
        return
    # Never in the training's process: that may have the one instance already that a library allows.
    apart: dict[str, Any] = {"caller_steps": False} if "caller_steps" in plan.options else {}
    with open_run_envs(plan, min(plan.config.num_envs, plan.run.eval_episodes), **apart) as envs:
        yield Evaluations(ppo, envs, console, plan.run)
