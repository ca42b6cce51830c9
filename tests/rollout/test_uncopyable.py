"""Policies that hold what cannot be copied: they collect, train and have targets as any other, where they are."""

from __future__ import annotations

import ctypes
import functools
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from counting_env import CountingEnv
from gymnasium import spaces

import muster
from muster.algorithms import PPO, ActorCritic, PPOConfig
from muster.nn import TargetParams
from muster.rollout.collector import Collector
from muster.rollout.multi_collector import MultiCollector
from slow import slow

ENV = functools.partial(CountingEnv, length=3)
OBSERVATIONS, ACTIONS = spaces.Box(-1.0, 1e6, (2,), "float32"), spaces.Discrete(100)


class OnlyOne:
    def __deepcopy__(self, memo: Any) -> Any:
        raise RuntimeError("there is only one of me")


KINDS: dict[str, Callable[[], Any]] = {
    "lock": threading.Lock,
    "socket": socket.socket,
    "pointer": lambda: ctypes.pointer(ctypes.c_int(3)),
    "generator": lambda: (i for i in range(3)),
    "non-leaf tensor": lambda: torch.ones(2, requires_grad=True) * 2,
    "raising hook": OnlyOne,
}


class Holding(ActorCritic):
    """Acts its bias: whatever it sees, all actions but `best` have no chance."""

    def __init__(self, kind: str, best: int = 0) -> None:
        super().__init__(OBSERVATIONS, ACTIONS, torch.Generator().manual_seed(0))
        self.held = KINDS[kind]()
        self.aim_at(best)

    @torch.no_grad()
    def aim_at(self, best: int) -> None:
        last = self.actor[-1]
        last.weight.zero_()
        last.bias.fill_(-1e4)[best] = 0.0


class Acting(torch.nn.Module):
    """Turns observations into actions, by the policy that it wraps."""

    def __init__(self, kind: str, best: int = 0) -> None:
        super().__init__()
        self.inner = Holding(kind, best)

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return self.inner.best(obs).squeeze(-1)


@pytest.fixture(params=["lock", *slow(*(kind for kind in KINDS if kind != "lock"))])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def policy(kind: str) -> Iterator[Acting]:
    made = Acting(kind, best=5)
    yield made
    if kind == "socket":
        made.inner.held.close()


def test_a_collector_uses_the_very_object(policy: Acting):
    held = policy.inner.held
    with Collector(ENV, policy, num_envs=2, frames_per_batch=8, make_vec_options={"backend": "serial"}) as collector:
        assert collector.policy is policy
        assert (collector.rollout()["action"] == 5).all()
    assert policy.inner.held is held


def test_in_several_collectors_it_stays_and_the_warning_says_why(policy: Acting):
    with pytest.warns(UserWarning, match=r"policy\.inner\.held[\s\S]*It stays in this process[\s\S]*policy_factory"):
        collector = MultiCollector(ENV, policy, num_collectors=2, frames_per_batch=8, context="fork")
    with collector:
        assert collector.policy is policy
        assert (collector.rollout()["action"] == 5).all()
        policy.inner.aim_at(7)
        collector.update_policy_weights_()
        assert (collector.rollout()["action"] == 7).all()


def test_a_policy_that_asks_to_stay_is_told_so_and_not_to_ask():
    policy = torch.nn.Sequential(muster.nn.uncopyable(Acting("lock", best=5)))
    with pytest.warns(UserWarning, match=r"as it asks: policy\.0 \(test_uncopyable\.Acting\): marked") as told:
        collector = MultiCollector(ENV, policy, num_collectors=2, frames_per_batch=8, context="fork")
    with collector:
        assert (collector.rollout()["action"] == 5).all()
    (message,) = [str(warning.message) for warning in told if warning.category is UserWarning]
    assert "policy_factory=" in message
    assert "take the mark off policy.0" in message
    assert "cannot be copied" not in message
    assert "muster.nn.uncopyable" not in message


@muster.nn.uncopyable("holds the session")
class Session:
    pass


def test_a_marked_object_inside_keeps_its_policy_here():
    policy = Acting("lock", best=5)
    policy.inner.held = {"session": Session()}
    with pytest.warns(UserWarning, match=r'as it asks: policy\.inner\.held\["session"\] .*holds the session'):
        collector = MultiCollector(ENV, policy, num_collectors=2, frames_per_batch=8, context="fork")
    with collector:
        assert collector.policy is policy


@muster.nn.uncopyable("drives the arm")
class Marked(Acting):
    pass


def test_a_marked_part_that_is_rebuilt_there_lets_its_policy_travel():
    policy = torch.nn.Sequential(Marked("lock", best=5))
    muster.rebuild_with(policy[0], functools.partial(Marked, "lock"))
    with MultiCollector(ENV, policy, num_collectors=2, frames_per_batch=8, context="fork") as collector:
        assert (collector.rollout()["action"] == 5).all()
        policy[0].inner.aim_at(7)
        collector.update_policy_weights_()
        assert (collector.rollout()["action"] == 7).all()


def test_a_factory_that_holds_what_is_marked_is_refused_by_its_name_and_reason():
    policy = Marked("lock")
    with pytest.raises(muster.errors.CannotTravel) as raised:
        MultiCollector(ENV, policy_factory=lambda: policy, num_collectors=2, frames_per_batch=8)
    message = str(raised.value)
    assert "because of policy_factory.<closure>.policy (test_uncopyable.Marked): test_uncopyable.Marked is" in message
    assert message.endswith(
        "neither copied nor pickled. Let the factory build it: it is called in each collector's process\n"
        "More: docs/problems/uncopyable-policies.md"
    )


def test_an_env_s_argument_that_is_marked_is_built_in_the_worker():
    with pytest.raises(muster.errors.CannotTravel) as raised:
        muster.make_vec(CountingEnv, 2, env_kwargs={"length": Marked("lock")})
    assert ": drives the arm. It stays where it is" in str(raised.value)
    assert "muster.lazy(" in str(raised.value)


def test_built_by_a_factory_it_has_replicas_whose_weights_follow(kind: str, policy: Acting):
    factory = functools.partial(Acting, kind)
    with MultiCollector(
        ENV, policy, policy_factory=factory, num_collectors=2, frames_per_batch=8, context="fork"
    ) as collector:
        assert (collector.rollout()["action"] == 5).all()
        policy.inner.aim_at(7)
        collector.update_policy_weights_()
        batch = collector.rollout()
    assert (batch["action"] == 7).all()
    assert (batch["collector", "policy_version"] == 2).all()


def test_ppo_trains_it_as_it_is(policy: Acting):
    inner, held = policy.inner, policy.inner.held
    before = inner.critic[0].weight.clone()
    with muster.make_vec(ENV, 2, backend="serial", autoreset_mode="same_step") as envs:
        ppo = PPO(envs, PPOConfig(num_envs=2, num_steps=16), inner)
        assert ppo.iterate().episodes.mean_return == 6.0
        assert ppo.policy is inner
    assert inner.held is held
    assert not inner.critic[0].weight.equal(before)


def test_it_has_a_target_network(policy: Acting):
    target = TargetParams(policy)
    policy.inner.aim_at(9)
    obs = torch.zeros(3, 2)
    assert (target(obs) == 5).all()
    assert (policy(obs) == 9).all()
    target.hard_update()
    assert (target(obs) == 9).all()
