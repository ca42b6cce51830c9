"""What `MultiCollector` does after an error or Ctrl-C, and with weights that come from elsewhere."""

from __future__ import annotations

import functools
import pickle
import threading
import time

import pytest
import torch
from counting_env import CountingEnv, FailingEnv, FailsWhenTold
from tensordict import TensorDict
from torch import nn

from muster.errors import EnvError, SpecMismatch, UsageError
from muster.rollout.collector import Collector
from muster.rollout.multi_collector import MultiCollector as AnyMultiCollector
from muster.rollout.replicas.hooks import ReplicaFailed
from muster.rollout.storage import Storage
from slow import slow

# A forked process has PyTorch already; the default, a fresh one, takes seconds to import it.
MultiCollector = functools.partial(AnyMultiCollector, context="fork", num_collectors=2)
InOneProcess = functools.partial(Collector, num_envs=2, make_vec_options={"backend": "serial"})


class Constant(nn.Module):
    """Acts its one weight; layers nest, as in most policies."""

    def __init__(self, action: int = 0) -> None:
        super().__init__()
        self.last = nn.Linear(2, 1, bias=False)
        self.last.weight.data.fill_(0.0)
        self.register_buffer("action", torch.tensor(float(action)))

    def forward(self, obs):
        return (self.last(obs)[:, 0] + self.action).long()


class Slow(CountingEnv):
    def step(self, action):
        time.sleep(0.01)
        return super().step(action)


def zeros(obs):
    return torch.zeros(len(obs), dtype=torch.int64)


class Weightless(nn.Module):
    forward = staticmethod(zeros)


def begins_afresh(batch):
    ids = batch["collector", "traj_ids"]
    first = ids[:, 0]
    return not batch["observation"][:, 0, 1].any() and len(first.unique()) == len(first) == len(ids.unique())


@pytest.mark.parametrize("sync", [True, *slow(False)])
def test_after_an_error_all_envs_begin_new_episodes(sync):
    envs = [functools.partial(CountingEnv, length=99), functools.partial(FailingEnv, length=99)]
    with MultiCollector(envs, Constant(), frames_per_batch=14 if sync else 7, sync=sync) as collector:
        told = r"env 1 \(collector 1.*the motor is stuck"
        with pytest.raises(EnvError, match=told) as caught:  # others may come before it
            while collector.rollout().batch_size:
                pass
        assert caught.value.env_index == 1
        assert begins_afresh(collector.rollout())


def test_what_a_replica_raises_leaves_the_pool_as_data_that_travels():
    envs = [functools.partial(CountingEnv, length=99), functools.partial(FailingEnv, length=99)]
    with MultiCollector(envs, Constant(), frames_per_batch=14) as collector:
        with pytest.raises(ReplicaFailed) as caught:
            collector._collectors._pool.collect()
        error = pickle.loads(pickle.dumps(caught.value)).error()
    assert (type(error), error.env_index, error.worker_index) == (EnvError, 1, 1)
    assert "the motor is stuck" in str(error) == str(caught.value)
    assert any(note.startswith("In the collector's process:\nTraceback") for note in error.__notes__)


def test_after_an_env_s_error_in_a_call_batches_go_on():
    with MultiCollector(functools.partial(FailsWhenTold, length=99), Constant(), frames_per_batch=3, sync=False) as one:
        one.rollout()
        one.set_attr("told", True)
        one.rollout()  # was collected before
        time.sleep(0.5)
        with pytest.raises(EnvError, match="the motor is stuck"):  # so are both
            one.get_attr("length")
        one.set_attr("told", False)
        assert all(one.rollout()["collector", "mask"].all() for _ in range(3))


@pytest.mark.parametrize("make", [MultiCollector, InOneProcess])
def test_a_batch_that_was_lost_after_it_was_stepped_leaves_no_gap(make, monkeypatch):
    def interrupted(storage, traj_ids):
        monkeypatch.undo()
        raise KeyboardInterrupt

    with make(functools.partial(CountingEnv, length=9), Constant(), frames_per_batch=14) as collector:
        monkeypatch.setattr(Storage, "to_batch", interrupted)
        with pytest.raises(KeyboardInterrupt):
            collector.rollout()
        assert begins_afresh(collector.rollout())
        collector.rollout()
    assert collector.last_episodes.lengths.tolist() == [9, 9]


def test_a_second_thread_is_refused_and_the_first_is_not_disturbed():
    batches = []
    with MultiCollector(functools.partial(Slow, length=99), Constant(), frames_per_batch=40) as collector:
        first = threading.Thread(target=lambda: batches.append(collector.rollout()))
        first.start()
        time.sleep(0.05)
        with pytest.raises(UsageError, match="another thread is collecting"):
            collector.rollout()
        first.join()
        following = collector.rollout()
    assert begins_afresh(batches[0])
    assert following["observation"][:, 0, 1].tolist() == [20, 20]


def test_replicas_take_a_tensordict_a_module_and_a_state_dict():
    with MultiCollector(CountingEnv, policy_factory=Constant, frames_per_batch=4) as collector:
        for best, given in enumerate((TensorDict.from_module, lambda module: module, nn.Module.state_dict), 7):
            collector.update_policy_weights_(given(Constant(best)))
            assert (collector.rollout()["action"] == best).all()
        with pytest.raises(SpecMismatch, match=r"shape \(1,\), the policy's \(1, 2\)"):
            collector.update_policy_weights_({"action": torch.tensor(1.0), "last.weight": torch.zeros(1)})
        assert (collector.rollout()["action"] == 9).all()


@pytest.mark.parametrize("policy", [zeros, Weightless()])
def test_policies_without_weights_have_a_state_dict_too(policy):
    with MultiCollector(CountingEnv, policy, frames_per_batch=4) as collector:
        collector.rollout()
        collector.load_state_dict(collector.state_dict())
        assert begins_afresh(collector.rollout())


def test_the_state_dict_of_a_method_holds_its_modules_weights():
    learner = Constant(7)
    with MultiCollector(CountingEnv, learner.forward, frames_per_batch=4) as collector:
        state = collector.state_dict()
    resumed = Constant(1)
    with MultiCollector(CountingEnv, resumed.forward, frames_per_batch=4) as collector:
        collector.load_state_dict(state)
        assert (collector.rollout()["action"] == 7).all()
    assert resumed.action == 7
