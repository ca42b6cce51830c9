"""A `MultiCollector` whose policy stays in this process: batches, counts, updates and states as with replicas."""

from __future__ import annotations

import functools
import threading
from contextlib import nullcontext

import pytest
from collecting import Constant
from counting_env import CountingEnv

from muster.rollout.multi_collector import MultiCollector as AnyMultiCollector

MultiCollector = functools.partial(AnyMultiCollector, context="fork")


class Locked(Constant):
    """Cannot be copied."""

    def __init__(self, action: int) -> None:
        super().__init__(action)
        self.lock = threading.Lock()


@pytest.mark.parametrize("stays", [False, True])
def test_replicas_and_a_policy_that_stays_fill_the_same_batches(stays):
    """All rows of three envs are alike, whoever steps them, and so are counts."""
    with pytest.warns(UserWarning, match="cannot be copied") if stays else nullcontext():
        collector = MultiCollector(
            CountingEnv, (Locked if stays else Constant)(5), num_collectors=3, frames_per_batch=12, total_frames=24
        )
    with collector:
        batches = list(collector)
        stats, state = collector.stats(), collector.state_dict()
    assert [batch["collector", "traj_ids"][0].tolist() for batch in batches] == [[0, 0, 0, 3], [3, 3, 6, 6]]
    assert [int(batch["collector", "policy_version"].unique()) for batch in batches] == [1, 1]
    assert batches[1]["observation"][2].tolist() == [[1, 1], [1, 2], [2, 0], [2, 1]]
    assert collector.last_episodes.returns.tolist() == [6.0] * 3
    assert collector.last_episodes.env_ids.tolist() == [0, 1, 2]
    assert stats["collectors"]["env_steps"] == 24
    assert (state["frames"], state["batches"], state["next_traj_id"]) == (24, 2, 9)


@pytest.mark.parametrize("is_of_before", [False, True])
def test_state_dict_of_a_policy_that_stays_goes_on_with_trajectories_and_weights(is_of_before):
    with pytest.warns(UserWarning, match="cannot be copied"):
        collector = MultiCollector(CountingEnv, Locked(5), num_collectors=2, frames_per_batch=12)
    with collector:
        first, state = collector.rollout(), collector.state_dict()
    if is_of_before:  # earlier versions counted trajectories below
        state["staying"]["next_traj_id"], state["next_traj_id"] = state["next_traj_id"], 0
    with pytest.warns(UserWarning, match="cannot be copied"):
        resumed = MultiCollector(CountingEnv, Locked(1), num_collectors=2, frames_per_batch=12)
    with resumed:
        resumed.load_state_dict(state)
        batch = resumed.rollout()
    assert (batch["action"] == 5).all()
    assert batch["collector", "traj_ids"].min() == first["collector", "traj_ids"].max() + 1
    assert (resumed.frames, resumed.batches) == (24, 2)


def test_updates_of_a_policy_that_stays_are_counted_and_the_threshold_is_said_to_be_ignored():
    with pytest.warns(UserWarning, match="preemptive_threshold=0.5 is ignored"):
        collector = MultiCollector(
            CountingEnv, Locked(5), num_collectors=2, frames_per_batch=4, preemptive_threshold=0.5
        )
    with collector:
        first = collector.rollout()
        collector.update_policy_weights_()
        second = collector.rollout()
    assert collector.policy_version == 2
    assert [int(batch["collector", "policy_version"].unique()) for batch in (first, second)] == [1, 2]
