"""The parts of PPO's loop: the check of a rollout's rows, its rates, and the figures it reports."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from muster.algorithms.ppo_config import PPOConfig
from muster.envs.groups import slots_of
from muster.errors import TrainingDiverged
from muster.rollout.episodes import Episodes, reported

EPISODE_WINDOW = 100


def require_finite_rows(
    collected: Any, steps_before: int, kept_steps: int, agents: Sequence[object] = (), *, what: str = "an observation"
) -> None:
    """Raises TrainingDiverged for the first observation or reward to be learnt from that is not finite in float32.

    collected: an `Experience` with observations as the envs returned them.  steps_before: steps of each env before.
    kept_steps: env steps of the run until then.  agents: their names, where there are several.  what: it is called.

    The final observation of a terminated episode is never learnt from, and may be anything; so may masked rows.
    """
    rewards, terminated, truncated, mask = (
        getattr(collected, name) for name in ("rewards", "terminated", "truncated", "counts")
    )
    bootstraps = mask & truncated & ~terminated
    used = mask.clone()
    used[:, 1:] |= bootstraps[:, :-1]  # where an env is reset in a row of its own, that row has the final observation
    env_ids, times = (index.tolist() for index in collected.final_at.unbind(-1))
    T = mask.shape[1]
    # By the number of steps that the env had made when it returned it, a step's final observation before the reset's.
    found = [(t + 1, 0, env, *agent, "a reward of", rewards[env, t]) for env, t, *agent in _bad(rewards, mask)]
    leaves = zip(*(map(_leaves, (collected.observations, collected.last, collected.finals))), strict=True)
    for observations, last, finals in leaves:
        seen = f"{what} that holds"
        found += [(t, 1, env, *agent, seen, observations[env, t]) for env, t, *agent in _bad(observations, used)]
        found += [
            (times[k] + 1, 0, env_ids[k], *agent, "a final observation that holds", finals[k])
            for k, *agent in _bad(finals, bootstraps[env_ids, times])
        ]
        found += [
            (T, 1, env, *agent, seen, last[env]) for env, *agent in _bad(last, ~(mask[:, -1] & terminated[:, -1]))
        ]
    if not found:
        return
    step, _, env, *agent, returned, row = min(found, key=lambda one: one[:-2])
    row = row[agent[0]] if agent else row
    number = row[~_finite(row)][0].item()
    whose = f"for {agents[agent[0]]!r} " if agent else ""
    when = f"in its step {steps_before + step}" if steps_before + step else "at its first reset"
    raise TrainingDiverged(
        f"Env {env} returned {returned} {number} {whose}{when}; PPO learns from finite numbers of float32 alone. "
        f"Nothing of this rollout was learnt: the state is that after step {kept_steps:,}. Mend the env, or replace "
        "such numbers in a wrapper; make_vec(check_finite=True) raises in the env's own step."
    )


def _leaves(obs: Any) -> list[Tensor]:
    """The tensors of an observation: itself, or those in a TensorDict."""
    return [obs] if isinstance(obs, Tensor) else list(obs.values(include_nested=True, leaves_only=True))


def _bad(rows: Tensor, used: Tensor) -> list[list[int]]:
    """The places of ``used`` (bool, of the first dims of ``rows``) where a row is not finite."""
    if not rows.is_floating_point():
        return []
    finite = _finite(rows)
    while finite.ndim > used.ndim:
        finite = finite.all(-1)
    places: list[list[int]] = torch.nonzero(used & ~finite).tolist()
    return places


def _finite(rows: Tensor) -> Tensor:
    """Whether each number is finite in float32, the policy's dtype."""
    return rows.float().isfinite()


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
        self._first = Rates(*map(float, state["first"]))
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


class EpisodeSummary(NamedTuple):
    """Figures of the last 100 episodes; nan until the first one ends."""

    episodes: int  # ended so far
    mean_return: float
    low_return: float  # 10th percentile
    high_return: float  # 90th percentile
    mean_length: float  # in env steps


