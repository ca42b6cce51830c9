"""Rollouts: T steps of N envs as batches to learn from, and the collectors that make them (extra "torch").

`gae` and `vtrace` compute advantages and value targets, time first ``[T, N]``; `split_trajectories` gives each
trajectory of a batch ``[N, T]`` a row of its own; `next_observations` restores what a compact batch leaves out.

Collectors are `muster.Collector` and `muster.MultiCollector`.
"""

from __future__ import annotations

from muster.extras import imports_for

with imports_for("Collectors need", "muster-rl[torch]", "torch", "tensordict"):
    from muster.rollout.returns import gae, split_trajectories, vtrace
    from muster.rollout.storage import next_observations

__all__ = ["gae", "next_observations", "split_trajectories", "vtrace"]
