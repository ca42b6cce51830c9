"""PPO (Schulman et al. 2017, arXiv:1707.06347) over a vector env, in one file to be read from top to bottom.

    envs = muster.make_vec("CartPole-v1", num_envs=8, autoreset_mode="same_step")
    ppo = PPO(envs, PPOConfig(total_steps=100_000))
    for metrics in ppo.train():
        print(metrics.steps, metrics.episodes.mean_return)

One iteration collects ``num_steps`` steps of ``num_envs`` envs, then learns from them for ``update_epochs`` passes. A
truncated episode is bootstrapped from its final observation: a time limit is no termination. Everything random comes
from ``seed``, through generators of its own: the same seed gives the same policy, torch's global generator is left
alone, and runs with neighbouring seeds share nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from gymnasium.vector import AutoresetMode, VectorEnv
from torch import Tensor, nn

from muster.algorithms.actor_critic import ActorCritic
from muster.errors import ConfigError, TrainingDiverged, UsageError
from muster.rollout.returns import gae

EPISODE_WINDOW = 100
VALUE_SCALE_SHARE = 0.2  # that the newest rollout has in the values' scale


@dataclass(frozen=True)
class PPOConfig:
    """How PPO trains; names as in CleanRL, values that solve CartPole-v1. Raises ConfigError for senseless ones."""

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
    torch_threads: int = 1  # the other cores belong to the envs' workers

    @property
    def batch_size(self) -> int:
        """Env steps in one rollout."""
        return self.num_envs * self.num_steps

    @property
    def num_iterations(self) -> int:
        return math.ceil(self.total_steps / self.batch_size)

    def __post_init__(self) -> None:
        counts = ("total_steps", "num_envs", "num_steps", "num_minibatches", "update_epochs", "torch_threads")
        for name in counts:
            if getattr(self, name) < 1:
                raise ConfigError(f"PPOConfig: {name} must be at least 1, got {getattr(self, name)}.")
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
    """The last 100 episodes; nan until the first one ends."""

    episodes: int  # ended so far
    mean_return: float
    low_return: float  # 10th percentile
    high_return: float  # 90th percentile
    mean_length: float  # in env steps


class Losses(NamedTuple):
    """What an update measured, averaged over its minibatches."""

    policy_loss: float  # clipped surrogate
    value_loss: float  # half the mean squared error of the values, in units of the policy's value_scale
    entropy: float  # of the action distribution, in nats
    approx_kl: float  # how far the policy has moved from the one that collected
    clip_fraction: float  # share of rows whose ratio was clipped


@dataclass(frozen=True)
class PPOMetrics:
    """What is known after an iteration."""

    steps: int  # env steps so far
    episodes: EpisodeSummary
    losses: Losses
    explained_variance: float  # of the targets by the values before the update: 1 perfect, 0 no better than the mean
    learning_rate: float

    def as_row(self) -> dict[str, float]:
        """All of it under plain names, as metrics.csv has it."""
        return {
            "steps": self.steps,
            **self.episodes._asdict(),
            **self.losses._asdict(),
            "explained_variance": self.explained_variance,
            "learning_rate": self.learning_rate,
        }


class Rollout(NamedTuple):
    """The B = T * N rows of a rollout, T steps of N envs, and what the policy that collected them made of them."""

    observations: Tensor  # [B, *obs_shape], the space's dtype
    actions: Tensor  # [B, K]: K choices (int64) or K continuous numbers (float32)
    log_probs: Tensor  # [B] float32
    values: Tensor  # [B] float32
    advantages: Tensor  # [B] float32
    targets: Tensor  # [B] float32, for the values


class PPO:
    """Trains a policy on ``envs``, which stay the caller's: PPO steps them, but never closes them.

    envs: single-agent, ``same_step`` autoreset, ``config.num_envs`` of them, with Box, Discrete, MultiDiscrete or
    MultiBinary observations and actions. Raises UsageError for others.
    """

    def __init__(self, envs: VectorEnv[Any, Any, Any], config: PPOConfig) -> None:
        _check_envs(envs, config)
        self.envs = envs
        self.config = config
        self.steps = 0
        env_seeds, weights, actions, minibatches = np.random.SeedSequence(config.seed).spawn(4)
        self._action_rng = _generator(actions)
        self._minibatch_rng = _generator(minibatches)
        self.policy = ActorCritic(envs.single_observation_space, envs.single_action_space, _generator(weights))
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=config.learning_rate, eps=1e-5, fused=True)
        self.episodes = EpisodeWindow(config.num_envs)
        seeds = [int(word) for word in env_seeds.generate_state(config.num_envs)]
        self._obs, _ = envs.reset(seed=seeds)  # type: ignore[arg-type]  # every vector env takes a list; the base says int

    def train(self) -> Iterator[PPOMetrics]:
        """Trains until ``total_steps``, an iteration for each item."""
        while self.steps < self.config.total_steps:
            yield self.iterate()

    def iterate(self) -> PPOMetrics:
        """One rollout and the update that learns from it."""
        config = self.config
        progress = self.steps / (config.num_iterations * config.batch_size)
        learning_rate = config.learning_rate * (1 - progress if config.anneal_lr else 1)
        with _torch_threads(config.torch_threads):
            rollout = self.collect_rollout()
            losses = self.update(rollout, learning_rate)
        unexplained = (rollout.targets - rollout.values).var() / (rollout.targets.var() + 1e-8)
        return PPOMetrics(self.steps, self.episodes.summary(), losses, 1 - unexplained.item(), learning_rate)

    @torch.no_grad()
    def collect_rollout(self) -> Rollout:
        """The next ``num_steps`` steps of every env, going on where the last rollout ended."""
        T, N = self.config.num_steps, self.config.num_envs
        space = self.envs.single_observation_space
        observations = np.empty((T + 1, N, *(space.shape or ())), space.dtype)
        rewards = np.empty((T, N), np.float32)
        terminated = np.empty((T, N), np.bool_)
        truncated = np.empty((T, N), np.bool_)
        actions: list[Tensor] = []
        cut_at: list[tuple[int, int]] = []
        cut_obs: list[np.ndarray[Any, Any]] = []

        for t in range(T):
            observations[t] = self._obs
            actions.append(self.policy.act(torch.from_numpy(observations[t]), self._action_rng))
            env_actions = self.policy.head.to_env(actions[t])
            self._obs, step_rewards, terminated[t], truncated[t], infos = self.envs.step(env_actions)
            rewards[t] = step_rewards
            self.episodes.count(step_rewards, terminated[t] | truncated[t])
            for env in np.flatnonzero(truncated[t] & ~terminated[t]):
                cut_at.append((t, int(env)))
                cut_obs.append(infos["final_obs"][env])
        observations[T] = self._obs
        self.steps += T * N

        # While collecting only the actor ran: values and log-probabilities come from one pass over all rows.
        obs = torch.from_numpy(observations).flatten(0, 1)
        params, row_values = self._evaluate(obs)
        values, next_values = row_values.view(T + 1, N)[:-1], row_values.view(T + 1, N)[1:].clone()
        if cut_at:
            _, next_values[tuple(np.transpose(cut_at))] = self._evaluate(torch.from_numpy(np.stack(cut_obs)))
        advantages, targets = gae(
            torch.from_numpy(rewards),
            values,
            next_values,
            torch.from_numpy(terminated),
            torch.from_numpy(truncated),
            gamma=self.config.gamma,
            gae_lambda=self.config.gae_lambda,
        )
        chosen = torch.cat(actions)
        log_probs, _ = self.policy.head.log_prob_and_entropy(params[: T * N], chosen)
        return Rollout(obs[: T * N], chosen, log_probs, *(x.flatten() for x in (values, advantages, targets)))

    def _evaluate(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """The policy's output for observations [B, *obs_shape], a minibatch at a time: images need the memory."""
        minibatches = torch.split(obs, self.config.batch_size // self.config.num_minibatches)
        params, values = zip(*map(self.policy, minibatches), strict=True)
        return torch.cat(params), torch.cat(values)

    def update(self, rollout: Rollout, learning_rate: float) -> Losses:
        """Several passes over the rollout in random minibatches. Raises TrainingDiverged, before the weights suffer."""
        config = self.config
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        if not rollout.targets.isfinite().all():
            raise TrainingDiverged(
                f"The rollout that ended at step {self.steps} gives value targets that are not finite. Look for nan "
                "and infinity in the env's rewards and observations; make_vec(check_finite=True) names the env."
            )
        rollouts = self.steps // config.batch_size
        self.policy.follow_value_scale(rollout.targets, share=max(1 / rollouts, VALUE_SCALE_SHARE))
        history: list[Tensor] = []
        for _ in range(config.update_epochs):
            order = torch.randperm(config.batch_size, generator=self._minibatch_rng)
            for minibatch in order.tensor_split(config.num_minibatches):
                loss, parts = self._loss(Rollout(*(tensor[minibatch] for tensor in rollout)))
                self.optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]  # torch leaves backward untyped
                norm = nn.utils.clip_grad_norm_(self.policy.parameters(), config.max_grad_norm)
                if not norm.isfinite():
                    raise TrainingDiverged(
                        f"PPO diverged after step {self.steps}: loss {loss.item()}, gradient norm {norm.item()}. "
                        f"Lower learning_rate, which is {learning_rate:g}, or look for huge observations."
                    )
                self.optimizer.step()
                history.append(parts)
            if config.target_kl is not None and history[-1][3] > config.target_kl:
                break
        return Losses(*torch.stack(history).mean(0).tolist())

    def _loss(self, batch: Rollout) -> tuple[Tensor, Tensor]:
        """The loss of a minibatch, rows [M, ...], and what ``Losses`` reports of it [5]."""
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

        values, old_values, targets = (x / self.policy.value_scale for x in (values, batch.values, batch.targets))
        errors = (values - targets).square()
        if config.clip_vloss:
            clipped = old_values + (values - old_values).clamp(-config.clip_coef, config.clip_coef)
            errors = torch.maximum(errors, (clipped - targets).square())
        value_loss = 0.5 * errors.mean()

        entropy = entropy.mean()
        loss = policy_loss + config.vf_coef * value_loss - config.ent_coef * entropy
        # Never negative and of low variance: http://joschu.net/blog/kl-approx.html, estimator k3.
        approx_kl = (ratio - 1 - log_ratio).mean()
        clip_fraction = ((ratio - 1).abs() > config.clip_coef).float().mean()
        return loss, torch.stack([policy_loss, value_loss, entropy, approx_kl, clip_fraction]).detach()

    def state_dict(self) -> dict[str, Any]:
        """Weights, optimizer, step count and generators: plain tensors and numbers, so weights_only=True loads them."""
        return {
            "policy": self.policy.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "steps": self.steps,
            "action_rng": self._action_rng.get_state(),
            "minibatch_rng": self._minibatch_rng.get_state(),
        }


