"""TensorDictModules called without a TensorDict: the same batches, and only where nothing else is to happen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from collecting import SERIAL
from counting_env import CountingEnv, NoisyEnv
from tensordict import TensorDict
from tensordict.nn import (
    CompositeDistribution,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
    set_skip_existing,
)
from torch import Tensor, nn

from muster.rollout.collector import Collector
from muster.rollout.plain_modules import PlainModules


class Acting(nn.Module):
    """Turns [N, 2] into actions and features."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(2, 5)

    def forward(self, obs: Tensor) -> tuple[Tensor, Tensor]:
        features = self.net(obs)
        return features.argmax(-1) + torch.randint(0, 2, (len(obs),)), features


def single() -> TensorDictModule:
    return TensorDictModule(Acting(), in_keys=["observation"], out_keys=["action", ("deep", "features")])


def as_dict() -> TensorDictModule:
    def by_name(obs: Tensor) -> dict[str, Tensor]:
        action, features = acting(obs)
        return {"features": features, "action": action}

    acting = Acting()
    return TensorDictModule(by_name, in_keys=["observation"], out_keys=["action", "features"])


def chain() -> TensorDictSequential:
    ahead = TensorDictModule(nn.Linear(2, 2), in_keys=["observation"], out_keys=["hidden"])
    inner = TensorDictSequential(TensorDictModule(Acting(), in_keys=["hidden"], out_keys=["action", "features"]))
    return TensorDictSequential(ahead, inner)


def drawing(**options: Any) -> ProbabilisticTensorDictSequential:
    torch.manual_seed(0)
    return ProbabilisticTensorDictSequential(
        TensorDictModule(nn.Linear(2, 5), ["observation"], [("deep", "logits")]),
        ProbabilisticTensorDictModule(
            {"logits": ("deep", "logits")},
            ["action"],
            distribution_class=torch.distributions.Categorical,
            return_log_prob=True,
            **options,
        ),
    )


def owner_of_its_generator() -> ProbabilisticTensorDictSequential:
    return drawing(generator=3)


def joint() -> ProbabilisticTensorDictSequential:
    kinds = {"action": torch.distributions.Categorical}
    return ProbabilisticTensorDictSequential(
        TensorDictModule(nn.Linear(2, 5), ["observation"], [("params", "action", "logits")]),
        ProbabilisticTensorDictModule(
            ["params"], distribution_class=CompositeDistribution, distribution_kwargs={"distribution_map": kinds}
        ),
    )


def remembering() -> TensorDictModule:
    """Reads what it wrote a step before."""
    return TensorDictModule(
        lambda obs, count: (obs[:, 1].long() % 5, count + 1), ["observation", "count"], ["action", ("next", "count")]
    )


def nested_input() -> TensorDictModule:
    return TensorDictModule(lambda td: td["x"].sum(-1).long() % 5, in_keys=["inputs"], out_keys=["action"])


PLAIN = [single, as_dict, chain, remembering, drawing, owner_of_its_generator]


def batch_of(policy: Any, **options: Any) -> TensorDict:
    with Collector(
        NoisyEnv, policy, num_envs=3, frames_per_batch=30, seed=1, make_vec_options={"backend": "serial"}, **options
    ) as collector:
        collector.rollout()
        return collector.rollout()


@pytest.mark.parametrize("make", PLAIN)
def test_batches_are_those_of_the_modules_own_call(make: Any, monkeypatch: pytest.MonkeyPatch):
    options = {"initial_state": {"count": torch.zeros(1)}} if make is remembering else {}
    calls = []
    monkeypatch.setattr(TensorDictModule, "forward", counted(TensorDictModule.forward, calls))
    torch.manual_seed(0)
    got = batch_of(make(), **options)
    assert len(calls) <= 2  # the first step of the collector alone; two modules at most
    monkeypatch.setattr(PlainModules, "call", lambda self, values: False)
    torch.manual_seed(0)
    expected = batch_of(make(), **options)
    assert len(calls) > 20
    keys = set(expected.keys(True, True))
    assert set(got.keys(True, True)) == keys
    assert all(got[key].equal(expected[key]) for key in keys)


def counted(forward: Any, calls: list[int]) -> Any:
    def counting(self: Any, *args: Any, **kwargs: Any) -> Any:
        if type(self) is TensorDictModule:
            calls.append(1)
        return forward(self, *args, **kwargs)

    return counting