class EpisodeWindow:
    """The returns and lengths of the last 100 episodes that ended; a return is the mean over an env's agents.

    groups: the agents of each group; without any, envs have one agent.
    apart: groups whose agents are reported one by one from the start; others are once their returns have differed.
    """

    def __init__(self, groups: Mapping[str, Sequence[Hashable]] | None = None, apart: Collection[str] = ()) -> None:
        self._agents, self._groups, self._apart = groups or {}, slots_of(groups or {}), set(apart)
        self.ended = 0
        self.returns: deque[float] = deque(maxlen=EPISODE_WINDOW)
        self.lengths: deque[int] = deque(maxlen=EPISODE_WINDOW)
        self.by_group: dict[str, deque[list[float]]] = {name: deque(maxlen=EPISODE_WINDOW) for name in self._groups}
        self.infos: dict[str, deque[float]] = {}

    def add(self, episodes: Episodes) -> None:
        """Adds the episodes that ended in a rollout."""
        self.ended += len(episodes.returns)
        self.returns.extend(episodes.means.tolist())
        self.lengths.extend(episodes.lengths.tolist())
        for name, columns in self._groups.items():
            self._extend(name, episodes.returns[:, columns])
        self.infos = {name: self.infos.get(name, deque(maxlen=EPISODE_WINDOW)) for name in episodes.infos}
        for name, numbers in episodes.infos.items():
            self.infos[name].extend(numbers[~np.isnan(numbers)].tolist())

    def _extend(self, group: str, returns: npt.NDArray[np.float64]) -> None:
        self.by_group[group].extend(returns.tolist())
        if (returns != returns[:, :1]).any():
            self._apart.add(group)

    def mean_of(self, group: str) -> float:
        """The mean return of a group's agents; nan until an episode ends."""
        return float(np.mean(self.by_group[group])) if self.by_group[group] else math.nan

    def by_agent(self) -> dict[str, float]:
        """The mean return of each agent that is reported by itself, by "group/agent"; nan until an episode ends."""
        means = dict[str, float]()
        for group in [name for name in self._groups if name in self._apart and len(self._agents[name]) > 1]:
            agents, returns = self._agents[group], self.by_group[group]
            of_agents = np.mean(returns, 0).tolist() if returns else [math.nan] * len(agents)
            means |= {f"{group}/{agent}": mean for agent, mean in zip(agents, of_agents, strict=True)}
        return means

    def summary(self) -> EpisodeSummary:
        if not self.returns:
            return EpisodeSummary(0, math.nan, math.nan, math.nan, math.nan)
        low, high = np.percentile(self.returns, (10, 90))
        mean_return, mean_length = np.mean(self.returns), np.mean(self.lengths)
        return EpisodeSummary(self.ended, float(mean_return), float(low), float(high), float(mean_length))

    def figures(self) -> dict[str, float]:
        """The means of ``episode_info``, each over the last 100 episodes that have it."""
        return {reported(name): float(np.mean(numbers)) for name, numbers in self.infos.items() if numbers}

    def state_dict(self) -> dict[str, Any]:
        groups = {name: list(returns) for name, returns in self.by_group.items()}
        own = {"ended": self.ended, "returns": list(self.returns), "lengths": list(self.lengths), "groups": groups}
        return {**own, "infos": {name: list(numbers) for name, numbers in self.infos.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.ended = int(state["ended"])
        self.returns = deque(map(float, state["returns"]), EPISODE_WINDOW)
        self.lengths = deque(map(int, state["lengths"]), EPISODE_WINDOW)
        for name, returns in self.by_group.items():
            returns.clear()
            for of_one in state["groups"][name]:  # older states have the mean over the agents
                shape = 1, len(self._agents[name])
                self._extend(name, np.broadcast_to(np.array(of_one, np.float64), shape))
        of = state.get("infos", {})  # older states have none
        self.infos = {str(name): deque(map(float, numbers), EPISODE_WINDOW) for name, numbers in of.items()}


class Losses(NamedTuple):
    """The figures of one update, averaged over its minibatches."""

    policy_loss: float  # clipped surrogate
    value_loss: float  # half the mean squared error of the values
    entropy: float  # of the action distribution, in nats
    approx_kl: float  # how far the policy has moved from the one that collected
    clip_fraction: float  # share of rows whose ratio was clipped


def _in_lines(metrics: PPOMetrics | MAPPOMetrics) -> str:
    """The figures in three lines: steps and episodes; losses; the rest."""
    row, episodes = metrics.as_row(), len(EpisodeSummary._fields) + len(metrics.figures) + 1
    figures = [f"{name} {value:,.0f}" if name == "steps" else f"{name} {value:,.4g}" for name, value in row.items()]
    return "\n".join(", ".join(some) for some in (figures[:episodes], figures[episodes:-2], figures[-2:]))


@dataclass(frozen=True)
class PPOMetrics:
    """The figures of one iteration of `PPO`.

    steps: env steps so far.
    episodes: figures of the last 100 episodes: their number so far, the returns' mean, 10th and 90th percentile, and
        the mean length in env steps; nan until the first one ends.
    losses: means over the update's minibatches: policy_loss, value_loss, entropy in nats, approx_kl, clip_fraction.
    explained_variance: of the targets by the values before the update: 1 perfect, 0 no better than the mean.
    learning_rate: that of this iteration.
    figures: by name the means of ``episode_info``, each over the last 100 episodes that have it.

    >>> import muster
    >>> from muster.algorithms import PPO, PPOConfig
    >>> with muster.make_vec("CartPole-v1", num_envs=2, autoreset_mode="same_step") as envs:
    ...     metrics = PPO(envs, PPOConfig(num_envs=2, num_steps=16)).iterate()
    >>> metrics.steps, list(metrics.as_row())[:3]
    (32, ['steps', 'episodes', 'mean_return'])
    """

    steps: int
    episodes: EpisodeSummary
    losses: Losses
    explained_variance: float
    learning_rate: float
    figures: Mapping[str, float] = field(default_factory=dict)

    def as_row(self) -> dict[str, float]:
        """All figures under plain names, as in metrics.csv."""
        rest = {"explained_variance": self.explained_variance, "learning_rate": self.learning_rate}
        return {"steps": self.steps, **self.episodes._asdict(), **self.figures, **self.losses._asdict(), **rest}

    __repr__ = _in_lines


class TeamFigures(NamedTuple):
    """The figures of agents that share a network, in one iteration."""

    group: str
    mean_return: float  # of one agent of their group, over the last 100 episodes
    losses: Losses
    explained_variance: float


@dataclass(frozen=True)
class MAPPOMetrics:
    """The figures of one iteration of `MAPPO`.

    steps, episodes, learning_rate, figures: as of `PPOMetrics`; returns are means over an env's agents.
    teams: by group, or by "group/agent" where agents have networks of their own: the group, its agents' mean_return,
        losses and explained_variance.
    agents: the mean return of each agent by "group/agent", of groups whose agents' returns have differed, or whose
        agents have networks of their own.

    >>> import muster
    >>> from muster.algorithms import MAPPO, MAPPOConfig
    >>> with muster.make_vec("pettingzoo/mpe/simple_spread_v3", num_envs=2, autoreset_mode="same_step") as envs:
    ...     metrics = MAPPO(envs, MAPPOConfig(num_envs=2, num_steps=16)).iterate()
    >>> metrics.steps, metrics.teams["agent"].group
    (32, 'agent')
    """

    steps: int
    episodes: EpisodeSummary
    teams: Mapping[str, TeamFigures]
    learning_rate: float
    figures: Mapping[str, float] = field(default_factory=dict)
    agents: Mapping[str, float] = field(default_factory=dict)

    def as_row(self) -> dict[str, float]:
        """All figures under plain names, as in metrics.csv: where there are several teams, with their names behind."""
        row = {"steps": self.steps, **self.episodes._asdict(), **self.figures}
        groups = {team.group for team in self.teams.values()}
        for name, team in self.teams.items():
            figures = {**team.losses._asdict(), "explained_variance": team.explained_variance}
            if len(self.teams) > 1:
                figures = {f"{figure}/{name}": value for figure, value in figures.items()}
            if len(groups) > 1:
                row[f"mean_return/{team.group}"] = team.mean_return
            row |= figures
        row |= {f"mean_return/{name}": value for name, value in self.agents.items()}
        return {**row, "learning_rate": self.learning_rate}

    __repr__ = _in_lines
