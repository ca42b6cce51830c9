"""Running normalisation of observations and rewards, as Stable-Baselines3's ``VecNormalize`` does it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gymnasium as gym
import torch
from gymnasium import spaces
from tensordict import TensorDictBase  # type: ignore[import-untyped]  # ships no types
from torch import Tensor, nn

from muster.algorithms.encoder import kind_of, leaves_of
from muster.rollout.fields import Key

CLIP = 10.0  # in standard deviations
EPSILON = 1e-8


class RunningMoments(nn.Module):
    """Mean and variance, float64 ``[*shape]``, of all rows seen so far (Chan et al. 1979, the pairwise update).

    They are buffers, which follow wherever the weights beside them go.
    """

    mean: Tensor
    var: Tensor

    def __init__(self, shape: Sequence[int] = ()) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(tuple(shape), dtype=torch.float64))
        self.register_buffer("var", torch.ones(tuple(shape), dtype=torch.float64))
        self.count = 0

    def update(self, rows: Tensor) -> None:
        """Adds rows ``[B, *shape]`` to the statistics."""
        if not len(rows):
            return
        var, mean = torch.var_mean(rows.double(), dim=0, correction=0)
        total = self.count + len(rows)
        delta, share = mean - self.mean, len(rows) / total
        self.var = self.var * (1 - share) + var * share + delta.square() * (share * (1 - share))
        self.mean = self.mean + delta * share
        self.count = total

    def to_dict(self) -> dict[str, Any]:
        return {"mean": self.mean, "var": self.var, "count": self.count}

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from `to_dict`."""
        parts = (state[name].to(self.mean.device) for name in ("mean", "var"))
        self.mean, self.var = (part.expand_as(self.mean) for part in parts)  # refuses another shape
        self.count = int(state["count"])


class ObservationNormalizer(nn.Module):
    """Subtracts the running mean from observations, divides by the running deviation, and clips to 10 deviations.

    Each measurement in a Dict or a Tuple has statistics of its own; the other parts stay as they are.

    space: of one env's observations, or the shape of numbers.
    """

    moments: RunningMoments

    def __init__(self, space: gym.Space[Any] | Sequence[int]) -> None:
        super().__init__()
        self.is_mixed = isinstance(space, (spaces.Dict, spaces.Tuple))
        if isinstance(space, (spaces.Dict, spaces.Tuple)):
            leaves = leaves_of(space)
            self.keys = [key for key, leaf in leaves.items() if kind_of(leaf) in ("numbers", "bytes")]
            self.leaves = nn.ModuleList(ObservationNormalizer(leaves[key]) for key in self.keys)
        else:
            self.moments = RunningMoments((space.shape or ()) if isinstance(space, gym.Space) else space)

    def forward(self, obs: Tensor | TensorDictBase) -> Tensor | TensorDictBase:
        """Normalised observations, float32 ``[B, *shape]``. obs: of any dtype. The statistics stay as they are."""
        if isinstance(obs, TensorDictBase):
            seen = obs.copy()
            for key, leaf in self._by_key():
                seen[key] = leaf(obs[key])
            return seen
        scale = (self.moments.var + EPSILON).rsqrt()
        return ((obs.double() - self.moments.mean) * scale).clamp(-CLIP, CLIP).float()

    def update(self, rows: Tensor | TensorDictBase) -> None:
        """Adds rows ``[B, *shape]``, or a TensorDict ``[B]`` of them, to the statistics."""
        if isinstance(rows, TensorDictBase):
            for key, leaf in self._by_key():
                leaf.update(rows[key])
        else:
            self.moments.update(rows)

    def to_dict(self) -> dict[str, Any]:
        return {"parts": [leaf.to_dict() for _, leaf in self._by_key()]} if self.is_mixed else self.moments.to_dict()

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from `to_dict`."""
        if self.is_mixed:
            for (_, leaf), part in zip(self._by_key(), state["parts"], strict=True):
                leaf.load(part)
        else:
            self.moments.load(state)

    def _by_key(self) -> Iterator[tuple[Key, Any]]:
        return zip(self.keys, self.leaves, strict=True)


class RewardNormalizer:
    """Divides rewards by the running deviation of the discounted returns, and clips to 10; their sign is kept.

    Returns are carried from rollout to rollout, and start from 0 with each episode.

    shape: of one step's rewards: (N,) of N envs, or (N, A) of A agents in each.  device: of rewards.
    """

    def __init__(self, shape: Sequence[int], gamma: float, device: torch.device | None = None) -> None:
        self.moments = RunningMoments().to(device)
        self._gamma = gamma
        self._returns = torch.zeros(tuple(shape), dtype=torch.float64, device=device)

    def update(self, rewards: Tensor, done: Tensor, mask: Tensor) -> Tensor:
        """Normalised rewards, float32 ``[T, *shape]``.

        rewards: float32, and done, mask: bool, of that shape; rows where mask is False count for nothing.
        All rows are divided by the same number: the deviation with this rollout counted in.
        """
        returns = torch.zeros_like(rewards, dtype=torch.float64)
        for t, (reward, ended, kept) in enumerate(zip(rewards, done, mask, strict=True)):
            following = self._returns * self._gamma + reward
            returns[t] = self._returns = torch.where(kept, following, self._returns)
            self._returns = self._returns.masked_fill(ended, 0.0)
        self.moments.update(returns[mask])
        scale = (self.moments.var + EPSILON).rsqrt().float()
        return (rewards * scale).clamp(-CLIP, CLIP)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from the state of ``moments``, with returns of 0: envs that start again begin new episodes."""
        self.moments.load(state)
        self._returns.zero_()
