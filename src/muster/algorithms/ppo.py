"""PPO (Schulman et al. 2017, arXiv:1707.06347) over a vector env, in one file to be read from top to bottom.

    envs = muster.make_vec("CartPole-v1", num_envs=8, autoreset_mode="same_step")
    ppo = PPO(envs, PPOConfig(total_steps=100_000))
    for metrics in ppo.train():
        print(metrics.steps, metrics.episodes.mean_return)

One iteration collects ``num_steps`` steps of ``num_envs`` envs, then learns from them for ``update_epochs`` passes. A
truncated episode is bootstrapped from its final observation: a time limit is no termination. Everything random comes
from ``seed``, through generators of its own: the same seed leads to the same policy, torch's global generator stays
as it was, and runs with neighbouring seeds share nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import VectorEnv
from torch import Tensor, nn

from muster.algorithms.actor_critic import ActorCritic
from muster.algorithms.normalization import ObservationNormalizer, RewardNormalizer
from muster.arguments import at_least
from muster.errors import ConfigError, TrainingDiverged, UsageError
from muster.rollout.collector import Collector
from muster.rollout.episodes import Episodes
from muster.rollout.returns import gae

EPISODE_WINDOW = 100


@dataclass(frozen=True)
class PPOConfig:
    """The options of PPO; names as in CleanRL, defaults that solve CartPole-v1. Raises ConfigError for bad values."""

    total_steps: int = 200_000  # env steps, rounded up to whole rollouts
    seed: int = 0
    num_envs: int = 8
    num_steps: int = 256  # per env and rollout
    num_minibatches: int = 4
    update_epochs: int = 8
    learning_rate: float = 1e-3
    anneal_lr: bool = True  # linearly to 0
    gamma: float = 0.99
    gae_lambda: float = 0.95
    norm_adv: bool = True  # advantages to mean 0 and deviation 1 in each minibatch
    clip_coef: float = 0.2
    clip_vloss: bool = False
    ent_coef: float = 0.0
    vf_coef: float = 0.5
    max_grad_norm: float = 0.5
    target_kl: float | None = None  # end the update's passes once the policy has moved this far
    normalize_observations: bool = False  # to mean 0 and deviation 1, as far as they are known
    normalize_rewards: bool = False  # to returns of deviation 1; episodes' returns are reported as they are
    torch_threads: int = 1  # the other cores belong to the envs' workers

    @property
    def batch_size(self) -> int:
        """Env steps in one rollout."""
        return self.num_envs * self.num_steps

    @property
    def num_iterations(self) -> int:
        return math.ceil(self.total_steps / self.batch_size)

    def __post_init__(self) -> None:
        total = self.total_steps
        at_least("PPOConfig: total_steps", int(total) if isinstance(total, float) else total, 1, end=".")  # 1e6 is fine
        for name in ("num_envs", "num_steps", "num_minibatches", "update_epochs", "torch_threads"):
            at_least(f"PPOConfig: {name}", getattr(self, name), 1, end=".")
        if self.seed < 0:
            raise ConfigError(f"PPOConfig: seed must not be negative, got {self.seed}.")
        for name in ("gamma", "gae_lambda"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"PPOConfig: {name} must lie in [0, 1], got {getattr(self, name)}.")
        if self.batch_size < 2 * self.num_minibatches:
            raise ConfigError(
                f"PPOConfig: a rollout of num_envs={self.num_envs} x num_steps={self.num_steps} rows is too small for "
                f"num_minibatches={self.num_minibatches}; each needs at least 2 rows."
            )


class EpisodeSummary(NamedTuple):
    """Figures of the last 100 episodes; nan until the first one ends."""

    episodes: int  # ended so far
    mean_return: float
    low_return: float  # 10th percentile
    high_return: float  # 90th percentile
    mean_length: float  # in env steps


class Losses(NamedTuple):
    """The figures of one update, averaged over its minibatches."""

    policy_loss: float  # clipped surrogate
    value_loss: float  # half the mean squared error of the values
    entropy: float  # of the action distribution, in nats
    approx_kl: float  # how far the policy has moved from the one that collected
    clip_fraction: float  # share of rows whose ratio was clipped


@dataclass(frozen=True)
class PPOMetrics:
    """The figures of one iteration."""

    steps: int  # env steps so far
    episodes: EpisodeSummary
    losses: Losses
    explained_variance: float  # of the targets by the values before the update: 1 perfect, 0 no better than the mean
    learning_rate: float

    def as_row(self) -> dict[str, float]:
        """All figures under plain names, as in metrics.csv."""
        return {"steps": self.steps, **{tag.split("/")[1]: value for tag, value in self.as_scalars().items()}}

    def as_scalars(self) -> dict[str, float]:
        """The measurements in groups, ``group/name``, as TensorBoard shows them."""
        return {
            **{f"episodes/{name}": value for name, value in self.episodes._asdict().items()},
            **{f"losses/{name}": value for name, value in self.losses._asdict().items()},
            "losses/explained_variance": self.explained_variance,
            "losses/learning_rate": self.learning_rate,
        }


class Rollout(NamedTuple):
    """The B rows of a rollout, by env, then time, with what the policy that collected them computed of each.

    B = N * T for T steps of N envs, less the rows that a collector leaves out.
    """

    observations: Tensor  # [B, *obs_shape], the space's dtype; normalised ones float32
    actions: Tensor  # [B, K]: K choices (int64) or K continuous numbers (float32)
    log_probs: Tensor  # [B] float32
    values: Tensor  # [B] float32
    advantages: Tensor  # [B] float32
    targets: Tensor  # [B] float32, for the values


class PPO:
    """Trains a policy on ``envs``, which stay the caller's: PPO steps them, but never closes them.

    envs: single-agent, ``same_step`` or ``next_step`` autoreset, ``config.num_envs`` of them, with Box, Discrete,
        MultiDiscrete or MultiBinary observations and actions.
    policy: an ActorCritic for these spaces, or a module with its attributes and methods. This object itself
        is trained, neither copied nor pickled. None draws a new one from the seed.

    Raises UsageError for other envs, ConfigError for options that do not fit them.
    """

    def __init__(self, envs: VectorEnv[Any, Any, Any], config: PPOConfig, policy: ActorCritic | None = None) -> None:
        _check_envs(envs, config)
        self.envs = envs
        self.config = config
        self.steps = 0  # env steps of the complete iterations
        space = envs.single_observation_space
        collecting, weights, minibatches = np.random.SeedSequence(config.seed).spawn(3)
        self._minibatch_rng = torch.Generator().manual_seed(_seed(minibatches))
        if policy is None:
            policy = ActorCritic(space, envs.single_action_space, torch.Generator().manual_seed(_seed(weights)))
        self.policy = policy
        self.optimizer = torch.optim.Adam(policy.parameters(), lr=config.learning_rate, eps=1e-5, fused=True)
        self.observations = ObservationNormalizer(space.shape or ()) if config.normalize_observations else None
        self.rewards = RewardNormalizer(config.num_envs, config.gamma) if config.normalize_rewards else None
        self.episodes = EpisodeWindow()
        self.collector = Collector(
            envs, self._explore, frames_per_batch=config.batch_size, seed=_seed(collecting), compact=True
        )

    def train(self) -> Iterator[PPOMetrics]:
        """Trains until ``total_steps``; yields the metrics of each iteration."""
        while self.steps < self.config.total_steps:
            yield self.iterate()

    def iterate(self) -> PPOMetrics:
        """Collects one rollout and learns from it."""
        config = self.config
        progress = self.steps / (config.num_iterations * config.batch_size)
        learning_rate = config.learning_rate * (1 - progress if config.anneal_lr else 1)
        with _torch_threads(config.torch_threads):
            rollout = self.collect_rollout()
            losses = self.update(rollout, learning_rate)
        self.steps = self.collector.frames
        unexplained = (rollout.targets - rollout.values).var() / (rollout.targets.var() + 1e-8)
        return PPOMetrics(self.steps, self.episodes.summary(), losses, 1 - unexplained.item(), learning_rate)

    @torch.no_grad()
    def collect_rollout(self) -> Rollout:
        """The next ``num_steps`` steps of every env, going on where the last rollout ended."""
        batch = self.collector.rollout()
        self.episodes.add(self.collector.last_episodes)
        observations = batch["observation" if self.observations is None else "normalized"]
        last, finals = (self._normalized(batch["collector", name, "observation"]) for name in ("last", "final"))
        terminated, truncated, rewards = (
            batch["next", name].squeeze(-1) for name in ("terminated", "truncated", "reward")
        )
        mask = batch["collector", "mask"]
        if self.rewards is not None:
            rewards = self.rewards.update(rewards.T, (terminated | truncated).T, mask.T).T

        # While collecting only the actor ran: values and log-probabilities come from one pass over all rows.
        params, values = self._evaluate(torch.cat([observations.flatten(0, 1), last]))
        values, last_values = values[: mask.numel()].view(mask.shape), values[mask.numel() :]
        next_values = torch.cat([values[:, 1:], last_values.unsqueeze(1)], 1)
        if len(finals):
            next_values[batch["collector", "final_at"].unbind(-1)] = self._evaluate(finals)[1]
        time_first = (x.T for x in (rewards, values, next_values, terminated, truncated))
        advantages, targets = gae(*time_first, gamma=self.config.gamma, gae_lambda=self.config.gae_lambda, mask=mask.T)
        observations, chosen, *rest = (
            x.flatten(0, 1) for x in (observations, batch["chosen"], values, advantages.T, targets.T)
        )
        log_probs, _ = self.policy.head.log_prob_and_entropy(params[: len(chosen)], chosen)
        rows = (observations, chosen, log_probs, *rest)
        return Rollout(*(rows if mask.all() else (row[mask.flatten()] for row in rows)))

    def act(self, obs: Tensor, *, sample: bool = False) -> Tensor:
        """Actions for observations [B, *obs_shape], as the env wants them: the likeliest ones, or drawn if ``sample``.

        Statistics of observations stay as they are.
        """
        seen = self._normalized(obs)
        return self._for_env(self.policy.act(seen) if sample else self.policy.best(seen))

    def _explore(self, obs: Tensor) -> dict[str, Tensor]:
        """The outputs that the collector stores; obs first count in the statistics, then are normalised by them."""
        outputs = {}
        if self.observations is not None:
            outputs["normalized"] = obs = self.observations.update(obs)
        chosen = self.policy.act(obs)
        return {**outputs, "chosen": chosen, "action": self._for_env(chosen)}

    def _normalized(self, obs: Tensor) -> Tensor:
        return obs if self.observations is None else self.observations(obs)

    def _for_env(self, chosen: Tensor) -> Tensor:
        return torch.from_numpy(self.policy.head.to_env(chosen))

    def _evaluate(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """The policy's output for observations [B, *obs_shape], a minibatch at a time, as images take much memory."""
        minibatches = torch.split(obs, self.config.batch_size // self.config.num_minibatches)
        params, values = zip(*map(self.policy, minibatches), strict=True)
        return torch.cat(params), torch.cat(values)

    def update(self, rollout: Rollout, learning_rate: float) -> Losses:
        """Learns from the rollout in several passes, over random minibatches.

        Raises TrainingDiverged, before numbers that are not finite get into the weights.
        """
        config = self.config
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        if not rollout.targets.isfinite().all():
            raise TrainingDiverged(
                f"The rollout that ended at step {self.collector.frames} gives value targets that are not finite. Look "
                "for nan and infinity in the env's rewards and observations; make_vec(check_finite=True) names the env."
            )
        history: list[Tensor] = []
        for _ in range(config.update_epochs):
            order = torch.randperm(len(rollout.targets), generator=self._minibatch_rng)
            for minibatch in order.tensor_split(config.num_minibatches):
                loss, parts = self._loss(Rollout(*(tensor[minibatch] for tensor in rollout)))
                self.optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]  # torch leaves backward untyped
                norm = nn.utils.clip_grad_norm_(self.policy.parameters(), config.max_grad_norm)
                if not norm.isfinite():
                    raise TrainingDiverged(
                        f"PPO diverged after step {self.collector.frames}: loss {loss.item()}, gradient norm "
                        f"{norm.item()}. Lower learning_rate, which is {learning_rate:g}, or look for huge "
                        "observations."
                    )
                self.optimizer.step()
                history.append(parts)
            if config.target_kl is not None and history[-1][3] > config.target_kl:
                break
        return Losses(*torch.stack(history).mean(0).tolist())

    def _loss(self, batch: Rollout) -> tuple[Tensor, Tensor]:
        """The loss of a minibatch, rows [M, ...], and its five figures for ``Losses`` [5]."""
        config = self.config
        params, values = self.policy(batch.observations)
        log_probs, entropy = self.policy.head.log_prob_and_entropy(params, batch.actions)
        log_ratio = log_probs - batch.log_probs
        ratio = log_ratio.exp()

        advantages = batch.advantages
        if config.norm_adv:
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        clipped_ratio = ratio.clamp(1 - config.clip_coef, 1 + config.clip_coef)
        policy_loss = -torch.minimum(advantages * ratio, advantages * clipped_ratio).mean()

        errors = (values - batch.targets).square()
        if config.clip_vloss:
            clipped = batch.values + (values - batch.values).clamp(-config.clip_coef, config.clip_coef)
            errors = torch.maximum(errors, (clipped - batch.targets).square())
        value_loss = 0.5 * errors.mean()

        entropy = entropy.mean()
        loss = policy_loss + config.vf_coef * value_loss - config.ent_coef * entropy
        # Never negative and of low variance: http://joschu.net/blog/kl-approx.html, estimator k3.
        approx_kl = (ratio - 1 - log_ratio).mean()
        clip_fraction = ((ratio - 1).abs() > config.clip_coef).float().mean()
        return loss, torch.stack([policy_loss, value_loss, entropy, approx_kl, clip_fraction]).detach()

    def state_dict(self) -> dict[str, Any]:
        """The state without the envs: plain tensors, numbers and lists, so that weights_only=True loads them."""
        normalizers = {"observations": self.observations, "rewards": self.rewards}
        return {
            "policy": self.policy.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "steps": self.steps,
            "collector": self.collector.state_dict(),
            "minibatch_rng": self._minibatch_rng.get_state(),
            "episodes": self.episodes.state_dict(),
            "normalizers": {name: one.moments.state_dict() for name, one in normalizers.items() if one is not None},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from ``state_dict``, in new episodes. The config must be for the same network and normalisation."""
        self.policy.load_state_dict(state["policy"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.collector.load_state_dict(state["collector"])
        # An interrupt may have come between a rollout and the end of its iteration, which then does not count.
        self.steps = self.collector.frames = int(state["steps"])
        self._minibatch_rng.set_state(state["minibatch_rng"])
        self.episodes.load_state_dict(state["episodes"])
        if self.observations is not None:
            self.observations.moments.load_state_dict(state["normalizers"]["observations"])
        if self.rewards is not None:
            self.rewards.load_state_dict(state["normalizers"]["rewards"])


class EpisodeWindow:
    """The returns and lengths of the last 100 episodes that ended."""

    def __init__(self) -> None:
        self.ended = 0
        self.returns: deque[float] = deque(maxlen=EPISODE_WINDOW)
        self.lengths: deque[int] = deque(maxlen=EPISODE_WINDOW)

    def add(self, episodes: Episodes) -> None:
        """Adds the episodes that ended in a rollout."""
        self.ended += len(episodes.returns)
        self.returns.extend(episodes.returns.tolist())
        self.lengths.extend(episodes.lengths.tolist())

    def summary(self) -> EpisodeSummary:
        if not self.returns:
            return EpisodeSummary(0, math.nan, math.nan, math.nan, math.nan)
        low, high = np.percentile(self.returns, (10, 90))
        mean_return, mean_length = np.mean(self.returns), np.mean(self.lengths)
        return EpisodeSummary(self.ended, float(mean_return), float(low), float(high), float(mean_length))

    def state_dict(self) -> dict[str, Any]:
        return {"ended": self.ended, "returns": list(self.returns), "lengths": list(self.lengths)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.ended = int(state["ended"])
        self.returns = deque(state["returns"], EPISODE_WINDOW)
        self.lengths = deque(state["lengths"], EPISODE_WINDOW)


def _check_envs(envs: VectorEnv[Any, Any, Any], config: PPOConfig) -> None:
    if not isinstance(envs, VectorEnv):
        raise UsageError(f"PPO trains one agent per env and needs a gymnasium VectorEnv, got {type(envs).__name__}.")
    if envs.num_envs != config.num_envs:
        raise UsageError(
            f"envs has num_envs={envs.num_envs}, the config num_envs={config.num_envs}; "
            f"pass PPOConfig(num_envs={envs.num_envs})."
        )
    space = envs.single_observation_space
    if config.normalize_observations and not (isinstance(space, spaces.Box) and space.dtype != np.uint8):
        raise ConfigError(
            f"normalize_observations is for numbers, Boxes of another dtype than uint8; this env observes {space}."
        )


def _seed(sequence: np.random.SeedSequence) -> int:
    return int(sequence.generate_state(1, np.uint64)[0])


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
