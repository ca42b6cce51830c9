"""MultiCollector on node hosts: the same batches as at home, and the same envs."""

from __future__ import annotations

import functools

import pytest
import torch
from collecting import count_env
from counting_env import NoisyEnv
from torch import nn

import muster
from local_nodes import LocalNodes
from muster.errors import ConfigError
from muster.rollout.multi_collector import MultiCollector
from slow import slow

pytestmark = pytest.mark.timeout(120)


class Drawn(nn.Module):
    """Draws its action, and adds its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(()))

    def forward(self, obs):
        return (torch.rand(len(obs)) + self.shift).long().clamp(0, 1)


def story(cluster, *, compact=False, num_collectors=3):
    """Batches with changes in between, and what envs say."""
    policy, told = Drawn(), []
    with MultiCollector(
        functools.partial(NoisyEnv),
        policy,
        num_collectors=num_collectors,
        num_envs=4,
        frames_per_batch=32,
        seed=5,
        compact=compact,
        cluster=cluster,
    ) as collector:
        batches = [collector.rollout()]
        with torch.no_grad():
            policy.shift.fill_(0.7)
        collector.update_policy_weights_()
        batches.append(collector.rollout())
        collector.set_attr("told", [1, 2, 3, 4])
        told.append(collector.get_attr("told"))
        told.append(collector.call(where))
        collector.reset()
        batches.append(collector.rollout())
        told.append(collector.single_observation_space)
        told.append([(node["state"], node["policy_version"]) for node in collector.nodes()])
    return batches, told


def where(env, i):
    info = muster.get_worker_info()
    return i, info.env_index, info.worker_index, info.num_workers, info.num_envs


@functools.cache
def at_home(compact):
    return story(None, compact=compact)


@pytest.mark.parametrize("case", [(2, False), *slow((1, False), (3, True), (2, True))])
def test_batches_are_those_of_home(case):
    nodes, compact = case
    home, told_at_home = at_home(compact)
    batches, told = story(LocalNodes(nodes), compact=compact)
    for own, other in zip(home, batches, strict=True):
        assert {*own.keys(True, True)} == {*other.keys(True, True)}
        for key in own.keys(True, True):
            assert torch.equal(own[key], other[key]), key
    assert told[:-1] == told_at_home[:-1]
    assert told[-1] == [("up", 2)] * nodes


def test_fork_is_refused():
    with pytest.raises(ConfigError, match='context="fork"'):
        MultiCollector(count_env(), num_collectors=2, frames_per_batch=8, context="fork", cluster=LocalNodes())
