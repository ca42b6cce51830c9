"""Collecting from multi-agent envs: groups nest, masks are obeyed, TorchRL's and Muster's networks both act."""

from __future__ import annotations

import functools

import pytest
import torch
from agent_envs import Script
from tensordict.nn import TensorDictModule

from muster.nn import MultiAgentMLP
from muster.rollout.collector import Collector
from muster.rollout.multi_collector import MultiCollector

pytest.importorskip("pettingzoo.sisl")
# SWIG's modules crash the interpreter where their warnings are errors.
pytestmark = pytest.mark.filterwarnings("ignore")
WALKERS = {"env_kwargs": {"n_walkers": 3, "shared_reward": False, "max_cycles": 1000}}
MULTIWALKER = "pettingzoo/sisl/multiwalker_v9"


@pytest.fixture(autouse=True)
def _no_display(monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")


def walker_policy(net=MultiAgentMLP):
    mlp = net(31, 4, 3, centralised=True, share_params=True)
    return TensorDictModule(mlp, in_keys=[("walker", "observation")], out_keys=[("walker", "action")])


def torchrl_mlp(*args, **kwargs):
    return pytest.importorskip("torchrl.modules").MultiAgentMLP(*args, **kwargs)


def with_placeholder(*args, **kwargs):
    net = MultiAgentMLP(*args, **kwargs)
    net.placeholder = torch.nn.Parameter(torch.empty(3, device="meta"), requires_grad=False)
    return net


def test_groups_nest_and_cut_trajectories_end_for_every_agent():
    with Collector(
        MULTIWALKER,
        walker_policy(),
        num_envs=2,
        frames_per_batch=8,
        max_frames_per_traj=3,
        make_vec_options={"backend": "serial", **WALKERS},
    ) as collector:
        batch = collector.rollout()
    assert batch["walker", "observation"].shape == (2, 4, 3, 31)
    assert batch["walker", "action"].shape == (2, 4, 3, 4)
    for name in ("reward", "terminated", "truncated", "done"):
        assert batch["next", "walker", name].shape == (2, 4, 3, 1)
    assert batch["next", "done"].shape == (2, 4, 1)
    assert batch["walker", "alive"].all()
    assert batch["walker", "acting"].all()
    assert batch["next", "truncated"][0, :, 0].tolist() == [False, False, True, False]
    assert batch["next", "walker", "truncated"][:, 2].all()
    assert not batch["next", "walker", "terminated"].any()
    assert batch["next", "walker", "observation"][:, 0].equal(batch["walker", "observation"][:, 1])
    assert not batch["next", "walker", "observation"][:, 2].equal(batch["walker", "observation"][:, 3])
    assert collector.last_episodes.returns.shape == (2, 3)


def test_an_agent_that_has_ended_is_not_cut_off_as_well():
    there = ["a_0 a_1 b_0", "a_0 a_1 b_0", "a_1 b_0", "a_1 b_0", "a_1 b_0"]
    env = functools.partial(Script, there, {(2, "a_0"): "terminated"})
    with Collector(
        env, num_envs=1, frames_per_batch=4, max_frames_per_traj=3, make_vec_options={"backend": "serial"}
    ) as collector:
        batch = collector.rollout()
    assert batch["next", "a", "terminated"][0, :, :, 0].tolist() == [[0, 0], [1, 0], [0, 0], [0, 0]]
    assert batch["next", "a", "truncated"][0, :, :, 0].tolist() == [[0, 0], [0, 0], [0, 1], [0, 0]]
    assert batch["next", "b", "truncated"][0, :, :, 0].tolist() == [[0], [0], [1], [0]]


@pytest.mark.parametrize("net", [MultiAgentMLP, torchrl_mlp, with_placeholder])
@pytest.mark.parametrize(
    "context", ["fork", *(pytest.param(context, marks=pytest.mark.slow) for context in ("forkserver", "spawn"))]
)
def test_four_collectors_of_multiwalker_give_two_batches(net, context):
    with MultiCollector(
        [MULTIWALKER] * 4,
        walker_policy(functools.partial(net)),
        num_collectors=4,
        frames_per_batch=100,
        max_frames_per_traj=50,
        total_frames=200,
        device="cpu",
        reset_at_each_iter=False,
        context=context,
        make_vec_options=WALKERS,
    ) as collector:
        batches = list(collector)
    assert [batch.batch_size for batch in batches] == [(4, 25)] * 2
    assert batches[0]["walker", "action"].shape == (4, 25, 3, 4)
    assert not batches[0]["walker", "observation"].equal(batches[1]["walker", "observation"])


def _first(mask):
    """The first action, allowed or not. mask: bool ``[N, A, n]``."""
    return torch.zeros(mask.shape[:2], dtype=torch.int64)


@pytest.mark.parametrize("policy", [None, "module"])
def test_random_actions_of_replicas_are_recorded_as_they_were_taken(policy):
    pytest.importorskip("pettingzoo.classic")
    if policy is not None:
        policy = TensorDictModule(_first, in_keys=[("player", "action_mask")], out_keys=[("player", "action")])
    with MultiCollector(
        "pettingzoo/classic/tictactoe_v3",
        policy,
        num_collectors=2,
        frames_per_batch=120,
        init_random_frames=120,
        seed=0,
        context="fork",
    ) as collector:
        batch = collector.rollout()
    acting, action = batch["player", "acting"], batch["player", "action"]
    legal = batch["player", "action_mask"].gather(-1, action.unsqueeze(-1)).squeeze(-1)
    assert acting.any()
    assert legal[acting].all()
    assert len(action.unique()) == 9
