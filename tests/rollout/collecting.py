"""A short way to one batch, and policies."""

from __future__ import annotations

import functools

import torch
from counting_env import CountingEnv
from torch import nn

from muster.rollout.collector import Collector

SERIAL = {"backend": "serial"}


def count_env(**kwargs):
    return functools.partial(CountingEnv, **kwargs)


def collect(env, policy=None, *, T=8, num_envs=2, options=None, **kwargs):
    """One batch of T steps, and the collector, which is shut down."""
    options = {**SERIAL, **(options or {})}
    with Collector(
        env, policy, num_envs=num_envs, frames_per_batch=T * num_envs, make_vec_options=options, **kwargs
    ) as collector:
        return collector.rollout(), collector


def zeros_policy(obs):
    return torch.zeros(len(obs), dtype=torch.int64)


class Constant(nn.Module):
    """Acts its one weight."""

    def __init__(self, action: int = 0) -> None:
        super().__init__()
        self.best = nn.Parameter(torch.tensor(float(action)))

    def forward(self, obs):
        return self.best.long().expand(len(obs))


class Noisy(nn.Module):
    """Random actions of torch's global generator, and the observation's mean next to them."""

    def forward(self, obs):
        return {"action": torch.randint(0, 100, (len(obs),)), "mean": obs.mean(-1)}


def batches_equal(a, b):
    keys = set(a.keys(True, True))
    return keys == set(b.keys(True, True)) and all(a[key].equal(b[key]) for key in keys)
