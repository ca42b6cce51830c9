"""Collectors, and trainings, in several threads at once: each is as it is alone, and torch's generator stays."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from collecting import SERIAL, collect
from counting_env import NoisyEnv
from tensordict.nn import InteractionType, TensorDictModule
from tensordict.nn.probabilistic import interaction_type
from torch import nn

import muster
from muster.algorithms import PPO, MAPPOConfig, PPOConfig
from muster.algorithms.mappo import MAPPO
from muster.nn import turns
from muster.nn.turns import TURN
from muster.rollout.collector import Collector

PROCESS = {"num_workers": 1}  # no fork: a thread may hold the lock of torch's generator
TIMES = 5
slow = pytest.mark.slow


class Dropping(nn.Module):
    """Draws as a user's network may: in a layer, and by the kind of interaction."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, obs):
        if interaction_type() is not InteractionType.RANDOM:
            return torch.zeros(len(obs), dtype=torch.int64)
        return (self.drop(obs).sum(-1) * 7).long().abs() % 100


def drawing(obs):
    return torch.randint(0, 100, (len(obs),))


def with_keys():
    return TensorDictModule(Dropping(), in_keys=["observation"], out_keys=["action"])


def at_once(*calls):
    """What the functions return, each in a thread of its own; all begin together."""
    together = threading.Barrier(len(calls))

    def begin(call):
        together.wait()
        return call()

    with ThreadPoolExecutor(len(calls)) as threads:
        return [one.result() for one in [threads.submit(begin, call) for call in calls]]


def require_as_alone(calls):
    """Each function returns the same in threads as alone, and torch's generator stays as it was."""
    torch.manual_seed(0)
    before = torch.get_rng_state()
    alone = [call() for call in calls]
    for _ in range(TIMES):
        for one, expected in zip(at_once(*calls), alone, strict=True):
            assert one.equal(expected)
    assert torch.get_rng_state().equal(before)


def rows(seed, policy, options):
    def call():
        with Collector(
            NoisyEnv, policy(), num_envs=2, frames_per_batch=16, seed=seed, make_vec_options=options
        ) as collector:
            return torch.cat([collector.rollout()["next", "reward"] for _ in range(10)])

    return call


@pytest.mark.parametrize("options", [SERIAL, pytest.param(PROCESS, marks=slow)], ids=["serial", "process"])
@pytest.mark.parametrize("policy", [lambda: drawing, Dropping, with_keys], ids=["function", "module", "keys"])
def test_collectors_in_two_threads_give_what_they_give_alone(policy, options):
    require_as_alone([rows(seed, policy, options) for seed in (1, 2)])
    assert interaction_type() is None


def ppo(seed, options, policy=None):
    def call():
        config = PPOConfig(num_envs=2, num_steps=16, total_steps=96, num_minibatches=2, seed=seed)
        with muster.make_vec("CartPole-v1", 2, autoreset_mode="same_step", **options) as envs:
            training = PPO(envs, config, policy)
            assert [*training.train()]
            return torch.cat([one.detach().flatten() for one in training.policy.parameters()])

    return call


class Own(nn.Module):
    """A network of the user's that draws while it acts."""

    def __init__(self, observation_space, action_space):
        super().__init__()
        self.head = muster.algorithms.head_of(action_space)
        self.net = nn.Linear(4, self.head.num_params + 1)

    def forward(self, obs, masks=None, memory=None):
        found = self.net(obs)
        return found[:, :-1], found[:, -1]

    def decide(self, obs, masks, memory):
        return self(obs)[0] + torch.randn(()), None


@pytest.mark.parametrize("options", [SERIAL, pytest.param(PROCESS, marks=slow)], ids=["serial", "process"])
@pytest.mark.parametrize("policy", [None, Own], ids=["muster's", "own"])
def test_trainings_in_two_threads_give_what_they_give_alone(policy, options):
    require_as_alone([ppo(seed, options, policy) for seed in (1, 2)])


def mappo(seed, options):
    def call():
        config = MAPPOConfig(num_envs=2, num_steps=8, total_steps=64, num_minibatches=2, seed=seed)
        name = "pettingzoo/mpe/simple_spread_v3"
        with muster.make_vec(name, 2, autoreset_mode="same_step", **options) as envs:
            training = MAPPO(envs, config)
            assert [*training.train()]
            [policy] = training.policies.values()
            return torch.cat([one.detach().flatten() for one in policy.parameters()])

    return call


@pytest.mark.parametrize("training", [ppo, pytest.param(mappo, marks=slow)])
def test_what_another_thread_draws_is_not_a_trainings_and_the_other_way_round(training):
    call, drawn, done = training(1, PROCESS), [], threading.Event()

    def draw():
        torch.manual_seed(0)
        while not done.is_set() or len(drawn) < 2000:
            drawn.append(torch.rand(()).item())

    def train():
        try:
            return call()
        finally:
            done.set()

    alone = call()
    weights, _ = at_once(train, draw)
    torch.manual_seed(0)
    assert drawn == [torch.rand(()).item() for _ in drawn]
    assert weights.equal(alone)


def takes_a_turn():
    if free := TURN.acquire(timeout=5.0):
        TURN.release()
    return free


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_a_policy_that_raises_leaves_the_generator_and_the_turn(error):
    def policy(obs):
        torch.rand(())
        raise error

    before = torch.get_rng_state()
    with pytest.raises(error):
        collect(NoisyEnv, policy, seed=1)
    assert torch.get_rng_state().equal(before)
    assert at_once(takes_a_turn) == [True]


def test_a_policy_may_collect_itself():
    def policy(obs):
        imagined, _ = collect(NoisyEnv, drawing, num_envs=1, T=2, seed=5)
        return imagined["action"][0, 0] + drawing(obs) // 2 * 0

    batch, _ = collect(NoisyEnv, policy, seed=1)
    assert len(set(batch["action"].flatten().tolist())) == 1


def test_a_turn_that_comes_late_is_said(monkeypatch, caplog):
    monkeypatch.setattr(turns, "_LATE_S", 0.1)
    has_it, may_go = threading.Event(), threading.Timer(1.0, lambda: None)

    def hold():
        with TURN:
            has_it.set()
            may_go.join()

    thread = threading.Thread(target=hold)
    may_go.start()
    thread.start()
    assert has_it.wait(60)
    with turns.turn():
        assert "another thread's" in caplog.text
    thread.join()


def test_a_fork_takes_its_turn_while_a_thread_of_its_parent_has_it():
    has_it, may_go = threading.Event(), threading.Event()

    def hold():
        with TURN:
            has_it.set()
            may_go.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    has_it.wait(60)
    try:
        if not (child := os.fork()):
            os._exit(not takes_a_turn())
        assert os.waitpid(child, 0)[1] == 0
    finally:
        may_go.set()
        thread.join()
