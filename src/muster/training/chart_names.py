"""The names that TensorBoard shows the columns of metrics.csv by: CleanRL's where it has one, else SB3's."""

from __future__ import annotations

from collections.abc import Mapping

CHARTS = {
    "mean_return": "charts/episodic_return",
    "mean_length": "charts/episodic_length",
    "steps_per_second": "charts/SPS",
    "learning_rate": "charts/learning_rate",
    "policy_loss": "losses/policy_loss",
    "value_loss": "losses/value_loss",
    "entropy": "losses/entropy",
    "approx_kl": "losses/approx_kl",
    "clip_fraction": "losses/clipfrac",
    "explained_variance": "losses/explained_variance",
    "episodes": "rollout/episodes",
    "low_return": "rollout/low_return",
    "high_return": "rollout/high_return",
    "eval_return": "eval/mean_reward",
    "eval_length": "eval/mean_ep_length",
    "seconds": "time/time_elapsed",
}


def charts(row: Mapping[str, float]) -> dict[str, float]:
    """The values of a row of metrics.csv by the names of their charts; "steps", their x axis, is none."""
    return {CHARTS[name]: value for name, value in row.items() if name != "steps"}
