"""TorchRL's own advantage, loss and replay buffer on batches of a `Collector`, unchanged."""

from __future__ import annotations

import pytest
import torch
from counting_env import NoisyEnv
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn

from muster.rollout.collector import Collector
from muster.rollout.returns import gae

pytestmark = pytest.mark.filterwarnings("ignore")
pytest.importorskip("torchrl")


@pytest.fixture(scope="module")
def batch_and_networks():
    torch.manual_seed(0)
    logits = TensorDictModule(nn.Linear(2, 100), in_keys=["observation"], out_keys=["logits"])
    head = ProbabilisticTensorDictModule(
        in_keys=["logits"],
        out_keys=["action"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
        log_prob_key="action_log_prob",
    )
    actor = ProbabilisticTensorDictSequential(logits, head)
    critic = TensorDictModule(nn.Linear(2, 1), in_keys=["observation"], out_keys=["state_value"])
    with Collector(
        NoisyEnv, actor, num_envs=3, frames_per_batch=60, seed=2, make_vec_options={"backend": "serial"}
    ) as collector:
        return collector.rollout(), actor, critic


def test_gae_gives_the_advantages_of_returns(batch_and_networks):
    from torchrl.objectives.value import GAE

    batch, _, critic = batch_and_networks
    with torch.no_grad():
        theirs = GAE(gamma=0.9, lmbda=0.8, value_network=critic, time_dim=0)(batch.clone())
        values, next_values = (critic(part.clone())["state_value"].squeeze(-1) for part in (batch, batch["next"]))
    done = {name: batch["next", name].squeeze(-1) for name in ("terminated", "truncated")}
    rewards = batch["next", "reward"].squeeze(-1)
    ours, targets = gae(rewards, values, next_values, **done, gamma=0.9, gae_lambda=0.8)
    assert torch.allclose(theirs["advantage"].squeeze(-1), ours, rtol=1e-4, atol=1e-4)
    assert torch.allclose(theirs["value_target"].squeeze(-1), targets, rtol=1e-4, atol=1e-4)


def test_ppo_loss_and_replay_buffer_take_the_batch(batch_and_networks):
    from torchrl.data import LazyTensorStorage, ReplayBuffer
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value import GAE

    batch, actor, critic = batch_and_networks
    batch = GAE(gamma=0.9, lmbda=0.8, value_network=critic, time_dim=0)(batch.clone())
    buffer = ReplayBuffer(storage=LazyTensorStorage(60), batch_size=20)
    buffer.extend(batch.reshape(-1))
    losses = ClipPPOLoss(actor, critic)(buffer.sample())
    loss = losses["loss_objective"] + losses["loss_critic"]
    loss.backward()
    assert actor[0].module.weight.grad.abs().sum() > 0
