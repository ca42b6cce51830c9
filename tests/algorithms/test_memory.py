"""A policy with memory: it learns from sequences what it did step by step, and recalls what it has seen."""

from __future__ import annotations

import functools
import runpy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from envs_of_agents import Comings
from gymnasium import spaces
from torch.testing import assert_close

import muster
from muster.algorithms import MAPPO, PPO, ActorCritic, MAPPOConfig, PPOConfig
from muster.algorithms.actor_critic import MEMORY, Sequences
from muster.algorithms.ppo import Rollout
from muster.algorithms.teams import AgentsPolicy

GRU: dict[str, Any] = {"policy": "gru", "memory_size": 8, "hidden_sizes": (8,), "num_minibatches": 1}
CUE = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "cue.py"))["Cue"]
SPREAD = "pettingzoo/mpe/simple_spread_v3"


class Clock(gym.Env[Any, Any]):
    """Observes 1 and the number of steps it made; is truncated after 5, or terminated after 3 in odd episodes."""

    observation_space = spaces.Box(0, 9, (2,), np.float32)
    action_space = spaces.Discrete(2)
    episode = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.episode, self.steps = self.episode + 1, 0
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return self._obs(), 1.0, self.episode % 2 == 1 and self.steps == 3, self.steps == 5, {}

    def _obs(self) -> Any:
        return np.array([1, self.steps], np.float32)


@contextmanager
def trained_on(env: Any, *, mode: str = "same_step", **options: Any) -> Iterator[Any]:
    """PPO, or for agents MAPPO, with a GRU."""
    with muster.make_vec(
        env, options.get("num_envs", 2), backend="serial", autoreset_mode=mode, **options.pop("made", {})
    ) as envs:
        kinds = (MAPPO, MAPPOConfig) if isinstance(envs, muster.MultiAgentVectorEnv) else (PPO, PPOConfig)
        yield kinds[0](envs, kinds[1](**{"num_envs": 2, "num_steps": 7, "sequence_length": 3, **GRU} | options))


def cell_of(weights: Mapping[str, torch.Tensor]) -> torch.nn.GRUCell:
    size = weights["weight_hh"].shape[1]
    cell = torch.nn.GRUCell(weights["weight_ih"].shape[1], size)
    cell.load_state_dict(weights)
    return cell


# ---- sequences


def test_sequences_are_what_the_cell_gives_step_by_step():
    """Two sequences of four steps, the second of which begins anew at its third."""
    policy = ActorCritic(spaces.Box(-1, 1, (3,)), spaces.Discrete(4), memory_size=5)
    cell, obs, start = cell_of(policy.cell.state_dict()), torch.randn(2, 4, 3), torch.randn(2, 5)
    keeps = torch.tensor([[True] * 4, [True, True, False, True]])
    params, values, after = policy(obs.flatten(0, 1), None, Sequences(start, keeps))
    for s in range(2):
        memory = start[s]
        for t in range(4):
            memory = cell(obs[s, t], memory if keeps[s, t] else torch.zeros(5))
            assert_close(params[4 * s + t], policy.actor(memory))
            assert_close(values[4 * s + t], policy.critic(memory)[0])
        assert_close(after[s], memory)
    assert_close(policy.decide(obs.flatten(0, 1), None, Sequences(start, keeps))[0], params)


@pytest.mark.parametrize("critic", [None, torch.nn.Identity()], ids=["own", "centralised"])
def test_sequences_of_agents_are_sequences_of_their_own(critic: Any):
    """[S * L, A]: each agent's memory is its own, and so is where it begins anew."""
    policy = ActorCritic(spaces.Box(-1, 1, (3,)), spaces.Discrete(4), memory_size=5)
    agents = AgentsPolicy(policy, critic)
    S, L, A = 2, 3, 2
    obs, start = torch.randn(S, L, A, 3), torch.randn(S, A, 5)
    keeps = torch.rand(S, L, A) < 0.5
    rows = obs.flatten(0, 1)
    params, values, _ = agents(
        rows if critic is None else {"own": rows, "sights": torch.arange(12.0).view(6, 2)},
        None,
        Sequences(start, keeps),
    )
    for agent in range(A):
        alone = policy(obs[:, :, agent].flatten(0, 1), None, Sequences(start[:, agent], keeps[:, :, agent]))
        assert_close(params[:, agent], alone[0])
        assert_close(values[:, agent], alone[1] if critic is None else torch.arange(12.0).view(6, 2)[:, agent])


def test_a_rollout_is_cut_into_equal_sequences_whose_copies_do_not_count():
    """Two envs of seven steps, three at most in a sequence: three sequences of three each, two of nine rows copies."""
    N, T = 2, 7
    number = torch.arange(N * T)
    counts = number != 1
    rows = Rollout(number, number, *(number.float() for _ in range(4)), counts=counts, acts=counts.clone())
    memory = number.view(N, T, 1).float()
    keeps = torch.ones(N, T, dtype=torch.bool)
    keeps[0, 3], keeps[0, 4] = False, False  # where a sequence begins, and within it
    cut = rows.in_sequences(memory, keeps, most=3)
    assert cut.observations.view(6, 3).tolist() == [
        [0, 1, 2], [3, 4, 5], [6, 6, 6], [7, 8, 9], [10, 11, 12], [13, 13, 13]
    ]  # fmt: skip
    expected = torch.ones(6, 3, dtype=torch.bool)
    expected[2, 1:] = expected[5, 1:] = expected[0, 1] = False
    assert torch.equal(cut.counts.view(6, 3), expected)
    assert torch.equal(cut.acts.view(6, 3), expected)
    assert cut.memory.start.flatten().tolist() == [0, 3, 6, 7, 10, 13]  # those that were stored
    assert cut.memory.keeps.tolist()[1] == [True, False, True]
    assert sorted(cut.observations[cut.counts].tolist()) == [0, *range(2, 14)]
    part = cut.at(torch.tensor([4, 1]))
    assert part.observations.tolist() == [10, 11, 12, 3, 4, 5]
    assert part.memory.start.flatten().tolist() == [10, 3]


