"""What `update_policy_weights_` takes along beside parameters and buffers."""

import functools
import warnings

import numpy as np
import pytest
import torch
from gymnasium import spaces

import muster
from envs import Scripted

Still = functools.partial(
    Scripted, obs_space=spaces.Box(-1, 1, (1,), np.float32), action_space=spaces.Box(-100, 100, (1,), np.float32)
)


class Scale:
    """A helper that is no module, as running statistics often are."""

    def __init__(self):
        self.mean = torch.zeros(1)
        self.count = 0


class Policy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.bias = torch.nn.Parameter(torch.zeros(1))
        self.epsilon = 1.0
        self.mean = torch.zeros(1)
        self.stats = {"mean": torch.zeros(1), "all": [0.0]}
        self.scale = Scale()
        self.table = np.zeros(1, np.float32)
        self.inner = torch.nn.Dropout(0.5)

    def forward(self, obs):
        told = self.bias + self.epsilon + self.mean + self.stats["mean"] + self.stats["all"][0] + self.scale.mean
        told = told + self.scale.count + torch.from_numpy(self.table) + 50 * self.inner.training
        return torch.zeros_like(obs) + told


CHANGES = {
    "weight": lambda policy: policy.bias.data.add_(2),
    "number": lambda policy: setattr(policy, "epsilon", 3.0),
    "tensor in place": lambda policy: policy.mean.add_(2),
    "new tensor": lambda policy: setattr(policy, "mean", torch.full((1,), 2.0)),
    "tensor in a dict": lambda policy: policy.stats["mean"].add_(2),
    "number in a list": lambda policy: policy.stats["all"].__setitem__(0, 2.0),
    "helper's tensor": lambda policy: setattr(policy.scale, "mean", policy.scale.mean + 2),
    "helper's number": lambda policy: setattr(policy.scale, "count", policy.scale.count + 2),
    "array": lambda policy: policy.table.__iadd__(2),
    "eval": lambda policy: policy.eval(),
}


def _acts(collector):
    return collector.rollout()["action"].unique().tolist()


@pytest.mark.timeout(120)
def test_collectors_follow_the_policy_as_a_collector_does():
    policy = Policy()
    options = {"num_envs": 2, "frames_per_batch": 4}
    with (
        muster.MultiCollector(Still, policy, num_collectors=2, **options) as collector,
        muster.Collector(Still, policy, make_vec_options={"backend": "serial"}, **options) as here,
    ):
        assert _acts(collector) == _acts(here) == [51.0]
        for name, change in CHANGES.items():
            change(policy)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                collector.update_policy_weights_()
            here.update_policy_weights_()
            assert _acts(collector) == _acts(here), name
        assert _acts(here) == [1.0 + 2 * 8]  # all but eval, and one replaced another


def test_what_a_factory_has_set_stays_until_it_changes_here():
    def build():
        policy = Policy().eval()
        policy.epsilon = 5.0
        return policy

    learner = Policy()
    options = {"num_collectors": 1, "num_envs": 1, "frames_per_batch": 2}
    with muster.MultiCollector(Still, learner, policy_factory=build, **options) as collector:
        collector.update_policy_weights_()
        assert _acts(collector) == [5.0]
        learner.epsilon = 6.0
        collector.update_policy_weights_()
        assert _acts(collector) == [6.0]


def test_what_cannot_be_sent_is_named():
    policy = Policy()
    with muster.MultiCollector(Still, policy, num_collectors=1, num_envs=1, frames_per_batch=2) as collector:
        policy.epsilon = torch.distributions.Normal(0.0, 1.0)
        with pytest.warns(RuntimeWarning, match=r"the policy's epsilon has become a Normal.*register_buffer it"):
            collector.update_policy_weights_()
        assert _acts(collector) == [51.0]


def test_a_collector_that_was_replaced_has_it_too():
    policy = Policy()
    options = {"num_collectors": 1, "num_envs": 1, "frames_per_batch": 2, "on_failure": "restart"}
    with muster.MultiCollector(Still, policy, **options) as collector:
        policy.epsilon = 2.0
        policy.eval()
        collector.update_policy_weights_()
        assert _acts(collector) == [2.0]
        collector.call(_kill_in_the_next_step)
        with pytest.warns(RuntimeWarning, match="was replaced"):
            collector.rollout()
        assert _acts(collector) == [2.0]


def _kill_in_the_next_step(env, index):
    import os
    import signal

    env.unwrapped.step = lambda action: os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("learner_is_compiled", [False, True])
def test_names_fit_whichever_side_is_compiled(learner_is_compiled):
    plain, compiled = torch.nn.Linear(1, 1), torch.compile(torch.nn.Linear(1, 1), backend="eager")
    learner, policy = (compiled, plain) if learner_is_compiled else (plain, compiled)
    with torch.no_grad():
        learner.weight.fill_(0.0)
        learner.bias.fill_(4.0)
    options = {"num_envs": 1, "frames_per_batch": 2, "make_vec_options": {"backend": "serial"}}
    with muster.Collector(Still, policy, **options) as collector:
        collector.update_policy_weights_(learner.state_dict())
        assert _acts(collector) == [4.0]
        collector.update_policy_weights_(learner)
        collector.update_policy_weights_(collector.policy.state_dict())
        assert _acts(collector) == [4.0]
