"""Batches are ``[N, T]``: a row for each env, its steps side by side in memory, whoever collects them."""

from __future__ import annotations

import functools
import threading

import pytest
import torch
from agent_envs import Script
from collecting import zeros_policy
from labelled_env import ENVS, FIRST, KINDS, SECOND, N, T, batches_of, collector_of, loop_by_hand
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

import muster
from muster.rollout import next_observations
from muster.rollout.returns import split_trajectories


class Locked(nn.Module):
    """Cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()

    def forward(self, obs):
        return {"action": zeros_policy(obs), "twice": obs * 2, "total": obs.sum(-1)}


def act(obs):
    return {"action": zeros_policy(obs), "twice": obs * 2, "total": obs.sum(-1)}


acting = TensorDictModule(lambda obs: tuple(act(obs).values()), ["observation"], ["action", "twice", "total"])


def is_dense(batch: TensorDict) -> bool:
    """Whether the batch can be seen as one row after the other, as it is."""
    flat = batch.view(-1)
    return flat.batch_size == (batch.numel(),) and all(
        flat[key].data_ptr() == batch[key].data_ptr() for key in batch.keys(True, True)
    )


def has_rows_of_the_loop(batch: TensorDict, part: slice) -> bool:
    rows = loop_by_hand(part)
    after = next_observations(batch) if "last" in batch["collector"] else batch["next"]
    return (
        batch["observation"].equal(rows["observation"])
        and after["observation"].equal(rows["next_observation"])
        and all(
            batch["next", name].equal(rows[name].unsqueeze(-1))
            for name in ("reward", "terminated", "truncated", "done")
        )
    )


@pytest.mark.parametrize(
    ("kind", "policy", "options"),
    [
        *(("Collector", policy, {"compact": compact}) for policy in (None, act, acting) for compact in (False, True)),
        *(("Collector", policy, {"overlap": True}) for policy in (None, act, acting)),
        *(("MultiCollector", None, {"compact": compact}) for compact in (False, True)),
    ],
)
def test_a_batch_has_a_row_for_each_env(kind, policy, options):
    for batch, part in zip(batches_of(kind, policy, **options), (FIRST, SECOND), strict=True):
        assert batch.batch_size == (N, T)
        assert batch.names == [None, "time"]
        assert has_rows_of_the_loop(batch, part)
        assert is_dense(batch.exclude(("collector", "last"), ("collector", "final"), ("collector", "final_at")))
        ids = batch["collector", "traj_ids"]
        assert (ids[:, 1:] != ids[:, :-1]).equal(batch["next", "done"][:, :-1, 0])
        if policy is not None:
            assert batch["twice"].equal(2 * batch["observation"])
            assert batch["total"].equal(batch["observation"].sum(-1))


@pytest.mark.parametrize("stays", [False, True])
def test_policies_in_replicas_and_those_that_stay_write_rows_of_envs(stays):
    if stays:
        with pytest.warns(UserWarning, match="cannot be copied"):
            collector = collector_of("MultiCollector", Locked())
    else:
        collector = collector_of("MultiCollector", act)
    with collector:
        collector.rollout()
        batch = collector.rollout()
    assert has_rows_of_the_loop(batch, SECOND)
    assert is_dense(batch)
    assert batch["twice"].equal(2 * batch["observation"])
    assert batch["total"].equal(batch["observation"].sum(-1))
    assert batch["collector", "policy_version"].shape == (N, T)


def test_first_come_batches_have_a_row_for_each_env_of_their_collector():
    with muster.MultiCollector(ENVS[:2], num_collectors=2, frames_per_batch=T, sync=False, context="fork") as collector:
        batches = [collector.rollout() for _ in range(4)]
    rows = loop_by_hand()["observation"]
    seen = [0, 0]
    for batch in batches:
        assert (batch.batch_size, batch.names) == ((1, T), [None, "time"])
        assert is_dense(batch)
        env = int(batch["observation"][0, 0, 0])
        if seen[env] < 2:  # the loop by hand has two batches
            assert batch["observation"][0].equal(rows[env, seen[env] * T : (seen[env] + 1) * T])
        seen[env] += 1


def test_final_observations_of_compact_batches_are_at_env_and_time():
    for kind in KINDS:
        batch = batches_of(kind, compact=True)[1]
        rows = loop_by_hand(SECOND)
        at = batch["collector", "final_at"]
        assert sorted(at.tolist()) == rows["done"].nonzero().tolist()
        assert at.tolist() == sorted(at.tolist(), key=lambda one: one[::-1])  # whoever was ready first
        assert batch["collector", "final", "observation"].equal(rows["next_observation"][at.unbind(-1)])
        assert batch["collector", "last", "observation"].shape == (N, 3)


@pytest.mark.parametrize("kind", KINDS)
def test_agents_come_after_env_and_time(kind):
    there = ["a_0 a_1 b_0"] * 5
    env = functools.partial(Script, there)
    if kind == "Collector":
        collector = muster.Collector(env, num_envs=2, frames_per_batch=6, make_vec_options={"backend": "serial"})
    else:
        collector = muster.MultiCollector(env, num_envs=2, num_collectors=2, frames_per_batch=6, context="fork")
    with collector:
        batch = collector.rollout()
    assert (batch.batch_size, batch.names) == ((2, 3), [None, "time"])
    assert is_dense(batch)
    for group, agents in (("a", 2), ("b", 1)):
        assert batch[group, "observation"].shape[:3] == (2, 3, agents)
        assert batch["next", group, "observation"][:, :-1].equal(batch[group, "observation"][:, 1:])
        for name in ("reward", "terminated", "truncated", "done"):
            assert batch["next", group, name].shape == (2, 3, agents, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_trajectories_that_are_split_are_rows_from_their_first_step_on(kind):
    whole, split = batches_of(kind)[1], batches_of(kind, split_trajs=True)[1]
    assert (split.batch_size[1], split.names) == (8, [None, "time"])
    mask, labels = split["collector", "mask"], split["observation"]
    assert labels[mask].equal(whole["observation"].flatten(0, 1))
    assert (labels[:, 1:, 2] - labels[:, :-1, 2])[mask[:, 1:]].eq(1).all()
    assert split_trajectories(whole)["observation"].equal(labels)
    torch.testing.assert_close(split["next", "reward"][~mask], torch.zeros(int((~mask).sum()), 1))
