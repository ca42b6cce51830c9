"""The network that PPO trains, fitted to an env's spaces: encoder, actor, critic and action distribution.

Weights are drawn from a generator that the caller seeds; torch's global generator is never touched.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from muster.errors import UsageError


class ActorCritic(nn.Module):
    """A policy and a value for one env: two 64-64 tanh networks, or single layers on a shared CNN for images.

    rng: what weights are drawn from; None for torch's global generator. Raises UsageError for spaces other than Box,
    Discrete, MultiDiscrete and MultiBinary.
    """

    def __init__(
        self, observation_space: gym.Space[Any], action_space: gym.Space[Any], rng: torch.Generator | None = None
    ) -> None:
        super().__init__()
        self.encoder = Encoder(observation_space, rng)
        self.head = Gaussian(action_space) if isinstance(action_space, spaces.Box) else Categoricals(action_space)
        hidden = () if self.encoder.cnn is not None else (64, 64)
        self.actor = _mlp([self.encoder.num_features, *hidden, self.head.num_params], gain=0.01, rng=rng)
        self.critic = _mlp([self.encoder.num_features, *hidden, 1], gain=1.0, rng=rng)

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


class Encoder(nn.Module):
    """Turns observations [B, *obs_shape] into float32 features [B, F]: flat numbers, one-hot choices, a CNN for images.

    Images are uint8 Boxes of three dimensions, the channels first or last, and at least 36 x 36 pixels. The CNN is that
    of Mnih et al. 2015 (doi:10.1038/nature14236).
    """

    def __init__(self, space: gym.Space[Any], rng: torch.Generator | None) -> None:
        super().__init__()
        shape = space.shape or ()
        self.scale = 1 / 255 if space.dtype == np.uint8 else 1.0
        self.cnn: nn.Module | None = None
        self.choices: Choices | None = None
        if not isinstance(space, spaces.Box):
            self.choices = Choices(space, "observations")
            self.num_features = sum(self.choices.nvec)
        elif space.dtype == np.uint8 and len(shape) == 3 and sorted(shape)[1] >= 36:
            self.channels_last = shape[2] < shape[0]
            height, width, channels = shape if self.channels_last else (shape[1], shape[2], shape[0])
            self.cnn = _cnn(height, width, channels, rng)
            self.num_features = 512
        else:
            self.num_features = math.prod(shape)

    def forward(self, obs: Tensor) -> Tensor:
        if self.choices is not None:
            columns = self.choices.to_columns(obs).unbind(-1)
            one_hots = [nn.functional.one_hot(c, n) for c, n in zip(columns, self.choices.nvec, strict=True)]
            return torch.cat(one_hots, -1).float()
        if self.cnn is None:
            return obs.reshape(len(obs), -1).float() * self.scale
        images = obs.permute(0, 3, 1, 2) if self.channels_last else obs
        features: Tensor = self.cnn(images.float() * self.scale)
        return features


class Choices:
    """A Discrete, MultiDiscrete or MultiBinary space as K choices, the k-th among ``nvec[k]``, counted from 0."""

    def __init__(self, space: gym.Space[Any], what: str) -> None:
        if isinstance(space, spaces.Discrete):
            nvec, starts = np.array([space.n]), np.array([space.start])
        elif isinstance(space, spaces.MultiDiscrete):
            nvec, starts = space.nvec, space.start
        elif isinstance(space, spaces.MultiBinary):
            nvec, starts = np.full(space.shape, 2), np.zeros(space.shape)
        else:
            raise UsageError(
                f"PPO takes Box, Discrete, MultiDiscrete and MultiBinary {what}, but this env has {space}. Give "
                f"make_vec a wrapper that turns them into one of these, as gymnasium.wrappers.FlattenObservation."
            )
        self.nvec = [int(n) for n in nvec.flat]
        self.starts = torch.from_numpy(starts.reshape(-1).astype(np.int64))
        self.shape = space.shape or ()
        self.dtype = space.dtype

    def to_columns(self, elements: Tensor) -> Tensor:
        """The space's elements [B, *shape] as choices [B, K] int64."""
        return elements.reshape(-1, len(self.nvec)).long() - self.starts

    def to_elements(self, columns: Tensor) -> np.ndarray[Any, Any]:
        """Choices [B, K] as the space's elements [B, *shape]."""
        return (columns + self.starts).numpy().astype(self.dtype).reshape(-1, *self.shape)


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

    def __init__(self, space: spaces.Box) -> None:
        super().__init__()
        if not np.issubdtype(space.dtype, np.floating):
            raise UsageError(f"PPO learns continuous actions of a float dtype; this env has {space}.")
        self.shape, self.dtype = space.shape, space.dtype
        self.low, self.high = space.low.reshape(-1), space.high.reshape(-1)
        with np.errstate(over="ignore", invalid="ignore"):
            half = (self.high - self.low) / 2
            bounded = np.isfinite(half)
            self.center = np.where(bounded, self.low + half, 0).astype(self.dtype)
        self.scale = np.where(bounded, half, 1).astype(self.dtype)
        self.num_params = math.prod(space.shape)
        self.log_std = nn.Parameter(torch.zeros(self.num_params))

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
        scaled = self.center + self.scale * actions.numpy().astype(self.dtype)
        clipped: np.ndarray[Any, Any] = np.clip(scaled, self.low, self.high)
        return clipped.reshape(-1, *self.shape)


def _mlp(sizes: Sequence[int], *, gain: float, rng: torch.Generator | None) -> nn.Sequential:
    """Linear layers with tanh between them; ``gain`` is the last layer's."""
    layers: list[nn.Module] = []
    for i in range(len(sizes) - 2):
        layers += [_layer(nn.Linear, sizes[i], sizes[i + 1], rng=rng), nn.Tanh()]
    return nn.Sequential(*layers, _layer(nn.Linear, sizes[-2], sizes[-1], rng=rng, gain=gain))


def _cnn(height: int, width: int, channels: int, rng: torch.Generator | None) -> nn.Sequential:
    layers: list[nn.Module] = []
    for filters, kernel, stride in ((32, 8, 4), (64, 4, 2), (64, 3, 1)):
        layers += [_layer(nn.Conv2d, channels, filters, kernel, stride, rng=rng), nn.ReLU()]
        height, width = ((size - kernel) // stride + 1 for size in (height, width))
        channels = filters
    return nn.Sequential(*layers, nn.Flatten(), _layer(nn.Linear, channels * height * width, 512, rng=rng), nn.ReLU())


def _layer(
    kind: type[nn.Linear] | type[nn.Conv2d], *sizes: int, rng: torch.Generator | None, gain: float = 2**0.5
) -> nn.Module:
    """A layer with orthogonal weights and zero biases. It is built empty: torch's own draw would use its global rng."""
    layer: nn.Linear | nn.Conv2d = nn.utils.skip_init(kind, *sizes)  # type: ignore[no-untyped-call]  # torch's gap
    nn.init.orthogonal_(layer.weight, gain, generator=rng)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer
