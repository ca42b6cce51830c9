"""A trained policy at work: observations of an env in, actions for it out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from muster.algorithms.actor_critic import ActorCritic
from muster.algorithms.normalization import ObservationNormalizer


@torch.no_grad()
def act(
    policy: ActorCritic, observations: ObservationNormalizer | None, obs: Tensor, *, sample: bool, threads: int
) -> Tensor:
    """Actions for observations [B, *obs_shape], as the env wants them: the likeliest ones, or drawn if ``sample``.

    threads: torch's, meanwhile; results differ in their last digits with another number.
    """
    with torch_threads(threads):
        seen = as_seen(obs, observations)
        return torch.from_numpy(policy.head.to_env(policy.act(seen) if sample else policy.best(seen)))


def as_seen(obs: Tensor, observations: ObservationNormalizer | None) -> Tensor:
    """Observations [B, *obs_shape] as the policy sees them. Numbers that are not finite are 0."""
    if obs.is_floating_point():
        obs = obs.nan_to_num(0.0, 0.0, 0.0)
    return obs if observations is None else observations(obs)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Has torch compute with this number of threads in the ``with`` block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
