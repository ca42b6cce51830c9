"""One update from the same weights, on the same rows, against Stable-Baselines3's PPO."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import gymnasium as gym
import numpy as np
import pytest
import torch
from stable_baselines3 import PPO as SB3PPO
from stable_baselines3.common.logger import Logger
from torch import nn
from torch.testing import assert_close

import muster
from muster.algorithms import PPO, PPOConfig
from muster.algorithms.ppo import Rollout
from muster.algorithms.ppo_config import Rates

ROWS = 64


def sb3_like(ppo: PPO, env_id: str, rollout: Rollout, **options: Any) -> SB3PPO:
    """SB3's PPO with the weights of ``ppo``, and a buffer of its rows."""
    model = SB3PPO("MlpPolicy", gym.make(env_id), n_steps=ROWS, batch_size=ROWS, n_epochs=1, device="cpu", **options)
    pairs = {
        **dict(zip(linears(model.policy.mlp_extractor.policy_net), linears(ppo.policy.actor)[:-1], strict=True)),
        **dict(zip(linears(model.policy.mlp_extractor.value_net), linears(ppo.policy.critic)[:-1], strict=True)),
        model.policy.action_net: linears(ppo.policy.actor)[-1],
        model.policy.value_net: linears(ppo.policy.critic)[-1],
    }
    for theirs, ours in pairs.items():
        theirs.load_state_dict(ours.state_dict())
    fill(model, rollout)
    model.set_logger(Logger(None, []))
    return model


def fill(model: SB3PPO, rollout: Rollout) -> None:
    """Gives the model's buffer the rows of ``rollout``."""
    buffer = model.rollout_buffer
    buffer.reset()
    for name, rows in (
        ("observations", rollout.observations), ("actions", rollout.actions), ("values", rollout.values),
        ("log_probs", rollout.log_probs), ("advantages", rollout.advantages), ("returns", rollout.targets),
    ):  # fmt: skip
        getattr(buffer, name)[:] = rows.reshape(ROWS, 1, *rows.shape[1:]).numpy()
    buffer.full = True


def linears(net: nn.Module) -> list[nn.Module]:
    return [one for one in net if isinstance(one, nn.Linear)]


def test_three_updates_of_many_minibatches_lead_to_the_same_weights(monkeypatch: pytest.MonkeyPatch):
    env_id = "CartPole-v1"
    config = PPOConfig(num_envs=2, num_steps=ROWS // 2, update_epochs=3, vf_coef=1.0, ent_coef=0.02, max_grad_norm=0.3)
    model = None
    with muster.make_vec(env_id, 2, backend="serial", autoreset_mode="same_step") as envs:
        ppo = PPO(envs, config)
        for clip_coef in (0.2, 0.1, 0.05):  # as an annealed range has it
            rollout = ppo.collect_rollout()
            if model is None:
                model = sb3_like(
                    ppo, env_id, rollout, learning_rate=1e-3, vf_coef=0.5, ent_coef=0.02, max_grad_norm=0.3
                )
                model.batch_size, model.n_epochs = ROWS // config.num_minibatches, config.update_epochs
            fill(model, rollout)
            model.clip_range = lambda _, clip_coef=clip_coef: clip_coef
            orders = [torch.randperm(ROWS) for _ in range(config.update_epochs)]
            with monkeypatch.context() as patch:
                patch.setattr(torch, "randperm", Mock(side_effect=orders))
                patch.setattr(np.random, "permutation", Mock(side_effect=[order.numpy() for order in orders]))
                losses = ppo.learner.update(rollout, Rates(1e-3, clip_coef), ppo.collector.frames)
                model.train()
            logged = model.logger.name_to_value
            assert losses.policy_loss == pytest.approx(logged["train/policy_gradient_loss"], abs=1e-5)
            assert 2 * losses.value_loss == pytest.approx(logged["train/value_loss"], rel=1e-5)
            for ours, theirs in (
                (ppo.policy.actor, model.policy.action_net),
                (ppo.policy.critic, model.policy.value_net),
            ):
                assert_close(linears(ours)[-1].weight, theirs.weight, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_losses_and_new_weights_are_those_of_stable_baselines3(env_id: str):
    config = PPOConfig(num_envs=2, num_steps=ROWS // 2, num_minibatches=1, update_epochs=1, vf_coef=1.0, ent_coef=0.01)
    with muster.make_vec(env_id, 2, backend="serial", autoreset_mode="same_step") as envs:
        ppo = PPO(envs, config)
        rollout = ppo.collect_rollout()
    # As if another policy had collected: ratios and values on both sides of what is clipped.
    noise = torch.randn(2, ROWS, generator=torch.Generator().manual_seed(0))
    rollout = rollout._replace(log_probs=rollout.log_probs + 0.3 * noise[0], values=rollout.values + 0.5 * noise[1])
    model = sb3_like(ppo, env_id, rollout, learning_rate=config.learning_rate, vf_coef=0.5, ent_coef=0.01)
    losses = ppo.learner.update(rollout, Rates(config.learning_rate, config.clip_coef), ppo.collector.frames)
    model.train()
    logged = model.logger.name_to_value
    assert losses.policy_loss == pytest.approx(logged["train/policy_gradient_loss"], abs=1e-5)
    assert 2 * losses.value_loss == pytest.approx(logged["train/value_loss"], rel=1e-5)
    assert losses.entropy == pytest.approx(-logged["train/entropy_loss"], abs=1e-5)
    assert losses.approx_kl == pytest.approx(logged["train/approx_kl"], abs=1e-5)
    assert losses.clip_fraction == pytest.approx(logged["train/clip_fraction"], abs=1e-5)
    ours, theirs = linears(ppo.policy.actor)[-1], model.policy.action_net
    assert_close(ours.weight, theirs.weight, atol=1e-5, rtol=1e-5)