# ---- what is collected is what is learnt from


def figures_of(trained: Any) -> Iterator[torch.Tensor]:
    """The figures of the loss on the next rollouts, whole, by the weights that have collected them."""
    if isinstance(trained, PPO):
        yield trained.learner.loss(trained.collect_rollout(), 0.2)[1]
        return
    for name, rollout in trained.collect_rollouts().items():
        yield trained.learners[name].loss(rollout, 0.2)[1]


@pytest.mark.filterwarnings("ignore:.*left env.agents")
@pytest.mark.parametrize("mode", ["same_step", "next_step"])
@pytest.mark.parametrize(
    ("env", "options"),
    [
        (Clock, {}),
        (Clock, {"normalize_observations": True, "num_steps": 2}),
        (lambda: Comings("terminated"), {"critic": "own"}),
        (lambda: Comings("pauses"), {"critic": "centralised"}),
        (SPREAD, {"critic": "centralised", "share_params": False, "num_steps": 13}),
    ],
    ids=["PPO", "normalised", "agents that end", "agents that pause", "a network each"],
)
def test_the_first_ratio_of_an_update_is_1(env: Any, options: dict[str, Any], mode: str):
    with trained_on(env, mode=mode, learning_rate=0.05, **options) as trained:
        for _ in range(3):
            trained.iterate()  # the memories that follow are of other weights in each
            for figures in figures_of(trained):
                assert figures.isfinite().all()
                assert abs(figures[3]) < 1e-6
                assert figures[4] == 0


def recalled(policy: Any, obs: torch.Tensor) -> torch.Tensor:
    """The value after observations [T, *shape] of an episode, by the cell, from no memory."""
    memory = torch.zeros(1, policy.memory_size)
    for row in obs:
        memory = policy.cell(row.unsqueeze(0), memory)
    return policy.critic(memory).squeeze()


@pytest.mark.parametrize("mode", ["same_step", "next_step"])
def test_values_of_what_follows_use_the_memory_after_the_step(mode: str):
    """gamma = 1/2, lambda = 0: a target is the reward and half of the next value, of the whole episode so far."""
    with trained_on(Clock, mode=mode, num_envs=1, num_steps=11, gamma=0.5, gae_lambda=0.0) as ppo, torch.no_grad():
        rollout, policy = ppo.collect_rollout(), ppo.policy
        clock = torch.tensor([[1.0, t] for t in range(6)])
        value = [recalled(policy, clock[: t + 1]) for t in range(6)]
    # The first episode is terminated after three steps, the second one truncated after five.
    followers = [value[1], value[2], 0, *value[1:]]
    followers += [value[1], value[2], 0] if mode == "same_step" else value[1:2]
    targets = rollout.targets[rollout.counts][: len(followers)]
    assert len(targets) == int(rollout.counts.sum())
    assert_close(targets, torch.tensor([1 + 0.5 * float(one) for one in followers]))


@pytest.mark.parametrize("how", ["terminated", "truncated"])
def test_an_agent_that_returns_begins_without_memory(how: str):
    with trained_on(lambda: Comings(how), critic="own", num_envs=1, num_steps=6) as mappo, torch.no_grad():
        for policy in mappo.policies.values():
            policy.policy.cell.bias_ih.fill_(0.5)  # no memory that is kept is 0
        batch = mappo._collect()
        memory, obs = batch[("w", *MEMORY)][0], batch["w", "observation"][0]
        cell, before = mappo.policies["w"].policy.cell, torch.zeros(2, 8)
        for t in range(6):
            if t == 4:  # w_1 was not there
                before[1] = 0
            assert_close(memory[t], before)
            before = cell(obs[t], before)


@pytest.mark.filterwarnings("ignore:.*left env.agents")
def test_the_value_after_an_absence_is_of_no_memory():
    """w_1 is not there at obs 2 and 3, and again at obs 4, with which the rollout ends."""
    options: dict[str, Any] = {"critic": "own", "num_envs": 1, "num_steps": 4, "gamma": 0.5, "gae_lambda": 0.0}
    with trained_on(lambda: Comings("pauses"), **options) as mappo, torch.no_grad():
        policy = mappo.policies["w"].policy
        policy.cell.bias_ih.fill_(0.5)
        rollout = mappo.collect_rollouts()["w"]
        expected = 0.5 * recalled(policy, torch.tensor([[14.0]]))
    assert_close(rollout.targets[:, 1][rollout.counts[:, 1]][1], expected)


@pytest.mark.parametrize(("policy", "recalls"), [("gru", True), ("feedforward", False)])
def test_a_cue_is_recalled_by_memory_alone(policy: str, recalls: bool):
    sizes = {"memory_size": 16, "num_envs": 16, "num_steps": 10, "update_epochs": 8, "total_steps": 4_000}
    with trained_on(
        functools.partial(CUE, delay=4), **sizes, policy=policy, sequence_length=10, learning_rate=0.02
    ) as ppo:
        *_, last = ppo.train()
    assert last.episodes.mean_return > 0.9 if recalls else last.episodes.mean_return < 0.7
