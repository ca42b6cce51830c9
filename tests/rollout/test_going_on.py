"""Collectors that go on from the states of their envs, bit for bit: ``state_dict(envs=True)``."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.wrappers import NormalizeObservation

import muster
from muster.errors import ConfigError, UsageError
from slow import slow

COUNTS = ("collector", "policy_version")


class Recurrent(torch.nn.Module):
    """Draws an action from its memory."""

    initial_state = {"memory": torch.zeros(8)}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.cell, self.head = torch.nn.GRUCell(4, 8), torch.nn.Linear(8, 2)

    def forward(self, obs: Any, state: Any) -> Any:
        memory = self.cell(obs, state["memory"])
        return torch.distributions.Categorical(logits=self.head(memory)).sample(), {"memory": memory}


def drawn(obs: Any) -> Any:
    return torch.randint(0, 2, (len(obs),))


def collector(env: Any, policy: Any, make: Any = None, **options: Any) -> Any:
    kind: Any = muster.MultiCollector if "num_collectors" in options else muster.Collector
    options = {"num_envs": 4, "frames_per_batch": 80, "seed": 3, **options}
    return kind(env, policy, make_vec_options={"replayable": True, **(make or {})}, **options)


def collected(source: Any, batches: int) -> list[Any]:
    """Batches, with the episodes that have ended in each."""
    return [
        (source.rollout().exclude(COUNTS).to_dict(), source.last_episodes.returns, source.last_episodes.lengths)
        for _ in range(batches)
    ]


def assert_equal(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, (tuple, list)):
        for of_one, of_other in zip(one, other, strict=True):
            assert_equal(of_one, of_other)
    else:
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "drawn": ("CartPole-v1", drawn, {"compact": True}),
    "overlap": ("CartPole-v1", Recurrent(), {"overlap": True, "max_frames_per_traj": 13}),
    "next_step": ("CartPole-v1", None, {"make": {"autoreset_mode": "next_step"}, "max_frames_per_traj": 9}),
    "collectors": ("CartPole-v1", Recurrent(), {"num_collectors": 2}),
    "random actions of collectors": ("CartPole-v1", None, {"num_collectors": 2}),
    "agents": ("pettingzoo/mpe/simple_spread_v3", None, {}),
    "agents in turns": ("pettingzoo/classic/connect_four_v3", None, {"num_collectors": 2}),
}


@pytest.mark.parametrize("case", [*list(CASES)[:4], *slow(*list(CASES)[4:])])
def test_a_collector_goes_on_in_the_middle_of_episodes(case: str) -> None:
    env, policy, options = CASES[case]
    if "pettingzoo" in env:
        pytest.importorskip("mpe2" if "mpe" in env else "pettingzoo")
    with collector(env, policy, **options) as first:
        collected(first, 5)
        state = copy.deepcopy(first.state_dict(envs=True))
        assert all(one["state"].dtype is torch.uint8 for one in state["envs"])
        expected = collected(first, 3)
    for backend in ("process", "serial"):
        with (
            collector(env, policy, **options)
            if "num_collectors" in options
            else collector(
                env, policy, **{**options, "make": {**options.get("make", {}), "backend": backend}}
            ) as second
        ):
            second.load_state_dict(state)
            assert_equal(collected(second, 3), expected)


def test_other_collectors_go_on_with_the_same_envs() -> None:
    with collector("CartPole-v1", drawn, num_collectors=2) as first:
        collected(first, 3)
        state = first.state_dict(envs=True)
        expected = first.rollout()["observation"][:, 0]
    with collector("CartPole-v1", drawn, num_collectors=4) as second:
        second.load_state_dict(state)
        assert torch.equal(second.rollout()["observation"][:, 0], expected)


@pytest.mark.parametrize("count", [{}, {"num_collectors": 2}])
def test_an_env_that_differs_begins_a_new_episode(count: Any) -> None:
    make = {"wrappers": [NormalizeObservation]}
    with collector("CartPole-v1", drawn, make, **count) as first:
        collected(first, 5)
        state = first.state_dict(envs=True)
    with collector("CartPole-v1", drawn, make, **count) as second:
        collected(second, 1)
        with pytest.warns(RuntimeWarning, match="did not come to step .* begin new episodes"):
            second.load_state_dict(state)
        batch = second.rollout()
    assert batch["collector", "traj_ids"][:, 0].unique().numel() == 4
    assert batch["collector", "traj_ids"].min() >= state["traj_ids"].min()


def test_without_states_envs_begin_new_episodes() -> None:
    with collector("CartPole-v1", drawn, {"replayable": False}) as first:
        first.rollout()
        with pytest.raises(UsageError, match="replayable=True"):
            first.state_dict(envs=True)
    with collector("CartPole-v1", drawn) as second:
        assert "envs" not in second.state_dict(envs=True)  # nothing has begun
        second.rollout()
        state = second.state_dict(envs=True)
    with collector("CartPole-v1", drawn, {"replayable": False}) as third:
        third.load_state_dict(state)
        assert third.rollout()["collector", "traj_ids"].min() == state["next_traj_id"]
    with collector("CartPole-v1", drawn, num_collectors=2, sync=False) as fourth:
        with pytest.raises(UsageError, match="sync=True"):
            fourth.state_dict(envs=True)
        with (
            pytest.raises(ConfigError, match="expected 2 states"),
            collector("CartPole-v1", drawn, num_envs=2) as fifth,
        ):
            fifth.load_state_dict({**state, "envs": state["envs"]})
