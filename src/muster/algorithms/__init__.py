"""Algorithms that train a policy on a vector env, one readable file each. They need PyTorch (extra ``torch``)."""

try:
    import torch  # noqa: F401
except ImportError as error:
    raise ImportError("muster.algorithms needs PyTorch. Install it with: pip install 'muster-rl[torch]'") from error

from muster.algorithms.actor_critic import ActorCritic
from muster.algorithms.ppo import PPO, PPOConfig, PPOMetrics

__all__ = ["ActorCritic", "PPO", "PPOConfig", "PPOMetrics"]
