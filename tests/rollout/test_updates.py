"""Weights that a policy receives while it is used, and other changes to it between batches."""

from __future__ import annotations

import contextlib
import threading

import numpy as np
import pytest
import torch
from collecting import SERIAL, count_env
from tensordict.nn import ProbabilisticTensorDictModule, TensorDictModule, TensorDictSequential
from torch import nn
from torch.distributions import Categorical

from muster import Collector, MultiCollector
from muster.errors import SpecMismatch
from muster.nn import MultiAgentNet


class Learning(nn.Module):
    """Acts its one weight. In the third step of a batch it learns, as another thread might."""

    def __init__(self):
        super().__init__()
        self.best = nn.Parameter(torch.tensor(1.0))
        self.calls = 0

    def forward(self, obs):
        self.calls += 1
        if self.calls == 3:
            self.collector.update_policy_weights_({"best": torch.tensor(2.0)})
        return torch.full((len(obs),), int(self.best))


def test_weights_that_come_while_it_collects_are_for_the_next_batch():
    policy = Learning()
    with Collector(count_env(), policy, num_envs=2, frames_per_batch=12, make_vec_options=SERIAL) as collector:
        policy.collector = collector
        first = collector.rollout()
        assert (collector.acting_version, collector.policy_version, policy.best.item()) == (1, 2, 2)
        assert first["action"].eq(1).all()
        assert collector.rollout()["action"].eq(2).all()
        assert collector.acting_version == 2


def test_weights_that_wait_undo_nothing_that_the_learner_has_done_since():
    class LearningInPlace(Learning):
        def forward(self, obs):
            self.calls += 1
            if self.calls in (2, 3):
                self.best.data += 1  # as an optimizer does
                if self.calls == 2:
                    self.collector.update_policy_weights_(self.state_dict())
            return torch.full((len(obs),), int(self.best))

    policy = LearningInPlace()
    with Collector(count_env(), policy, num_envs=2, frames_per_batch=12, make_vec_options=SERIAL) as collector:
        policy.collector = collector
        collector.rollout()
        assert policy.best.item() == 3


def test_weights_that_were_saved_win_over_those_that_wait():
    class Restoring(Learning):
        def forward(self, obs):
            action = super().forward(obs)
            if self.calls == 4:
                self.collector.load_state_dict(self.saved)
            return action

    policy = Restoring()
    with Collector(count_env(), policy, num_envs=2, frames_per_batch=12, make_vec_options=SERIAL) as collector:
        policy.collector, policy.saved = collector, collector.state_dict()
        policy.saved["policy"] = {"best": torch.tensor(9.0)}
        collector.rollout()
        assert (policy.best.item(), collector.policy_version) == (9, 3)


class TwoWeights(nn.Module):
    """Returns both of its weights, and acts by the first."""

    def __init__(self):
        super().__init__()
        self.first = nn.Parameter(torch.ones(3))
        self.second = nn.Parameter(torch.full((3,), 2.0))

    def forward(self, obs):
        rows = {name: weight.max().detach().expand(len(obs)) for name, weight in self.named_parameters()}
        return rows | {"action": rows["first"].long() % 2}


ONE = {"num_collectors": 1, "frames_per_batch": 2}
BAD_WEIGHTS = {
    "meta": torch.empty(3, device="meta"),
    "sparse": torch.ones(3).to_sparse(),
    "complex": torch.ones(3, dtype=torch.complex64),
    "array": np.ones(3, np.float32),
    "shape": torch.ones(1),
    "lazy": nn.UninitializedParameter(),
}


@pytest.mark.parametrize("kind", ["between batches", "in a batch", "in replicas"])
def test_what_cannot_be_copied_changes_nothing(kind):
    first = torch.full((3,), 7.0)

    class Updating(TwoWeights):
        def forward(self, obs):
            if self.collector is not None:
                refused()
            return super().forward(obs)

    def refused():
        for second in BAD_WEIGHTS.values():
            with pytest.raises(SpecMismatch, match=r"weights\['second'\]"):
                collector.update_policy_weights_({"first": first, "second": second})

    if kind == "in replicas":
        collector = MultiCollector(count_env(), policy_factory=TwoWeights, context="fork", **ONE)
    else:
        policy = Updating()
        collector = Collector(count_env(), policy, num_envs=1, frames_per_batch=2, make_vec_options=SERIAL)
        policy.collector = collector if kind == "in a batch" else None
    with collector:
        refused()
        for _ in range(2):
            batch = collector.rollout()
            assert (batch["first"].tolist(), batch["second"].tolist()) == ([[1.0] * 2], [[2.0] * 2])
        assert collector.policy_version == 1


@pytest.mark.parametrize("within", [False, True])
def test_weights_may_change_places(within):
    class Swapping(TwoWeights):
        def forward(self, obs):
            if within and self.collector.batches == 0:
                swap()
            return super().forward(obs)

    def swap():
        collector.update_policy_weights_({"first": policy.second, "second": policy.first})

    policy = Swapping()
    with Collector(count_env(), policy, num_envs=1, frames_per_batch=1, make_vec_options=SERIAL) as collector:
        policy.collector = collector
        if within:
            collector.rollout()
        else:
            swap()
        assert (policy.first[0].item(), policy.second[0].item()) == (2, 1)


