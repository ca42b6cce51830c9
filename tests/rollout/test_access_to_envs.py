"""The envs of a `MultiCollector`, which are called and changed between batches, by their index among all."""

import time
from concurrent.futures import ThreadPoolExecutor

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

import muster
from muster.errors import ClosedError, ConfigError, EnvError, UsageError


class Levelled(gym.Env):
    observation_space = spaces.Box(-9, 9, (2,), np.float32)
    action_space = spaces.Discrete(3)

    def __init__(self):
        self.level = 0.0
        self.index = muster.get_worker_info().env_index

    def reset(self, *, seed=None, options=None):
        return np.full(2, self.level, np.float32), {}

    def step(self, action):
        return np.full(2, self.level, np.float32), 0.0, False, False, {}

    def tell(self, x, y=0):
        return self.index, x, y

    def fail_in(self, index):
        if self.index == index:
            raise ValueError("no way")


@muster.nn.uncopyable("a simulator in its memory")
class Staying(torch.nn.Module):
    def forward(self, obs):
        return torch.zeros(len(obs), dtype=torch.int64)


WAYS = {
    "sync": {},
    "async": {"sync": False},
    "staying": {"policy": Staying},
    "staying async": {"policy": Staying, "sync": False},
}


@pytest.fixture(params=[pytest.param(way, marks=[pytest.mark.slow] * (way == "staying async")) for way in WAYS])
def collector(request):
    ways = dict(WAYS[request.param])
    if policy := ways.pop("policy", None):
        with pytest.warns(UserWarning, match="stays in this process"):
            made = muster.MultiCollector(Levelled, policy(), num_collectors=2, num_envs=4, frames_per_batch=16, **ways)
    else:
        made = muster.MultiCollector(Levelled, num_collectors=2, num_envs=4, frames_per_batch=16, **ways)
    with made:
        yield made


def test_spaces_are_one_envs(collector):
    assert collector.single_observation_space == Levelled.observation_space
    assert collector.single_action_space == Levelled.action_space


def test_calls_reach_every_env_between_batches(collector):
    collector.rollout()
    assert collector.call("tell", 5, y=6) == tuple((i, 5, 6) for i in range(4))
    assert collector.call(lambda env, i: (i, env.unwrapped.index)) == tuple((i, i) for i in range(4))
    assert collector.call(lambda env, i, x, y=0: (i, x, y), 5, y=6) == tuple((i, 5, 6) for i in range(4))
    assert collector.get_attr("level") == (0.0,) * 4
    collector.rollout()


def test_what_is_set_is_observed_in_batches_that_begin_later(collector):
    collector.rollout()
    collector.set_attr("level", [1.0, 2.0, 3.0, 4.0])
    assert collector.get_attr("level") == (1.0, 2.0, 3.0, 4.0)
    seen = set()
    expected = {(1.0, 2.0, 3.0, 4.0)}, {(1.0, 2.0), (3.0, 4.0)}
    deadline = time.monotonic() + 60.0
    while seen not in expected:  # without sync one collector may be ready more often than the other
        assert time.monotonic() < deadline, seen
        batch = collector.rollout()
        seen.add(tuple(batch["observation"][:, -1, 0].tolist()))
        seen.discard((0.0, 0.0))  # without sync the batches that had begun come first
    collector.set_attr("level", 7.0)
    assert collector.get_attr("level") == (7.0,) * 4


def test_errors_name_the_env_and_collecting_goes_on(collector):
    with pytest.raises(EnvError, match="env 2 .*no way") as told:
        collector.call("fail_in", 2)
    assert told.value.env_index == 2
    with pytest.raises(ConfigError, match="expected 4 values, one an env, got 1"):
        collector.set_attr("level", [1.0])
    assert collector.rollout().numel() == 16


def test_a_collector_that_is_busy_or_closed_says_so(collector):
    with collector._between_batches(), ThreadPoolExecutor(1) as other:
        busy = other.submit(collector.call, "tell", 1).exception()
    assert isinstance(busy, UsageError)
    assert "another thread is collecting" in str(busy)
    collector.shutdown()
    with pytest.raises(ClosedError):
        collector.call("tell", 1)


def test_a_collector_hands_out_its_vector_env():
    with muster.Collector(
        Levelled, num_envs=2, frames_per_batch=4, make_vec_options={"backend": "serial"}
    ) as collector:
        collector.rollout()
        collector.envs.set_attr("level", [1.0, 2.0])
        assert collector.envs.get_attr("level") == (1.0, 2.0)
        assert collector.rollout()["observation"][:, -1, 0].tolist() == [1.0, 2.0]


class Fragile(Levelled):
    """Fails at its third step."""

    def reset(self, *, seed=None, options=None):
        self.steps = 0
        return super().reset()

    def step(self, action):
        self.steps += 1
        if self.steps == 3:
            raise ValueError("fragile")
        return super().step(action)


@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")
def test_what_was_set_is_set_again_in_envs_that_are_built_again():
    options = {"num_collectors": 2, "num_envs": 4, "frames_per_batch": 16, "sync": False}
    with muster.MultiCollector(Fragile, on_failure="restart", max_restarts=99, **options) as collector:
        collector.set_attr("level", [1.0, 2.0, 3.0, 4.0])
        before = collector.stats()["collectors"]["restarts"]
        deadline = time.monotonic() + 60.0
        while collector.stats()["collectors"]["restarts"] == before:
            assert time.monotonic() < deadline, "no env was built again"
            collector.rollout()
        assert collector.get_attr("level") == (1.0, 2.0, 3.0, 4.0)
