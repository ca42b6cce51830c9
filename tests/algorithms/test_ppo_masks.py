"""Action masks of one agent: a forbidden choice is never made, in training and wherever a run acts."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch.testing import assert_close

import muster
from command import muster as command
from muster.algorithms import PPO, PPOConfig

SIZES: dict[str, Any] = {"num_envs": 2, "num_steps": 32, "num_minibatches": 1, "update_epochs": 2}
GIVES = ["infos", "obs"]


class Doors(gym.Env[Any, Any]):
    """Four doors, some of which are open, as the mask says in the infos or the observation; an assert meets others.

    Where none is open, all are. Which ones are open is not to be known from the rest of the observation.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 5}  # noqa: RUF012  # as all envs have it
    action_space = spaces.Discrete(4, start=1)

    def __init__(self, gives: str, render_mode: str | None = None) -> None:
        self.gives, self.render_mode = gives, render_mode
        self.observation_space = spaces.Box(-1, 1, (2,), np.float32)
        if gives == "obs":
            parts = {"action_mask": spaces.MultiBinary(4), "seen": self.observation_space}
            self.observation_space = spaces.Dict(parts)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self._row()

    def step(self, action: Any) -> Any:
        assert self.open[action - 1] or not self.open.any(), f"door {action} of {self.open}"
        self.steps += 1
        obs, info = self._row()
        return obs, 1.0, self.steps == 7, False, info

    def _row(self) -> Any:
        self.open = self.np_random.random(4) < 0.3
        seen = self.np_random.normal(0, 1, 2).clip(-1, 1).astype(np.float32)
        mask = self.open.astype(np.int8)
        return ({"action_mask": mask, "seen": seen}, {}) if self.gives == "obs" else (seen, {"action_mask": mask})

    def render(self) -> Any:
        return np.zeros((32, 32, 3), np.uint8)


@pytest.mark.parametrize("mode", ["same_step", "next_step"])
@pytest.mark.parametrize("policy", ["feedforward", "gru"])
@pytest.mark.parametrize("gives", GIVES)
def test_log_probabilities_are_those_of_the_allowed_choices(gives: str, policy: str, mode: str):
    config = PPOConfig(**SIZES, learning_rate=0.05, policy=policy, memory_size=8)
    with muster.make_vec(functools.partial(Doors, gives), 2, backend="serial", autoreset_mode=mode) as envs:
        ppo = PPO(envs, config)
        ppo.iterate()
        rollout = ppo.collect_rollout()
        with torch.no_grad():
            logits = ppo.policy(rollout.observations, None, *([rollout.memory] if policy == "gru" else []))[0]
        figures = ppo.learner.loss(rollout, 0.2)[1]
    kept = torch.ones(len(logits), dtype=torch.bool) if rollout.counts is None else rollout.counts
    odds = logits.exp() * rollout.masks
    assert_close(rollout.log_probs[kept], (odds.gather(-1, rollout.actions).squeeze(-1) / odds.sum(-1)).log()[kept])
    assert not rollout.masks[kept].all()
    assert abs(figures[3]) < 1e-6


@pytest.fixture(scope="module", params=GIVES)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was evaluated meanwhile."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    words = ("--num-envs=2", "--num-steps=32", "--num-minibatches=1", "--update-epochs=2", "--total-steps=128")
    result = command("train", f"{__file__}:Doors", f"--kwargs={{\"gives\": \"{request.param}\"}}", "--backend=serial",
                     "--eval-every=64", "--eval-episodes=3", "--run-dir", str(folder), *words)  # fmt: skip
    assert result.exit_code == 0, result.output
    return folder


def test_evaluation_and_film_go_through_open_doors(run: Path, tmp_path: Path):
    result = command("eval", str(run), "--trust", "--episodes=6", "--video", str(tmp_path / "out.mp4"))
    assert result.exit_code == 0, result.output
    assert "7.0, deviation 0.0" in result.output
    assert "Filmed an episode of 7 steps" in result.output


def test_a_loaded_policy_obeys_masks_of_one_env_and_of_many(run: Path):
    policy = muster.load_policy(run, trust=True)
    gives = policy.plan.env_kwargs["gives"]
    env = Doors(gives)
    obs, info = env.reset(seed=0)
    for _ in range(40):
        obs, *_, info = env.step(policy(obs, masks=info.get("action_mask")))
    with policy.make_vec(3, backend="serial") as envs:
        obs, infos = envs.reset(seed=0)
        for _ in range(20):
            masks = np.stack(infos["action_mask"]) if gives == "infos" else None
            obs, *_, infos = envs.step(policy(obs, masks=masks))


def test_a_mask_that_allows_nothing_allows_all(run: Path):
    policy = muster.load_policy(run, trust=True)
    seen = np.random.default_rng(0).normal(0, 1, (50, 2)).clip(-1, 1).astype(np.float32)

    def acted(mask: int) -> Any:
        masks = np.full((50, 4), mask, np.int8)
        return policy(seen, masks=masks) if policy.plan.env_kwargs["gives"] == "infos" else policy(
            {"seen": seen, "action_mask": masks}
        )  # fmt: skip

    np.testing.assert_array_equal(acted(0), acted(1))
