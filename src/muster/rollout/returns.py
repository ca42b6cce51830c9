"""Advantages and targets from a rollout's rewards and values (GAE, V-trace), and its single trajectories.

A step can end an episode in two ways, and they are never confused here:

- ``terminated``: the episode is over; what would follow is worth nothing.
- ``truncated``: it was only cut off (a time limit, a lost worker); what would follow is worth the value of the final
  observation.

So every function takes ``next_values``, the value of the observation *after* each action: the final observation where
an episode ended, the following row's observation everywhere else. It is exact in every autoreset mode.

Rows with a ``mask`` of False are left out: the reset rows of ``next_step`` autoreset, agents that are not alive,
padding. Their numbers may be anything, NaN included, and they get zeros; an end that one of them reports, such as that
of a lost env, is an end for the rows before it, too.

An agent that is alive but waits for its turn is not left out: its rewards, and often its end, stand in the rows in
which others act. So compute returns with ``mask=alive`` and take the loss over the rows where ``acting`` is True.
"""

from __future__ import annotations

import torch
from tensordict import TensorDict, TensorDictBase  # type: ignore[import-untyped]  # ships no types
from torch import Tensor

from muster.errors import SpecMismatch


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    *,
    gamma: float,
    gae_lambda: float,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages and value targets by GAE (Schulman et al. 2015, arXiv:1506.02438).

    All tensors are time-first: [T, N], or [T, N, A] for a group of agents; ``batch.transpose(0, 1)`` of a collector's
    batch [N, T].

    rewards: float, for the action at t.
    values, next_values: float, of the observations before and after it.
    terminated, truncated: bool, how the action ended the episode.
    gamma, gae_lambda: the discount of later rewards, and that of later advantages, from 0 to 1.
    mask: bool; False leaves the row out.

    Returns (advantages, targets), shaped as ``values`` and of its dtype, without gradients; targets are advantages +
    values. Raises SpecMismatch where shapes differ or a flag is not bool.

    >>> import torch
    >>> from muster.rollout import gae
    >>> rewards, values = torch.ones(2, 1), torch.zeros(2, 1)
    >>> terminated, truncated = torch.tensor([[False], [True]]), torch.tensor([[False], [False]])
    >>> advantages, targets = gae(rewards, values, values, terminated, truncated, gamma=0.5, gae_lambda=1.0)
    >>> advantages.tolist()
    [[1.5], [1.0]]
    """
    kept = _check_and_mask(rewards, values, next_values, terminated, truncated, mask)
    bootstrap = next_values.masked_fill(terminated, 0.0)
    deltas = rewards.to(values.dtype) + gamma * bootstrap - values
    decays = torch.full_like(values, gamma * gae_lambda)
    advantages = _discounted_sums(deltas, decays, terminated | truncated, kept)[:-1].masked_fill(~kept, 0.0)
    return advantages, (advantages + values).masked_fill(~kept, 0.0)


@torch.no_grad()
def vtrace(
    log_ratios: Tensor,
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    *,
    gamma: float,
    rho_clip: float = 1.0,
    c_clip: float = 1.0,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Advantages and value targets for an older policy's rollout, by V-trace (Espeholt et al. 2018, arXiv:1802.01561).

    All tensors are time-first: [T, N], or [T, N, A] for a group of agents.

    log_ratios: float, log-probability of the action under the policy that learns minus that under the one that acted.
    rewards, values, next_values, terminated, truncated, mask, gamma: as for `gae`.
    rho_clip, c_clip: where the importance weights are cut off (the paper's rho-bar and c-bar).

    Returns (advantages, targets), shaped as ``values`` and of its dtype, without gradients. Raises SpecMismatch where
    shapes differ or a flag is not bool.

    >>> import torch
    >>> from muster.rollout import vtrace
    >>> rewards, values, log_ratios = torch.ones(2, 1), torch.zeros(2, 1), torch.tensor([[1.5], [0.0]])
    >>> terminated, truncated = torch.tensor([[False], [True]]), torch.tensor([[False], [False]])
    >>> advantages, targets = vtrace(log_ratios, rewards, values, values, terminated, truncated, gamma=0.5)
    >>> targets.tolist()
    [[1.5], [1.0]]
    """
    kept = _check_and_mask(rewards, values, next_values, terminated, truncated, mask, log_ratios=log_ratios)
    ended = terminated | truncated
    rewards = rewards.to(values.dtype)
    ratios = log_ratios.to(values.dtype).exp()
    rhos = ratios.clamp(max=rho_clip)
    bootstrap = next_values.masked_fill(terminated, 0.0)
    deltas = rhos * (rewards + gamma * bootstrap - values)
    corrections = _discounted_sums(deltas, gamma * ratios.clamp(max=c_clip), ended, kept)
    targets = values + corrections[:-1]
    next_targets = bootstrap + corrections[1:].masked_fill(ended, 0.0)
    advantages = rhos * (rewards + gamma * next_targets - values)
    return advantages.masked_fill(~kept, 0.0), targets.masked_fill(~kept, 0.0)


