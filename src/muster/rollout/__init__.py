"""Rollouts: T steps of N envs as batches to learn from, and the collectors that make them (extra "torch")."""

from __future__ import annotations

try:
    import tensordict as _tensordict  # type: ignore[import-untyped]  # noqa: F401  # ships no types
    import torch as _torch  # noqa: F401
except ImportError as error:
    raise ImportError(
        "Collectors need PyTorch and TensorDict. Install them with: pip install muster-rl[torch]"
    ) from error

from muster.rollout.storage import next_observations

__all__ = ["next_observations"]
