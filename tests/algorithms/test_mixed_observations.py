"""Observations of several parts, Dict and Tuple: what PPO and MAPPO learn from them, and a run's policy takes."""

from __future__ import annotations

import functools
import json
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from envs_of_agents import Comings
from gymnasium import spaces
from tensordict import TensorDict
from torch.testing import assert_close

import muster
from command import muster as command
from muster.algorithms import MAPPO, PPO, MAPPOConfig, PPOConfig
from muster.errors import SpecMismatch

SIZES: dict[str, Any] = {"num_envs": 2, "num_steps": 16, "num_minibatches": 1, "update_epochs": 1, "memory_size": 8}
WORDS = [f"--{name.replace('_', '-')}={value}" for name, value in SIZES.items()]
WORDS += ["--backend=serial", "--normalize-observations"]
PARTS: dict[str, gym.Space[Any]] = {
    "image": spaces.Box(0, 255, (16, 16, 3), np.uint8),
    "numbers": spaces.Box(-np.inf, np.inf, (3,), np.float32),
    "choice": spaces.Discrete(3, start=2),
}
MASK = {"action_mask": spaces.MultiBinary(2)}
SPACES = {
    "Dict": spaces.Dict({**PARTS, **MASK}),
    "Tuple": spaces.Tuple(list(PARTS.values())),
    "nested": spaces.Dict({"deep": spaces.Dict(PARTS), "memory": PARTS["numbers"], "chosen": PARTS["numbers"]}),
    "of no numbers": spaces.Dict({**PARTS, "nothing": spaces.Box(0, 1, (0,), np.float32)}),
}


class Parts(gym.Env[Any, Any]):
    """Random observations of a space; the numbers are far from 0. An assert meets the second choice."""

    action_space = spaces.Discrete(2)

    def __init__(self, kind: str) -> None:
        self.kind, self.observation_space = kind, SPACES[kind]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.steps = 0
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        assert self.kind != "Dict" or action == 0
        self.steps += 1
        return self._obs(), float(action), False, self.steps == 4, {}

    def _obs(self) -> Any:
        obs: Any = self.observation_space.sample()
        if self.kind == "Tuple":
            return (obs[0], 1000 + obs[1], obs[2])
        if self.kind == "Dict":
            obs |= {"numbers": 1000 + obs["numbers"], "action_mask": np.array([1, 0], np.int8)}
        return obs


@contextmanager
def ppo_on(kind: str, mode: str = "same_step", **options: Any) -> Any:
    with muster.make_vec(functools.partial(Parts, kind), 2, backend="serial", autoreset_mode=mode) as envs:
        yield PPO(envs, PPOConfig(**SIZES | options))


@pytest.mark.parametrize("mode", ["same_step", "next_step"])
@pytest.mark.parametrize("policy", ["feedforward", "gru"])
@pytest.mark.parametrize("kind", SPACES)
def test_ppo_learns_from_the_policy_that_has_acted(kind: str, policy: str, mode: str):
    with ppo_on(kind, mode, policy=policy, normalize_observations=True, learning_rate=0.01) as ppo:
        ppo.iterate()
        rollout = ppo.collect_rollout()
        assert abs(ppo.learner.loss(rollout, 0.2)[1][3]) < 1e-6


def test_numbers_are_normalised_and_nothing_else():
    with ppo_on("Dict", normalize_observations=True) as ppo:
        raw = ppo.collect_rollout().observations  # without statistics these are as they were, but clipped
        assert set(raw.keys()) == set(PARTS)
        assert raw["numbers"].min() == 10
        (moments,) = [leaf.moments for leaf in ppo.observations.leaves]
        assert (moments.count, moments.mean.round().tolist()) == (32, [1000] * 3)
        mean, deviation = moments.mean.clone(), moments.var.sqrt()
        batch = ppo._collect
        kept: list[Any] = []
        ppo._collect = lambda: kept.append(batch()) or kept[0]
        seen = ppo.collect_rollout().observations
    by_hand = (kept[0]["numbers"].flatten(0, 1) - mean) / deviation
    assert_close(seen["numbers"], by_hand.clamp(-10, 10).float())
    for name in ("image", "choice"):
        assert torch.equal(seen[name], kept[0][name].flatten(0, 1))


def test_values_of_more_ends_than_a_minibatch_has_rows():
    """Eight final observations, where a minibatch has four rows."""
    with ppo_on("Dict", num_minibatches=8) as ppo:
        assert ppo.iterate().steps == 32