def split_trajectories(rollout: TensorDictBase) -> TensorDict:
    """The rollout's trajectories, one in each row, padded with zeros to the longest.

    rollout: a collector's batch [N, T], with ``("next", "done")`` [N, T, 1] bool and, where steps are to be left out,
        ``("collector", "mask")`` [N, T] bool. A trajectory ends where done is True, where ``("collector", "traj_ids")``
        [N, T] int64, if there are any, change, and at the end of the rollout.

    Returns a TensorDict of batch_size [B, T_longest], names [None, "time"], for B trajectories ordered by env, then
    time; its ``("collector", "mask")`` [B, T_longest] is False on the padding, and its ``("collector", "traj_ids")``
    say which trajectory a row is: the parts of one that goes on in the next batch have one id, as collectors count;
    without ids in the rollout they are 0 to B - 1. Raises SpecMismatch where the batch_size has not two dimensions,
    time is the first of them, or done is missing or misshapen.

    `torchrl.collectors.utils.split_trajectories` gives the same rows, but keeps those that are to be left out.

    >>> import muster
    >>> from muster.rollout import split_trajectories
    >>> options = {"num_envs": 2, "frames_per_batch": 16, "max_frames_per_traj": 5, "seed": 0}
    >>> with muster.Collector("CartPole-v1", lambda obs: (obs[:, 2] > 0).long(), **options) as collector:
    ...     rows = split_trajectories(collector.rollout())
    >>> rows["collector", "mask"].sum(1)
    tensor([5, 3, 5, 3])
    """
    if rollout.batch_dims != 2 or rollout.names[0] == "time":
        named = f" with names {rollout.names}" if any(rollout.names) else ""
        raise SpecMismatch(f"split_trajectories: expected batch_size [N, T], got {list(rollout.batch_size)}{named}.")
    done = rollout.get(("next", "done"), None)
    if done is None or done.shape != (*rollout.batch_size, 1):
        got = "none" if done is None else f"shape {list(done.shape)}"
        raise SpecMismatch(
            f'split_trajectories: expected ("next", "done") of shape {[*rollout.batch_size, 1]}, got {got}.'
        )
    num_rows = rollout.batch_size.numel()
    mask = rollout.get(("collector", "mask"), None)
    kept = torch.ones(num_rows, dtype=torch.bool) if mask is None else mask.reshape(num_rows)
    begins = torch.ones(rollout.batch_size, dtype=torch.bool, device=done.device)
    begins[:, 1:] = done[:, :-1, 0]
    ids = rollout.get(("collector", "traj_ids"), None)
    if ids is not None:
        begins[:, 1:] |= ids[:, 1:] != ids[:, :-1]
    rows = torch.nonzero(kept.to(done.device)).squeeze(1)
    _, owners, lengths = torch.unique_consecutive(
        begins.reshape(num_rows).cumsum(0)[rows], return_inverse=True, return_counts=True
    )
    firsts = lengths.cumsum(0) - lengths
    times = torch.arange(len(rows), device=done.device) - firsts[owners]

    flat = rollout.reshape(num_rows)
    flat = torch.cat([flat, torch.zeros_like(flat[:1])])
    index = torch.full((len(lengths), int(lengths.max()) if len(rows) else 0), num_rows, device=done.device)
    index[owners, times] = rows
    split: TensorDict = flat[index]
    split.set(("collector", "mask"), index < num_rows)
    if ids is None:
        numbers = torch.arange(len(lengths), device=done.device).unsqueeze(1)
        split.set(("collector", "traj_ids"), numbers * (index < num_rows))
    split.names = [None, "time"]
    return split


def _discounted_sums(deltas: Tensor, decays: Tensor, ended: Tensor, kept: Tensor) -> Tensor:
    """Discounted sums within each episode: sums[t] = deltas[t] + decays[t] * sums[t + 1].

    Rows that are not kept pass the sum on unchanged.

    Arguments [T, ...]; returns [T + 1, ...], row T zero.
    """
    deltas = deltas.masked_fill(~kept, 0.0)
    decays = decays.masked_fill(~kept, 1.0).masked_fill(ended, 0.0)
    sums = torch.zeros((len(deltas) + 1, *deltas.shape[1:]), dtype=deltas.dtype, device=deltas.device)
    for t in reversed(range(len(deltas))):
        torch.addcmul(deltas[t], decays[t], sums[t + 1], out=sums[t])
    return sums


def _check_and_mask(
    rewards: Tensor,
    values: Tensor,
    next_values: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    mask: Tensor | None,
    *,
    log_ratios: Tensor | None = None,
) -> Tensor:
    """The mask, all True where there is none. Raises SpecMismatch: no shape is broadcast silently."""
    kept = torch.ones_like(terminated) if mask is None else mask
    flags = {"terminated": terminated, "truncated": truncated, "mask": kept}
    numbers = {"rewards": rewards, "next_values": next_values}
    if log_ratios is not None:
        numbers["log_ratios"] = log_ratios
    for name, tensor in (numbers | flags).items():
        if tensor.shape != values.shape:
            raise SpecMismatch(
                f"{name}: expected shape {list(values.shape)} as values have, got {list(tensor.shape)}; "
                "expand it where it holds for every agent."
            )
    for name, tensor in flags.items():
        if tensor.dtype != torch.bool:
            raise SpecMismatch(f"{name}: expected dtype torch.bool, got {tensor.dtype}; pass {name}.bool().")
    return kept
