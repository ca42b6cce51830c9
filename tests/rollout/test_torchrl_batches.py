"""TorchRL's value estimators, losses and post-processing on batches of collectors, as they are handed out."""

from __future__ import annotations

import pytest
import torch
from labelled_env import KINDS, SECOND, N, T, batches_of, loop_by_hand
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    set_interaction_type,
)
from torch import Tensor, nn
from torch.testing import assert_close

import muster
from muster.rollout import gae, split_trajectories, vtrace

pytestmark = pytest.mark.filterwarnings("ignore")
pytest.importorskip("torchrl")
GAMMA, LAMBDA = 0.9, 0.8


class Value(nn.Module):
    """A value that differs in every row."""

    def forward(self, obs: Tensor) -> Tensor:
        return (obs * torch.tensor([1.0, 3.0, 5.0])).sum(-1, keepdim=True).sin()


class Logits(nn.Module):
    """Logits of two actions; they differ in every row, and by `shift`."""

    def __init__(self, shift: float) -> None:
        super().__init__()
        self.shift = shift

    def forward(self, obs: Tensor) -> Tensor:
        one = (obs.sum(-1, keepdim=True) + self.shift).sin()
        return torch.cat([one, -one], -1)


def actor(shift: float) -> ProbabilisticTensorDictSequential:
    return ProbabilisticTensorDictSequential(
        TensorDictModule(Logits(shift), in_keys=["observation"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            in_keys=["logits"],
            out_keys=["action"],
            distribution_class=torch.distributions.Categorical,
            return_log_prob=True,
            log_prob_key="action_log_prob",
        ),
    )


critic = TensorDictModule(Value(), in_keys=["observation"], out_keys=["state_value"])


@pytest.fixture(scope="module", params=KINDS)
def collected(request):
    """A batch that begins within episodes."""
    return batches_of(request.param, actor(0.0))[1]


@pytest.fixture
def batch(collected):
    return collected.clone()


@pytest.fixture(scope="module")
def rows():
    """The same rows as `collected` ``[N, T]``, and values of the observations before and after each."""
    rows = loop_by_hand(SECOND)
    values = {
        name: Value()(rows[obs]).squeeze(-1)
        for name, obs in (("values", "observation"), ("next_values", "next_observation"))
    }
    return rows | values


def backwards(rows: dict[str, Tensor], step) -> Tensor:
    """``[N, T]``: for each env, from its last row to its first, `step` of the row's numbers and of what follows it.

    What follows is None where an episode, or the batch, ends.
    """
    found = torch.empty(N, T)
    for env in range(N):
        following = None
        for t in reversed(range(T)):
            row = {name: tensor[env, t] for name, tensor in rows.items() if tensor.ndim == 2}
            following = found[env, t] = step(row, None if row["done"] else following)
    return found


def gae_by_hand(rows: dict[str, Tensor]) -> Tensor:
    def advantage(row, following):
        delta = row["reward"] + GAMMA * row["next_values"] * ~row["terminated"] - row["values"]
        return delta if following is None else delta + GAMMA * LAMBDA * following

    return backwards(rows, advantage)


def test_gae_of_torchrl_and_muster_give_the_advantages_of_a_loop_by_hand(batch, rows):
    from torchrl.objectives.value import GAE

    expected = gae_by_hand(rows)
    theirs = GAE(gamma=GAMMA, lmbda=LAMBDA, value_network=critic)(batch)
    assert_close(theirs["advantage"].squeeze(-1), expected)
    assert_close(theirs["value_target"].squeeze(-1), expected + rows["values"])
    time_first = batch.transpose(0, 1)
    values = [critic(part.clone())["state_value"].squeeze(-1) for part in (time_first, time_first["next"])]
    ends = {name: time_first["next", name].squeeze(-1) for name in ("terminated", "truncated")}
    ours, _ = gae(time_first["next", "reward"].squeeze(-1), *values, **ends, gamma=GAMMA, gae_lambda=LAMBDA)
    assert_close(ours.T, expected)


def test_vtrace_of_torchrl_and_muster_give_the_targets_of_a_loop_by_hand(batch, rows):
    from torchrl.objectives.value import VTrace

    learner = actor(0.7)
    # TorchRL's estimator takes the probability of an action that the learner chooses itself.
    chances = learner.get_dist(batch.clone())
    log_ratios = chances.log_prob(chances.mode) - batch["action_log_prob"]

    def correction(row, following):
        ratio = row["log_ratios"].exp().clamp(max=1)
        delta = ratio * (row["reward"] + GAMMA * row["next_values"] * ~row["terminated"] - row["values"])
        return delta if following is None else delta + GAMMA * ratio * following

    expected = rows["values"] + backwards({**rows, "log_ratios": log_ratios}, correction)
    with set_interaction_type(InteractionType.MODE):
        theirs = VTrace(gamma=GAMMA, actor_network=learner, value_network=critic)(batch)
    assert_close(theirs["value_target"].squeeze(-1), expected)
    names = ("reward", "values", "next_values", "terminated", "truncated")
    advantages, targets = vtrace(log_ratios.T, *(rows[name].T for name in names), gamma=GAMMA)
    assert_close(targets.T, expected)
    assert_close(theirs["advantage"].squeeze(-1), advantages.T)


def test_trajectories_that_go_on_in_the_next_batch_are_split_as_torchrl_splits_them():
    from torchrl.collectors.utils import split_trajectories as torchrls

    sizes = {"num_envs": 2, "frames_per_batch": 80, "total_frames": 240, "seed": 0}
    ids = []
    for batch in muster.Collector("CartPole-v1", **sizes, make_vec_options={"backend": "serial"}):
        split, theirs = split_trajectories(batch), torchrls(batch)
        assert split.batch_size == theirs.batch_size
        for key in theirs.keys(include_nested=True, leaves_only=True):
            assert torch.equal(split[key], theirs[key]), key
        ids.append(set(split["collector", "traj_ids"][:, 0].tolist()))
    assert len(ids[0] & ids[1]) == len(ids[1] & ids[2]) == 2  # of either env the one that goes on


def test_ppo_loss_takes_the_batch_and_samples_of_a_buffer(batch):
    from torchrl.data import LazyTensorStorage, ReplayBuffer
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value import GAE

    net = nn.Linear(3, 2)
    learner = ProbabilisticTensorDictSequential(
        TensorDictModule(net, in_keys=["observation"], out_keys=["logits"]), actor(0.0)[-1]
    )
    judge = TensorDictModule(nn.Linear(3, 1), in_keys=["observation"], out_keys=["state_value"])
    batch = GAE(gamma=GAMMA, lmbda=LAMBDA, value_network=judge)(batch)
    buffer = ReplayBuffer(storage=LazyTensorStorage(N * T), batch_size=20)
    buffer.extend(batch.reshape(-1))
    for rows in (batch, buffer.sample()):
        losses = ClipPPOLoss(learner, judge)(rows)
        (losses["loss_objective"] + losses["loss_critic"]).backward()
        assert net.weight.grad.abs().sum() > 0
        net.weight.grad = None