class Sharing(Comings):
    """As `Comings`, with observations of several parts. An assert meets the second choice, where masks forbid it."""

    def __init__(self, how: str = "truncated", kind: str = "Dict") -> None:
        super().__init__(how)
        self.space: Any = SPACES[kind]

    def observation_space(self, agent: str) -> Any:
        return self.space

    def _obs(self) -> Any:
        self.space.seed(self.t)
        obs = {agent: self.space.sample() for agent in self.agents}
        for one in obs.values():
            if isinstance(self.space, spaces.Dict) and "action_mask" in one:
                one["action_mask"][:] = (1, 0)
        return obs

    def step(self, actions: dict[str, Any]) -> Any:
        assert "action_mask" not in self.space.spaces or not any(actions.values())
        return super().step(actions)


@pytest.mark.filterwarnings("ignore:.*left env.agents")
@pytest.mark.parametrize("critic", ["own", "centralised"])
@pytest.mark.parametrize("policy", ["feedforward", "gru"])
@pytest.mark.parametrize("kind", ["Dict", "Tuple"])
def test_mappo_learns_from_parts_also_of_agents_that_come_and_go(kind: str, policy: str, critic: str):
    make = functools.partial(Sharing, "pauses", kind)
    config = MAPPOConfig(**SIZES, critic=critic, policy=policy, normalize_observations=True)
    with muster.make_vec(make, 2, backend="serial", autoreset_mode="same_step", state=True) as envs:
        mappo = MAPPO(envs, config)
        mappo.iterate()
        rollout = mappo.collect_rollouts()["w"]
    seen = rollout.observations if critic == "own" else rollout.observations["own"]
    assert isinstance(seen, TensorDict)
    assert seen.shape == rollout.counts.shape
    assert abs(mappo.learners["w"].loss(rollout, 0.2)[1][3]) < 1e-6


def learnt(env: str, kind: str, run: Path) -> Any:
    """What a short run on an env of this file has learnt."""
    made = ["--total-steps=32", "--run-dir", str(run), f"--kwargs={json.dumps({'kind': kind})}"]
    result = command("train", f"{__file__}:{env}", *WORDS, *made)
    assert result.exit_code == 0, result.output
    return muster.load_policy(run, trust=True)


@pytest.mark.parametrize("kind", ["Dict", "Tuple"])
def test_a_loaded_policy_takes_parts_as_arrays_tensors_and_single_ones(kind: str, tmp_path: Path):
    policy = learnt("Parts", kind, tmp_path / "run")
    assert policy.observation_space == SPACES[kind]
    with policy.make_vec(5, backend="serial") as envs:
        obs, _ = envs.reset(seed=0)
    acted = policy(obs)
    assert (acted.shape, acted.dtype) == ((5,), np.int64)
    assert kind != "Dict" or not acted.any()  # by the masks

    def mapped(change: Any, of: Any) -> Any:
        if isinstance(of, dict):
            return {name: mapped(change, one) for name, one in of.items()}
        return tuple(mapped(change, one) for one in of) if isinstance(of, tuple) else change(of)

    tensors = policy(mapped(torch.from_numpy, obs))
    assert isinstance(tensors, torch.Tensor)
    np.testing.assert_array_equal(tensors, acted)
    assert [policy(mapped(lambda one, i=i: one[i], obs)) for i in range(5)] == acted.tolist()
    for wrong in (
        np.zeros(3),
        {},
        mapped(lambda one: one[:2] if one.shape[-1:] == (3,) and one.ndim == 2 else one, obs),
    ):
        with pytest.raises(SpecMismatch) as caught:
            policy(wrong)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["Dict", "Tuple"])
def test_a_loaded_policy_of_agents_takes_parts_by_agent_and_by_group(kind: str, tmp_path: Path):
    policy = learnt("Sharing", kind, tmp_path / "run")
    env = Sharing(kind=kind)
    obs, _ = env.reset()
    acted = policy(obs)
    assert acted.keys() == {"w_0", "w_1"}
    assert kind != "Dict" or set(acted.values()) == {0}  # by the masks
    alone = policy({"w_1": obs["w_1"]})
    assert alone == {"w_1": acted["w_1"]}
    with policy.make_vec(1, backend="serial") as envs:
        seen, infos = envs.reset()
        assert policy(seen, masks=infos.get("action_mask"))["w"].tolist() == [[acted["w_0"], acted["w_1"]]]