@pytest.mark.parametrize("own", [False, True])
def test_a_network_that_computes_with_other_tensors_meanwhile_can_be_updated(own):
    """The network runs under vmap, where it holds each call's tensors in the places of its own."""

    class Acting(nn.Module):
        def __init__(self):
            super().__init__()
            agents = [nn.Sequential(nn.Linear(2, 8), nn.PReLU(), nn.Linear(8, 2)) for _ in range(3)]
            self.net = MultiAgentNet.from_modules(agents)

        def forward(self, obs):
            return self.net(obs.unsqueeze(1).expand(-1, 3, -1)).mean(1).argmax(-1)

    def collect():
        with contextlib.suppress(StopIteration):
            while not done.is_set():
                collector.rollout()

    policy, done = Acting(), threading.Event()
    given = {name: torch.ones_like(tensor) for name, tensor in policy.state_dict().items()}
    with Collector(count_env(), policy, num_envs=2, frames_per_batch=80, make_vec_options=SERIAL) as collector:
        thread = threading.Thread(target=collect)
        thread.start()
        try:
            for _ in range(300):
                collector.update_policy_weights_(policy if own else given)
        finally:
            done.set()
            thread.join()
        assert collector.policy_version == 301
        assert all(bool((tensor == 1).all()) for tensor in policy.parameters()) is not own


class Logits(nn.Module):
    def __init__(self, *, values):
        super().__init__()
        self.layer, self.values = nn.Linear(2, 2), values

    def forward(self, obs):
        return (self.layer(obs), obs.sum(-1, keepdim=True)) if self.values else self.layer(obs)


@pytest.mark.parametrize("values", [False, True])
def test_a_module_in_the_place_of_another_gives_its_own_keys(values):
    """The keys change also where a policy is called through a TensorDict, which keeps what it once held."""

    def network(values):
        return TensorDictModule(Logits(values=values), ["observation"], ["logits", *["value"] * values])

    drawn = ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=Categorical)
    policy = TensorDictSequential(network(not values), drawn)
    with Collector(count_env(), policy, num_envs=2, frames_per_batch=8, make_vec_options=SERIAL) as collector:
        assert ("value" in collector.rollout()) is not values
        policy.module[0] = network(values)
        batch = collector.rollout()
        assert ("value" in batch) is values
        if values:
            torch.testing.assert_close(batch["value"], batch["observation"].sum(-1, keepdim=True))


def test_recurrent_state_starts_afresh_after_random_frames():
    def policy(obs, state):
        return {"action": torch.zeros(len(obs), dtype=torch.int64), "seen": state["h"]}, {"h": state["h"] + 1}

    options = {"make_vec_options": SERIAL, "initial_state": {"h": torch.zeros(1)}, "init_random_frames": 8}
    with Collector(count_env(length=99), policy, num_envs=2, frames_per_batch=8, seed=1, **options) as collector:
        begun = collector.state_dict()
        for _ in range(2):
            collector.rollout()
            assert collector.rollout()["seen"][0, :, 0].tolist() == [0, 1, 2, 3]
            collector.load_state_dict(begun)


class Holding(nn.Module):
    def __init__(self, layer, **buffers):
        super().__init__()
        self.layer = layer
        for name, buffer in buffers.items():
            if isinstance(buffer, nn.Parameter):
                self.register_parameter(name, buffer)
            else:
                self.register_buffer(name, buffer)

    def forward(self, obs):
        return (self.layer(obs).sum(-1) > 0).long()


@pytest.mark.parametrize(
    "make",
    [
        lambda: Holding(nn.LazyLinear(2)),
        lambda: Holding(nn.Linear(2, 2), graph=torch.eye(2).to_sparse()),
        lambda: Holding(nn.Linear(2, 2), graph=nn.Parameter(torch.eye(2).to_sparse())),
        torch.inference_mode()(lambda: Holding(nn.Linear(2, 2))),
    ],
    ids=["lazy", "sparse buffer", "sparse parameter", "made under inference_mode"],
)
def test_tensors_of_other_kinds_are_no_obstacle(make):
    policy = make()
    with Collector(count_env(), policy, num_envs=1, frames_per_batch=2, make_vec_options=SERIAL) as collector:
        collector.rollout()
        given = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
        given["layer.weight"] = torch.ones(2, 2)
        if "graph" in given:
            given["graph"] = 7 * given["graph"]
        collector.update_policy_weights_(given)
        assert policy.layer.weight.eq(1).all()
        assert "graph" not in given or policy.graph.detach().to_dense().diagonal().eq(7).all()


def test_averages_are_cast_as_they_are_by_torch():
    policy = Holding(nn.Linear(2, 2), seen=torch.tensor(4), used=torch.tensor(True))
    with Collector(count_env(), policy, num_envs=1, frames_per_batch=2, make_vec_options=SERIAL) as collector:
        collector.update_policy_weights_({name: 0.5 * tensor.double() for name, tensor in policy.state_dict().items()})
        assert (policy.seen.item(), policy.seen.dtype) == (2, torch.int64)
