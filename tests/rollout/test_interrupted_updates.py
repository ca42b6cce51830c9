"""An update of the weights that a handler ends: the old weights under the old number, or the new ones under the new."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
from gymnasium import spaces
from torch import nn

from interrupting import Interruption
from muster import Collector, MultiCollector
from rollout.counting_env import CountingEnv


class Wide(CountingEnv):
    """Takes any action."""

    def __init__(self) -> None:
        super().__init__()
        self.action_space = spaces.Discrete(2**40)


class Acting(nn.Module):
    """Acts by the sum of its weights, and of a number beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))
        self.beside = 0

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        assert len({*self.a.tolist(), *self.b.tolist()}) == 1
        return (self.a[0].detach().long() + 10_000 * self.beside).expand(len(obs)).clone()

    def set(self, value: float) -> None:
        with torch.no_grad():
            self.a.fill_(value)
            self.b.fill_(value)


def values(number: float) -> dict[str, torch.Tensor]:
    return {"a": torch.full((3,), float(number)), "b": torch.full((2,), float(number))}


def places() -> Iterator[int]:
    yield from range(10_000)


def test_a_collectors_own_policy() -> None:
    policy = Acting()
    with Collector(Wide, policy, frames_per_batch=1, make_vec_options={"backend": "serial"}) as collector:
        for place in places():
            old, version = int(policy.a[0]), collector.policy_version
            ended = Interruption(place).run(partial(collector.update_policy_weights_, values(place + 1)))
            assert (int(policy.a[0]), collector.policy_version) in ((old, version), (place + 1, version + 1)), place
            assert {*policy.a.tolist(), *policy.b.tolist()} == {policy.a[0].item()}
            if not ended:
                break
        assert place > 100
        collector.rollout()
        assert collector.acting_version == collector.policy_version


@pytest.mark.parametrize("given", [True, False])
def test_weights_that_replicas_take(given: bool) -> None:
    policy = Acting()
    with MultiCollector(Wide, policy, num_collectors=1, frames_per_batch=1) as collector:
        acting = 0
        for place in places():
            new, version = place + 1, collector.policy_version
            if not given:
                policy.set(new)
                policy.beside = new
            ended = Interruption(place).run(partial(collector.update_policy_weights_, values(new) if given else None))
            now = collector.policy_version
            assert now in (version, version + 1)
            expected = acting if now == version else new + 10_000 * policy.beside
            if place % 10 == 0 or now > version or not ended:
                batch = collector.rollout()
                assert batch["collector", "policy_version"].unique().tolist() == [now]
                assert batch["action"].unique().tolist() == [expected]
                assert not given or policy.a[0] == expected
            acting = expected
            if not ended:
                break
        assert place > 100