class EpisodeWindow:
    """Counts episodes as they are stepped, and keeps the returns and lengths of the last 100 that ended."""

    def __init__(self, num_envs: int) -> None:
        self.ended = 0
        self._running_returns = np.zeros(num_envs)
        self._running_lengths = np.zeros(num_envs, np.int64)
        self.returns: deque[float] = deque(maxlen=EPISODE_WINDOW)
        self.lengths: deque[int] = deque(maxlen=EPISODE_WINDOW)

    def count(self, rewards: np.ndarray[Any, Any], done: np.ndarray[Any, Any]) -> None:
        """Adds a step of every env: rewards [N] float, done [N] bool."""
        self._running_returns += rewards
        self._running_lengths += 1
        if done.any():
            self.ended += int(done.sum())
            self.returns.extend(self._running_returns[done].tolist())
            self.lengths.extend(self._running_lengths[done].tolist())
            self._running_returns[done] = 0
            self._running_lengths[done] = 0

    def summary(self) -> EpisodeSummary:
        if not self.returns:
            return EpisodeSummary(0, math.nan, math.nan, math.nan, math.nan)
        low, high = np.percentile(self.returns, (10, 90))
        mean_return, mean_length = np.mean(self.returns), np.mean(self.lengths)
        return EpisodeSummary(self.ended, float(mean_return), float(low), float(high), float(mean_length))


def _check_envs(envs: VectorEnv[Any, Any, Any], config: PPOConfig) -> None:
    if not isinstance(envs, VectorEnv):
        raise UsageError(f"PPO trains one agent per env and needs a gymnasium VectorEnv, got {type(envs).__name__}.")
    if envs.num_envs != config.num_envs:
        raise UsageError(
            f"envs has num_envs={envs.num_envs}, the config num_envs={config.num_envs}; "
            f"pass PPOConfig(num_envs={envs.num_envs})."
        )
    mode = envs.metadata.get("autoreset_mode")
    if mode != AutoresetMode.SAME_STEP:
        raise UsageError(f"PPO needs envs made with autoreset_mode='same_step'; these have {mode}.")


def _generator(sequence: np.random.SeedSequence) -> torch.Generator:
    return torch.Generator().manual_seed(int(sequence.generate_state(1, np.uint64)[0]))


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
