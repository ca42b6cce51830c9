"""The options of PPO and MAPPO, the rates that they lead to, and the figures that both report."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from muster.arguments import check_options, explained, option
from muster.envs.groups import slots_of
from muster.errors import ConfigError
from muster.rollout.episodes import Episodes, reported

POLICIES = ("feedforward", "gru")
MOST_THREADS = 1024  # with very many OpenMP ends the process
EPISODE_WINDOW = 100


@explained
@dataclass(frozen=True)
class PPOConfig:
    """The options of PPO, named as in CleanRL, with defaults that solve CartPole-v1.

    Raises ConfigError for bad values. A value loss is half a squared error here, as in CleanRL, and the whole of it in
    Stable-Baselines3: a ``vf_coef`` from there, or from the zoo, is doubled here.

    >>> from muster.algorithms import PPOConfig
    >>> config = PPOConfig(total_steps=100_000, num_envs=4, num_steps=128)
    >>> config.batch_size, config.num_iterations
    (512, 196)
    """

    total_steps: int = option(200_000, "env steps, rounded up to whole rollouts", least=1)
    seed: int = option(0, "same seed, same policy, with any number of workers", least=0)
    num_envs: int = option(8, "envs stepped in parallel", least=1)
    num_steps: int = option(256, "steps of each env in a rollout", least=1)
    num_minibatches: int = option(4, "pieces of a rollout, each learnt from by itself in a pass", least=1)
    update_epochs: int = option(8, "passes over a rollout", least=1)
    learning_rate: float = option(1e-3, "of Adam, at the start", above=0)
    anneal_lr: bool = option(True, "the learning rate falls in a line to 0")
    gamma: float = option(0.99, "discount of later rewards, for each step", least=0, most=1)
    gae_lambda: float = option(0.95, "0: advantages of one step, 1: of whole episodes", least=0, most=1)
    norm_adv: bool = option(True, "advantages to mean 0 and deviation 1 in each minibatch")
    clip_coef: float = option(0.2, "how far from 1 the ratio of new to old probabilities counts", above=0)
    anneal_clip: bool = option(False, "clip_coef falls in a line to 0")
    clip_vloss: bool = option(
        False, "values may move by clip_coef, in units of returns, from those that were collected"
    )
    ent_coef: float = option(0.0, "weight of the entropy, which keeps the policy exploring", least=0)
    vf_coef: float = option(
        0.5, "weight of the value loss, half a squared error: twice Stable-Baselines3's number", least=0
    )
    max_grad_norm: float = option(0.5, "gradients are scaled down to this norm", above=0, most=math.inf)
    target_kl: float | None = option(
        None, "an update ends before the minibatch that finds the KL over 1.5 times this", above=0
    )
    normalize_observations: bool = option(False, "to mean 0 and deviation 1, as far as they are known")
    normalize_rewards: bool = option(False, "to returns of deviation 1; episodes' returns are reported as they are")
    clip_rewards: float | None = option(
        None, "rewards count for learning at most so much, up or down; returns are unchanged", above=0
    )
    policy: str = option(
        "feedforward", "feedforward; gru, which has a memory; or module:function, which makes one from the two spaces"
    )
    memory_size: int = option(128, "numbers in the memory of gru", least=1)
    sequence_length: int = option(64, "steps that memory learns from in one piece of a rollout, at most", least=1)
    hidden_sizes: tuple[int, ...] = option(
        (64, 64), "layers of policy and value, each its own; images have a CNN instead", least=1
    )
    sprite: int | None = option(
        None, "pixels of a side of the pictures that images are laid out of, such as 8; None: they are not", least=2
    )
    activation: Literal["tanh", "relu", "elu", "gelu"] = option("tanh", "what stands between those layers")
    log_std_init: float = option(
        0.0, "logarithm of continuous actions' deviation at the start, 1 being half their range", least=-20, most=20
    )
    episode_info: tuple[str, ...] | None = option(
        ("is_success",), "names of numbers and flags in episodes' last infos, to report their means; none: none"
    )
    torch_threads: int = option(1, "of the learner; other cores are for the envs' workers", least=1, most=MOST_THREADS)

    @property
    def batch_size(self) -> int:
        """Env steps in one rollout."""
        return self.num_envs * self.num_steps

    @property
    def num_iterations(self) -> int:
        """Rollouts until ``total_steps``."""
        return math.ceil(self.total_steps / self.batch_size)

    @property
    def network(self) -> dict[str, Any]:
        """The options of `ActorCritic`."""
        options = {name: getattr(self, name) for name in ("hidden_sizes", "activation", "log_std_init", "sprite")}
        return {**options, "memory_size": self.memory_size if self.policy == "gru" else 0}

    def __post_init__(self) -> None:
        check_options(self)
        if self.policy not in POLICIES and ":" not in self.policy:
            raise ConfigError(
                "policy", f"{' or '.join(POLICIES)}, or module:function, or file.py:function", self.policy
            )
        most = self.batch_size // 2
        if self.num_minibatches > most:
            expected = f"at most {most}, for each to have 2 of the {self.batch_size} rows of a rollout"
            raise ConfigError("num_minibatches", expected, self.num_minibatches)


@dataclass(frozen=True)
class AgentsOptions:
    """For envs with agents, which MAPPO trains."""

    critic: Literal["centralised", "own"] = option(
        "centralised", "what values are computed from: the env's state, or else all observations (MAPPO); own (IPPO)"
    )
    share_params: Mapping[str, bool] | bool = option(
        True, "whether a group's agents share a network: true, false, or by group, as in '{\"agent\": false}'"
    )

    def shares_params(self, group: str) -> bool:
        """Says if the agents of `group` share one network; those of a group that is not named do."""
        return self.share_params if isinstance(self.share_params, bool) else self.share_params.get(group, True)


@explained
@dataclass(frozen=True)
class MAPPOConfig(AgentsOptions, PPOConfig):
    """The options of MAPPO: those of PPO, and what concerns agents. ``critic="own"`` makes it IPPO.

    ``total_steps`` and ``num_steps`` count env steps; in each all agents of an env may act. Raises ConfigError
    for bad values.

    >>> from muster.algorithms import MAPPOConfig
    >>> config = MAPPOConfig(critic="own", share_params={"wolves": False})
    >>> config.shares_params("wolves"), config.shares_params("sheep")
    (False, True)
    """


class Rates(NamedTuple):
    """The rates of one iteration."""

    learning_rate: float
    clip_coef: float


class Schedule:
    """Gives the rates at each step; those that are annealed fall in a line to 0 at the end of the run.

    began_again: the run that was loaded had finished, and starts with its first learning rate again.
    """

    def __init__(self, config: PPOConfig) -> None:
        self._config, self.began_again = config, False
        last_step = config.num_iterations * config.batch_size
        # A run ends with total_steps, before the last step where rows are left out.
        self._line: dict[str, Any] = {"first_step": 0, "last_step": last_step, "total_steps": config.total_steps}
        self._line["first"] = [config.learning_rate, config.clip_coef]

    def at(self, steps: int) -> Rates:
        """The rates of the iteration that starts after ``steps`` env steps."""
        first_step, (learning_rate, clip_coef) = self._line["first_step"], self._line["first"]
        left = max(1 - (steps - first_step) / max(self._line["last_step"] - first_step, 1), 0.0)
        anneal_lr, anneal_clip = self._config.anneal_lr, self._config.anneal_clip
        return Rates(learning_rate * (left if anneal_lr else 1), clip_coef * (left if anneal_clip else 1))

    def state_dict(self) -> dict[str, Any]:
        return self._line

    def load_state_dict(self, state: Mapping[str, Any], steps: int, learning_rate: float | None = None) -> None:
        """Goes on from the rates that a run had reached after ``steps``, to 0 at the end that the config sets.

        A run that had finished starts with the config's rates again.  learning_rate: starts with this one instead.
        """
        new = Schedule(self._config)._line
        self._line, self.began_again = new | {"first": [*map(float, state["first"])]}, False
        self._line |= {name: int(state[name]) for name in ("first_step", "last_step")}
        if self._line["last_step"] == new["last_step"] and learning_rate is None:
            return
        finished = steps >= int(state["total_steps"])
        self.began_again = finished and self._config.anneal_lr and learning_rate is None
        reached, clip_coef = new["first"] if finished else self.at(steps)
        first = [reached if learning_rate is None else learning_rate, clip_coef]
        self._line = new | {"first_step": steps, "first": first}


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
    apart: groups with agents that are reported one by one from the start; others are once their returns have differed.
    """

    def __init__(self, groups: Mapping[str, Sequence[Hashable]] | None = None, apart: Collection[str] = ()) -> None:
        self._agents, self._groups, self._apart = groups or {}, slots_of(groups or {}), set(apart)
        self.ended = 0
        self.returns, self.lengths = _recent(), _recent()
        self.by_group = {name: _recent() for name in self._groups}
        self.infos: dict[str, deque[Any]] = {}

    def add(self, episodes: Episodes) -> None:
        """Adds the episodes that ended in a rollout."""
        self.ended += len(episodes.returns)
        self.returns.extend(episodes.means.tolist())
        self.lengths.extend(episodes.lengths.tolist())
        for name, columns in self._groups.items():
            self._extend(name, episodes.returns[:, columns])
        self.infos = {name: self.infos.get(name, _recent()) for name in episodes.infos}
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
        self.returns, self.lengths = _recent(map(float, state["returns"])), _recent(map(int, state["lengths"]))
        self.by_group = {name: _recent() for name in self._groups}
        for name, agents in self._agents.items():
            self._extend(name, np.array(state["groups"][name], np.float64).reshape(-1, len(agents)))
        self.infos = {str(name): _recent(map(float, numbers)) for name, numbers in state["infos"].items()}


def _recent(some: Iterable[Any] = ()) -> deque[Any]:
    return deque(some, EPISODE_WINDOW)


class Losses(NamedTuple):
    """The figures of one update, averaged over its minibatches."""

    policy_loss: float  # clipped surrogate
    value_loss: float  # half the mean squared error of the values
    entropy: float  # of the action distribution, in nats
    approx_kl: float  # how far the policy has moved from the one that collected
    clip_fraction: float  # share of rows with a clipped ratio


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
    agents: the mean return of each agent by "group/agent", of groups with returns that have
        differed, or with a network for each agent.

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
