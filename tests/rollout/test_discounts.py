"""Batches of dm_env's envs have the discounts that the envs give; no other batch has any."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import torch
from collecting import collect
from counting_env import CountingEnv

from muster.rollout.multi_collector import MultiCollector
from slow import slow

dm_env = pytest.importorskip("dm_env", reason="pip install dm-env")
specs = dm_env.specs


class Lives(dm_env.Environment):
    """Step t has the t-th of the `discounts`; the last one ends the episode."""

    def __init__(self, *discounts: Any) -> None:
        self.discounts = discounts

    def observation_spec(self) -> Any:
        return specs.Array((1,), np.float32, "o")

    def action_spec(self) -> Any:
        return specs.DiscreteArray(2)

    def reset(self) -> Any:
        self.t = 0
        return dm_env.restart(self._seen())

    def step(self, action: Any) -> Any:
        self.t += 1
        kind = dm_env.StepType.LAST if self.t == len(self.discounts) else dm_env.StepType.MID
        return dm_env.TimeStep(kind, self._reward(), self.discounts[self.t - 1], self._seen())

    def _seen(self) -> Any:
        return np.full(1, self.t, np.float32)

    def _reward(self) -> Any:
        return 1.0


class Players(Lives):
    """Two players, in the same episode."""

    def observation_spec(self) -> Any:
        return [{"x": super(Players, self).observation_spec()} for _ in range(2)]

    def action_spec(self) -> Any:
        return [specs.DiscreteArray(2)] * 2

    def _seen(self) -> Any:
        return [{"x": super(Players, self)._seen()} for _ in range(2)]

    def _reward(self) -> Any:
        return [1.0, 2.0]


DIES, CUT = (1.0, 0.0, 0.5, 0.0), (1.0, 1.0, 1.0, 0.25)
ALONE = [functools.partial(Lives, *DIES), functools.partial(Lives, *CUT)]
TOGETHER = [
    functools.partial(Players, 1.0, [0.0, 1.0], 0.5, [0.0, 0.0]),
    functools.partial(Players, 1.0, 1.0, [1.0, 0.5], [0.25, 1.0]),
]
KINDS = {"alone": (ALONE, ("next", "discount")), "together": (TOGETHER, ("next", "player", "discount"))}
# By env and step.
EXPECTED = {
    "alone": [[1, 0, 0.5, 0], [1, 1, 1, 0.25]],
    "together": [
        [[1, 1], [0, 1], [0.5, 0.5], [0, 0]],
        [[1, 1], [1, 1], [1, 0.5], [0.25, 1]],
    ],
}


def by_env(batch: Any, key: Any) -> torch.Tensor:
    """The values of `key` with envs first; of those under "next" without their last dim, of 1."""
    values = batch[key].squeeze(-1) if key[0] == "next" else batch[key]
    return values if batch.names[-1] == "time" else values.transpose(0, 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["same_step", *slow("next_step")])
@pytest.mark.parametrize("more", [{}, {"overlap": True}, {"compact": True}], ids=str)
def test_a_collectors_batch_has_them(kind: str, mode: str, more: dict[str, Any]) -> None:
    envs, key = KINDS[kind]
    batch, _ = collect(envs, T=9, options={"autoreset_mode": mode}, num_envs=2, **more)
    discounts, expected = by_env(batch, key), torch.tensor(EXPECTED[kind])
    assert discounts.dtype == torch.float32
    assert batch[key].shape[-1] == 1
    second = slice(4, 8) if mode == "same_step" else slice(5, 9)
    assert discounts[:, :4].equal(expected)
    assert discounts[:, second].equal(expected)
    terminated = by_env(batch, ("next", "terminated"))
    assert terminated[:, 3].tolist() == [True, False]


@pytest.mark.parametrize("kind", KINDS)
def test_so_has_that_of_several_collectors(kind: str) -> None:
    envs, key = KINDS[kind]
    with MultiCollector(envs, num_collectors=2, frames_per_batch=16, context="fork") as several:
        batch = several.rollout()
    expected = torch.tensor(EXPECTED[kind])
    assert by_env(batch, key).equal(torch.cat([expected, expected], 1))


@pytest.mark.parametrize("kind", KINDS)
def test_a_trajectory_that_is_cut_keeps_its_envs_discounts(kind: str) -> None:
    envs, key = KINDS[kind]
    batch, _ = collect(envs, T=6, num_envs=2, max_frames_per_traj=3)
    assert by_env(batch, ("next", "truncated"))[:, 2].all()
    expected = torch.tensor(EXPECTED[kind])[:, :3]
    assert by_env(batch, key).equal(torch.cat([expected, expected], 1))
    if kind == "together":
        assert by_env(batch, ("next", "player", "truncated"))[:, 2].all()


class Trouble(Lives):
    def step(self, action: Any) -> Any:
        if self.t == 1:
            raise RuntimeError("a wheel came off")
        return super().step(action)


def test_the_row_of_an_env_that_was_replaced_is_not_discounted() -> None:
    options = {"backend": "process", "context": "fork", "on_failure": "restart"}
    with pytest.warns(RuntimeWarning, match="a wheel came off"):
        batch, _ = collect(functools.partial(Trouble, *DIES), T=3, num_envs=1, options=options)
    assert by_env(batch, ("collector", "mask")).tolist() == [[True, False, True]]
    assert by_env(batch, ("next", "discount")).tolist() == [[1, 1, 1]]


def test_no_other_batch_has_any() -> None:
    batch, _ = collect(CountingEnv)
    assert ("next", "discount") not in batch.keys(True)
