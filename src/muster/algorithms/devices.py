"""Where PPO and MAPPO compute: one device for policies, statistics, acting, rollouts and updates."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from muster.algorithms.ppo_config import PPOConfig
from muster.errors import ConfigError
from muster.rollout.weights import place, to_device

LARGE = 1_000_000  # weights; with fewer, and without a CNN, the GPU's calls take longer than the CPU's work


def placed(
    wish: str | torch.device, policies: Iterable[Any], statistics: Iterable[Any], config: PPOConfig
) -> torch.device:
    """The device, with the policies and statistics there.

    wish: as for `PPO`. Raises ConfigError where there is no such device, or it cannot compute what is asked for.
    """
    policies = list(policies)
    device = _chosen(policies) if wish == "auto" else to_device(wish)
    if device.type == "mps" and (config.normalize_observations or config.normalize_rewards):
        raise ConfigError(
            "device", "one with float64, for normalize_observations and normalize_rewards: cpu or cuda", str(device)
        )
    for one in (*policies, *statistics):
        place(one, device, "device")
    return device


def _chosen(policies: list[Any]) -> torch.device:
    """The GPU, if there is one, for images and for large networks; else the CPU."""
    layers = [layer for policy in policies for layer in policy.modules()]
    weights = sum(one.numel() for policy in policies for one in policy.parameters())
    is_large = weights > LARGE or any(isinstance(layer, nn.Conv2d) for layer in layers)
    return to_device("cuda" if is_large and torch.cuda.is_available() else "cpu")