@pytest.mark.parametrize(
    "policy",
    [
        TensorDictModule(nn.Linear(2, 2), ["observation"], ["action"], inplace=False),
        TensorDictModule(nn.Linear(2, 2), {"input": "observation"}, ["action"], out_to_in_map=False),
        TensorDictModule(nn.Linear(2, 2), ["observation"], ["_"]),
        TensorDictSequential(single(), selected_out_keys=["action"]),
        TensorDictSequential(single(), partial_tolerant=True),
        TensorDictSequential(single(), lambda td: td),
        type("Own", (TensorDictModule,), {"_call_module": lambda self, tensors: tensors})(
            nn.Linear(2, 2), ["a"], ["b"]
        ),
        drawing(num_samples=2),
        drawing(generator="generator"),
        ProbabilisticTensorDictSequential(drawing(), drawing().module[-1], return_composite=True),
    ],
    ids=range(10),
)
def test_whatever_does_more_is_called_its_own_way(policy: Any):
    assert not PlainModules(policy).able


def test_a_distribution_of_many_keys_gets_its_tensordict():
    assert not PlainModules(joint(), (1,)).call({("observation",): torch.zeros(1, 2)})


def test_hooks_run_whenever_they_are_registered():
    policy, seen = single(), []
    with Collector(
        NoisyEnv, policy, num_envs=1, frames_per_batch=4, make_vec_options={"backend": "serial"}
    ) as collector:
        collector.rollout()
        handle = policy.register_forward_hook(lambda module, args, output: seen.append(output["action"].shape))
        collector.rollout()
        assert len(seen) == 4
        handle.remove()
        policy.module.register_forward_pre_hook(lambda module, args: seen.append(args))
        collector.rollout()
        assert len(seen) == 8


def test_a_module_that_takes_anothers_place_acts_from_the_next_batch():
    def giving(action: int) -> nn.Module:
        class Giving(nn.Module):
            def forward(self, obs: torch.Tensor) -> torch.Tensor:
                return torch.full((len(obs),), action)

        return Giving()

    policy = TensorDictModule(giving(1), ["observation"], ["action"])
    with Collector(CountingEnv, policy, num_envs=2, frames_per_batch=8, make_vec_options=SERIAL) as collector:
        assert collector.rollout()["action"].eq(1).all()
        policy.module = giving(2)
        assert collector.rollout()["action"].eq(2).all()
        inner = policy.forward
        policy.forward = lambda td: inner(td).set("action", torch.full((2,), 3))
        assert collector.rollout()["action"].eq(3).all()


def test_what_only_the_module_before_gave_is_left_out():
    first = nn.Linear(2, 1)
    policy = TensorDictSequential(
        TensorDictModule(lambda obs: torch.ones(len(obs), dtype=torch.int64), ["observation"], ["action"]),
        TensorDictModule(first, ["observation"], ["value"]),
    )
    with Collector(CountingEnv, policy, num_envs=2, frames_per_batch=8, make_vec_options=SERIAL) as collector:
        assert "value" in collector.rollout()
        policy.module[1] = TensorDictModule(first, ["observation"], ["worth"])
        calls = []
        policy.module[1].register_forward_hook(lambda *_: calls.append(1))
        batch = collector.rollout()
    assert "value" not in batch
    assert batch["worth"].shape == (2, 4, 1)
    assert len(calls) == 4


def test_the_mode_that_skips_existing_keys_is_heeded():
    policy = single()
    values = {("observation",): torch.zeros(1, 2)}
    assert PlainModules(policy).call(dict(values))
    with set_skip_existing(True):
        assert not PlainModules(policy).call(values)


def test_a_wrapper_that_gets_a_forward_of_its_own_is_called_itself():
    policy = single()
    modules, values = PlainModules(policy), {("observation",): torch.zeros(1, 2)}
    assert modules.call(dict(values))
    policy.forward = lambda td: td.set("action", td["observation"])
    assert not modules.call(values)


def test_inputs_that_are_tensordicts_themselves_are_left_to_it():
    modules = PlainModules(nested_input())
    assert modules.able
    assert not modules.call({("inputs", "x"): torch.zeros(1, 2)})
