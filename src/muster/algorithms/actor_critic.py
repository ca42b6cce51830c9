"""The network that PPO trains, fitted to an env's spaces: encoder, actor, critic, action distribution; and how it acts.

Weights are drawn from a generator that the caller seeds; torch's global generator is never touched.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from muster.algorithms.encoder import Choices, Encoder, mlp
from muster.algorithms.normalization import ObservationNormalizer
from muster.errors import TrainingDiverged, UsageError


class ActorCritic(nn.Module):
    """A policy and a value for one env: two networks of ``hidden_sizes``, or single layers on a shared CNN for images.

    rng: what weights are drawn from; None for torch's global generator.
    hidden_sizes, activation: of both networks, except for images.  activation: a key of `muster.algorithms.encoder`'s
    ACTIVATIONS.  log_std_init: logarithm of the deviation that continuous actions start with, as `Gaussian` has it.

    Raises UsageError for spaces other than Box, Discrete, MultiDiscrete and MultiBinary.
    """

    def __init__(
        self,
        observation_space: gym.Space[Any],
        action_space: gym.Space[Any],
        rng: torch.Generator | None = None,
        *,
        hidden_sizes: Sequence[int] = (64, 64),
        activation: str = "tanh",
        log_std_init: float = 0.0,
    ) -> None:
        super().__init__()
        self.encoder = Encoder(observation_space, rng)
        self.head = (
            Gaussian(action_space, log_std_init) if isinstance(action_space, spaces.Box) else Categoricals(action_space)
        )
        hidden = () if self.encoder.cnn is not None else hidden_sizes
        inputs = [self.encoder.num_features, *hidden]
        self.actor = mlp([*inputs, self.head.num_params], activation=activation, gain=0.01, rng=rng)
        self.critic = mlp([*inputs, 1], activation=activation, gain=1.0, rng=rng)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        """Parameters of the action distribution [B, P], and values [B], for observations [B, *obs_shape]."""
        features = self.encoder(obs)
        return self.actor(features), self.critic(features).squeeze(-1)

    def act(self, obs: Tensor, rng: torch.Generator | None = None) -> Tensor:
        """Actions [B, K] drawn for observations [B, *obs_shape]; ``head.to_env`` turns them into the env's."""
        return self.head.sample(self.actor(self.encoder(obs)), rng)

    def best(self, obs: Tensor) -> Tensor:
        """The likeliest actions [B, K] for observations [B, *obs_shape]."""
        return self.head.mode(self.actor(self.encoder(obs)))


