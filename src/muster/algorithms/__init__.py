"""Algorithms that train a policy on a vector env, one readable file each. They need PyTorch (extra ``torch``)."""

from muster.extras import imports_for

with imports_for("muster.algorithms needs", "muster-rl[torch]", "torch", "tensordict"):
    from muster.algorithms.actor_critic import ActorCritic, head_of, masked
    from muster.algorithms.mappo import MAPPO
    from muster.algorithms.own_network import Head, PolicyNetwork
    from muster.algorithms.ppo import PPO
    from muster.algorithms.ppo_config import MAPPOConfig, MAPPOMetrics, PPOConfig, PPOMetrics

__all__ = [
    "MAPPO", "PPO", "ActorCritic", "Head", "MAPPOConfig", "MAPPOMetrics", "PPOConfig", "PPOMetrics", "PolicyNetwork",
    "head_of", "masked",
]  # fmt: skip
