"""The check that a rollout's rows are finite, before they enter weights, statistics or returns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from muster.errors import TrainingDiverged


def require_finite_rows(batch: Any, steps_before: int, kept_steps: int) -> None:
    """Raises TrainingDiverged for the first observation or reward to be learnt from that is not finite in float32.

    batch: a collector's batch [N, T], ``compact``.  steps_before: steps of each env before it.
    kept_steps: env steps of the run until then.

    The final observation of a terminated episode is never learnt from, and may be anything; so may masked rows.
    """
    observations, last, finals = (
        batch["observation"],
        batch["collector", "last", "observation"],
        batch["collector", "final", "observation"],
    )
    rewards, terminated, truncated = (batch["next", name].squeeze(-1) for name in ("reward", "terminated", "truncated"))
    if all(not one.is_floating_point() or _finite(one).all() for one in (observations, last, finals, rewards)):
        return
    mask = batch["collector", "mask"]
    bootstraps = mask & truncated & ~terminated
    used = mask.clone()
    used[:, 1:] |= bootstraps[:, :-1]  # where an env is reset in a row of its own, that row has the final observation
    env_ids, times = (index.tolist() for index in batch["collector", "final_at"].unbind(-1))
    T = mask.shape[1]
    # By the number of steps that the env had made when it returned it, a step's final observation before the reset's.
    found = [
        *((t, 1, env, "an observation that holds", observations[env, t]) for env, t in _bad(observations, used)),
        *((t + 1, 0, env, "a reward of", rewards[env, t]) for env, t in _bad(rewards, mask)),
        *(
            (times[k] + 1, 0, env_ids[k], "a final observation that holds", finals[k])
            for (k,) in _bad(finals, bootstraps[env_ids, times])
        ),
        *(
            (T, 1, env, "an observation that holds", last[env])
            for (env,) in _bad(last, ~(mask[:, -1] & terminated[:, -1]))
        ),
    ]
    if not found:
        return
    step, _, env, what, row = min(found, key=lambda one: one[:3])
    number = row[~_finite(row)][0].item()
    when = f"in its step {steps_before + step}" if steps_before + step else "at its first reset"
    raise TrainingDiverged(
        f"Env {env} returned {what} {number} {when}; PPO learns from finite numbers of float32 alone. Nothing of "
        f"this rollout was learnt: the state is that after step {kept_steps:,}. Mend the env, or replace such numbers "
        "in a wrapper; make_vec(check_finite=True) raises in the env's own step."
    )


def _bad(rows: Tensor, used: Tensor) -> list[list[int]]:
    """The places of ``used`` (bool, of the first dims of ``rows``) where a row is not finite."""
    finite = _finite(rows)
    while finite.ndim > used.ndim:
        finite = finite.all(-1)
    places: list[list[int]] = torch.nonzero(used & ~finite).tolist()
    return places


def _finite(rows: Tensor) -> Tensor:
    """Whether each number is finite in float32, the policy's dtype."""
    return (rows.float() if rows.is_floating_point() else rows).isfinite()