class Categoricals(nn.Module):
    """Independent categorical distributions over a space's choices. Parameters: logits [B, sum(nvec)]."""

    def __init__(self, space: gym.Space[Any]) -> None:
        super().__init__()
        self.choices = Choices(space, "actions")
        self.num_params = sum(self.choices.nvec)

    def sample(self, params: Tensor, rng: torch.Generator | None = None) -> Tensor:
        """Actions [B, K] int64."""
        # The first of several exponential clocks to ring is drawn in proportion to their rates (the Gumbel-max trick).
        scores = params - torch.empty_like(params).exponential_(generator=rng).log_()
        return self.mode(scores)

    def mode(self, params: Tensor) -> Tensor:
        """The likeliest actions [B, K] int64."""
        return torch.stack([s.argmax(-1) for s in torch.split(params, self.choices.nvec, -1)], -1)

    def log_prob_and_entropy(self, params: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy, [B] each, of actions [B, K]."""
        log_prob, entropy = torch.zeros(2, len(params)).unbind()
        for logits, chosen in zip(torch.split(params, self.choices.nvec, -1), actions.unbind(-1), strict=True):
            log_probs = logits.log_softmax(-1)
            log_prob = log_prob + log_probs.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
            entropy = entropy - (log_probs.exp() * log_probs).sum(-1)
        return log_prob, entropy

    def to_env(self, actions: Tensor) -> np.ndarray[Any, Any]:
        """Actions [B, K] as the env wants them, [B, *shape]."""
        return self.choices.to_elements(actions)


class Gaussian(nn.Module):
    """A diagonal Gaussian with a learned deviation that does not depend on the observation. Parameters: means [B, K].

    In each dimension that has two finite bounds, -1 and 1 stand for them; actions beyond a bound are clipped to it.
    """

    def __init__(self, space: spaces.Box, log_std_init: float = 0.0) -> None:
        super().__init__()
        if not np.issubdtype(space.dtype, np.floating):
            raise UsageError(
                f"PPO learns continuous actions of a float dtype; this env has {space}. Turn them into Discrete, "
                "MultiDiscrete or floats with a wrapper, such as gymnasium.wrappers.TransformAction."
            )
        if not math.prod(space.shape):
            raise UsageError(f"PPO takes actions of at least one number, but this env has {space}.")
        self.shape, self.dtype = space.shape, space.dtype
        self.low, self.high = space.low.reshape(-1), space.high.reshape(-1)
        with np.errstate(over="ignore", invalid="ignore"):
            half = (self.high - self.low) / 2
            bounded = np.isfinite(half)
            self.center = np.where(bounded, self.low + half, 0).astype(self.dtype)
        self.scale = np.where(bounded, half, 1).astype(self.dtype)
        largest = np.finfo(space.dtype).max  # type: ignore[type-var]  # beyond it an action of a small dtype would be inf
        self.low, self.high = np.maximum(self.low, -largest), np.minimum(self.high, largest)
        self.num_params = math.prod(space.shape)
        self.log_std = nn.Parameter(torch.full((self.num_params,), float(log_std_init)))

    def sample(self, params: Tensor, rng: torch.Generator | None = None) -> Tensor:
        """Actions [B, K] float32."""
        return params + self.log_std.exp() * torch.randn(params.shape, generator=rng)

    def mode(self, params: Tensor) -> Tensor:
        """The likeliest actions [B, K] float32."""
        return params

    def log_prob_and_entropy(self, params: Tensor, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy, [B] each, of actions [B, K]."""
        normed = (actions - params) * (-self.log_std).exp()
        log_norm = self.log_std.sum() + 0.5 * self.num_params * math.log(2 * math.pi)
        log_prob = -0.5 * normed.square().sum(-1) - log_norm
        return log_prob, (log_norm + 0.5 * self.num_params).expand(len(params))

    def to_env(self, actions: Tensor) -> np.ndarray[Any, Any]:
        """Actions [B, K] as the env wants them, [B, *shape], within its bounds."""
        with np.errstate(over="ignore"):
            scaled = self.center + self.scale * actions.numpy().astype(self.dtype)
        clipped: np.ndarray[Any, Any] = np.clip(scaled, self.low, self.high)
        return clipped.reshape(-1, *self.shape)


class Explorer(nn.Module):
    """What acts while PPO collects: a policy, and the statistics by which it sees observations.

    It may be copied to other processes; steps, which a message names, follow there as weights and statistics do.

    steps: env steps after which it acts.
    """

    def __init__(self, policy: ActorCritic, observations: ObservationNormalizer | None, learning_rate: float) -> None:
        super().__init__()
        self.policy, self.observations = policy, observations
        self.steps, self.learning_rate = 0, learning_rate

    def forward(self, obs: Tensor) -> dict[str, Tensor]:
        """Drawn actions [B, K] for observations [B, *obs_shape], ``chosen``, and as the env wants them, ``action``.

        Raises TrainingDiverged where they are not finite.
        """
        chosen = self.policy.act(as_seen(obs, self.observations))
        if chosen.is_floating_point() and not chosen.isfinite().all():
            raise TrainingDiverged(
                f"PPO diverged: after step {self.steps} the policy's actions are not finite, and were not sent. Lower "
                f"learning_rate, which is {self.learning_rate:g}, or look for huge observations."
            )
        return {"chosen": chosen, "action": torch.from_numpy(self.policy.head.to_env(chosen))}


@torch.no_grad()
def act(
    policy: ActorCritic, observations: ObservationNormalizer | None, obs: Tensor, *, sample: bool, threads: int
) -> Tensor:
    """Actions for observations [B, *obs_shape], as the env wants them: the likeliest ones, or drawn if ``sample``.

    threads: torch's, meanwhile; results differ in their last digits with another number.
    """
    with torch_threads(threads):
        seen = as_seen(obs, observations)
        return torch.from_numpy(policy.head.to_env(policy.act(seen) if sample else policy.best(seen)))


def as_seen(obs: Tensor, observations: ObservationNormalizer | None) -> Tensor:
    """Observations [B, *obs_shape] as the policy sees them: normalised, and with 0 for numbers that are not finite.

    PPO refuses such numbers once the rollout is complete, except where nothing is learnt from them: the action for a
    row in which an env is only reset is not used.
    """
    if obs.is_floating_point():
        obs = obs.nan_to_num(0.0, 0.0, 0.0)
    return obs if observations is None else observations(obs)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Has torch compute with this number of threads in the ``with`` block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
