"""Rollouts: T steps of N envs as batches to learn from, and the collectors that make them (extra "torch")."""

from __future__ import annotations

from muster.extras import imports_for

with imports_for("Collectors need", "muster-rl[torch]", "torch", "tensordict"):
    from muster.rollout.storage import next_observations

__all__ = ["next_observations"]
