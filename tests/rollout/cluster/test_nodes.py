"""MultiCollector on node hosts: the same batches as at home, and the same envs."""

from __future__ import annotations

import functools
import gc
import os
import signal

import gymnasium as gym
import numpy as np
import pytest
import torch
from agent_envs import Script
from collecting import count_env
from counting_env import NoisyEnv
from gymnasium import spaces
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


def assert_equal(home, batches):
    for own, other in zip(home, batches, strict=True):
        assert {*own.keys(True, True)} == {*other.keys(True, True)}
        for key in own.keys(True, True):
            assert torch.equal(own[key], other[key]), key


@pytest.mark.parametrize("case", [(2, False), *slow((1, False), (3, True), (2, True))])
def test_batches_are_those_of_home(case):
    nodes, compact = case
    home, told_at_home = at_home(compact)
    batches, told = story(LocalNodes(nodes), compact=compact)
    assert_equal(home, batches)
    assert told[:-1] == told_at_home[:-1]
    assert told[-1] == [("up", 2)] * nodes


class Rough(NoisyEnv):
    """Raises in its eleventh step; ends its process in its fifth, unless another has done that already."""

    def __init__(self, ended=None):
        super().__init__()
        self.ended, self.steps = ended, 0

    def step(self, action):
        self.steps += 1
        if self.steps == 5 and self.ended is not None and not self.ended.exists():
            self.ended.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if self.steps == 11:
            raise RuntimeError("the motor is stuck")
        return super().step(action)


class Crowd(Script):
    """Agents that come, end and are away."""

    def __init__(self):
        there = ["a_0 a_1 b_0", "a_0 a_1 b_0", "a_1 b_0", "a_1", "a_1 b_0", "a_1 b_0", ""]
        super().__init__(there, {(2, "a_0"): "terminated", (6, "a_1"): "truncated", (6, "b_0"): "terminated"})


@pytest.mark.filterwarnings("ignore:.*(failed and|collector 2 .*) was replaced|.*left env.agents:RuntimeWarning")
@pytest.mark.parametrize(
    ("agents", "compact"),
    [
        (False, False),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((False, True), (True, False), (True, True))),
    ],
)
def test_rows_that_were_cut_lost_or_of_agents_are_those_of_home(agents, compact, tmp_path):
    def batches(name, cluster):
        envs = [NoisyEnv, Rough, Rough, functools.partial(Rough, tmp_path / name)]
        with MultiCollector(
            [Crowd] * 4 if agents else envs,
            None if agents else Drawn(),
            num_collectors=3,
            frames_per_batch=52,
            max_frames_per_traj=4,
            seed=5,
            compact=compact,
            on_failure="restart",
            context="auto" if cluster else "fork",
            cluster=cluster,
        ) as collector:
            return [collector.rollout() for _ in range(3)]

    home = batches("home", None)
    assert_equal(home, batches("nodes", LocalNodes()))
    assert agents or [int((~batch["collector", "mask"]).sum()) for batch in home] == [15, 3, 3]


class Narrow(LocalNodes):
    """Has little room for messages."""

    def store_bytes(self):
        return 100_000


@pytest.mark.slow
def test_batches_for_which_a_store_is_too_small_are_said():
    with pytest.warns(UserWarning, match="take up to 1 MB, and a node of this machine has 0 MB for them"):
        MultiCollector(count_env(), num_collectors=2, frames_per_batch=8192, cluster=Narrow()).shutdown()


class Weighed(LocalNodes):
    """Counts the bytes of the largest answer."""

    largest = 0

    def wait(self, tickets, timeout_s):
        came = super().wait(tickets, timeout_s)
        self.largest = max([self.largest, *(sum(map(len, data)) for data in came.values() if isinstance(data, list))])
        return came


class Pixels(gym.Env):
    """Frames of 28 KB; an episode ends after 20 steps."""

    observation_space, action_space, count = spaces.Box(0, 255, (4, 84, 84), np.uint8), spaces.Discrete(2), 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.np_random.integers(0, 256, (4, 84, 84), np.uint8), {}

    def step(self, action):
        self.count += 1
        return self.np_random.integers(0, 256, (4, 84, 84), np.uint8), 0.0, self.count % 20 == 0, False, {}


@pytest.mark.slow
def test_observations_travel_once():
    cluster = Weighed()
    with MultiCollector(Pixels, num_collectors=2, num_envs=4, frames_per_batch=256, seed=1, cluster=cluster) as one:
        assert one.rollout()["next", "observation"].shape == (4, 64, 4, 84, 84)
    assert 1.0 < cluster.largest / (2 * 64 * 4 * 84 * 84) < 1.1


@pytest.mark.slow
def test_a_collector_that_is_dropped_late_leaves_the_next_ones_nodes():
    cluster = LocalNodes(1)
    first = MultiCollector(count_env(), num_collectors=1, frames_per_batch=8, cluster=cluster)
    first.shutdown()
    with MultiCollector(count_env(), num_collectors=1, frames_per_batch=8, cluster=cluster) as second:
        del first
        gc.collect()
        assert second.rollout()["collector", "mask"].all()


def test_fork_is_refused():
    with pytest.raises(ConfigError, match='context="fork"'):
        MultiCollector(count_env(), num_collectors=2, frames_per_batch=8, context="fork", cluster=LocalNodes())


@pytest.mark.parametrize(
    ("cluster", "text"),
    [
        (lambda: "k8s", "cluster must be None, 'ray' or a muster.RayCluster, got 'k8s'"),
        (lambda: muster.RayCluster(nodes=0), "nodes must be None, a number from 1 on, or a list of muster.Node, got 0"),
        (
            lambda: muster.RayCluster(nodes=[muster.Node(cpus=-1)]),
            "cpus must be a number of at least 0 or None",
        ),
        (lambda: muster.RayCluster(nodes=2, min_nodes=5), "min_nodes must be at most the number of nodes, 2, got 5"),
        (lambda: muster.RayCluster(runtime_env="x"), "runtime_env must be None, or a mapping from names to what"),
        (lambda: muster.RayCluster(placement_group="x"), "placement_group must be one of ray.util.placement_group"),
        (lambda: muster.Node(labels={"a": 1}), "labels must be None, or a mapping from names to strings"),
        (lambda: muster.Node(resources={"CPU": 2}), "resources must be None, or a mapping from names other than CPU"),
        (lambda: muster.RayCluster(node_timeout=0), "node_timeout must be a number above 0, got 0"),
    ],
)
def test_what_is_no_cluster_is_named(cluster, text):
    with pytest.raises(ConfigError) as raised:
        MultiCollector(count_env(), num_collectors=2, frames_per_batch=8, cluster=cluster())
    assert text in str(raised.value)
