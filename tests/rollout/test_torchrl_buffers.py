"""TorchRL's replay buffers, their samplers and transforms, filled by collectors and by hand with their batches."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from collecting import zeros_policy
from labelled_env import ENVS, KINDS, SECOND, N, T, batches_of, collector_of, loop_by_hand
from tensordict import TensorDict
from torch.testing import assert_close

import muster
from slow import slow

pytestmark = pytest.mark.filterwarnings("ignore")
pytest.importorskip("torchrl")
GAMMA, SLICE = 0.9, 4

# The ways of slicing that are right with TorchRL's own collectors, too.
WAYS = {
    "end_key, 2 dims": (2, {"end_key": ("next", "done")}),
    "traj_key, 1 dim": (1, {"traj_key": ("collector", "traj_ids")}),
    "traj_key, 2 dims": (2, {"traj_key": ("collector", "traj_ids")}),
    "lenient, 2 dims": (2, {"traj_key": ("collector", "traj_ids"), "strict_length": False}),
}


def buffer_of(ndim: int, size: int = 2 * N * T, **options: Any) -> Any:
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer

    return TensorDictReplayBuffer(storage=LazyTensorStorage(size, ndim=ndim), batch_size=40 * SLICE, **options)


kept_batches = functools.cache(batches_of)


def fill(buffer: Any, kind: str, ndim: int, by_hand: bool) -> None:
    """Adds two batches to a buffer."""
    if by_hand:
        for batch in kept_batches(kind):
            buffer.extend(batch if ndim == 2 else batch.reshape(-1))
    else:
        with collector_of(kind, total_frames=2 * N * T, replay_buffer=buffer) as collector:
            assert list(collector) == [None, None]


def slices_in(sample: TensorDict) -> list[TensorDict]:
    """The slices of a sample; the sampler marks the last step of each."""
    ends = (sample["next", "truncated"] | sample["next", "done"]).flatten().nonzero().flatten() + 1
    lengths = ends - torch.cat([ends.new_zeros(1), ends[:-1]])
    assert int(lengths.sum()) == len(sample)
    return list(sample.split(lengths.tolist()))


def is_of_one_episode(part: TensorDict) -> bool:
    """Whether rows are consecutive steps of one episode of one env."""
    labels = part["observation"]
    expected = labels[0] + torch.tensor([[0.0, 0.0, step] for step in range(len(labels))])
    return labels.equal(expected) and part["next", "observation"][:-1].equal(labels[1:])


@pytest.mark.parametrize("by_hand", [False, *slow(True)], ids=["replay_buffer", "by hand"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_slices_are_consecutive_steps_of_one_episode(kind, way, by_hand):
    from torchrl.data import SliceSampler

    ndim, options = WAYS[way]
    buffer = buffer_of(ndim, sampler=SliceSampler(slice_len=SLICE, **options))
    fill(buffer, kind, ndim, by_hand)
    assert len(buffer) == 2 * N * T
    torch.manual_seed(0)
    slices, ids = slices_in(buffer.sample()), buffer[:]["collector", "traj_ids"]
    for part in slices:
        assert is_of_one_episode(part)
        steps_there = int((ids == part["collector", "traj_ids"][0]).sum())
        assert len(part) == (min(SLICE, steps_there) if "strict_length" in options else SLICE)
    assert {int(part["observation"][0, 0]) for part in slices} == set(range(N))


@pytest.mark.parametrize("ndim", [1, 2])
def test_slices_by_trajectory_are_right_whichever_collector_comes_first(ndim):
    from torchrl.data import SliceSampler

    buffer = buffer_of(ndim, sampler=SliceSampler(slice_len=SLICE, traj_key=("collector", "traj_ids")))
    with muster.MultiCollector(
        ENVS[:2],
        num_collectors=2,
        frames_per_batch=T,
        total_frames=6 * T,
        sync=False,
        replay_buffer=buffer,
        context="fork",
    ) as collector:
        assert list(collector) == [None] * 6
    assert all(is_of_one_episode(part) for part in buffer.sample().split(SLICE))


@pytest.mark.parametrize("kind", KINDS)
def test_multi_step_in_a_buffer_that_a_collector_fills_looks_ahead_in_each_env(kind):
    from torchrl.envs.transforms import MultiStepTransform

    n_steps = 3
    buffer = buffer_of(2, transform=MultiStepTransform(n_steps=n_steps, gamma=GAMMA))
    fill(buffer, kind, 2, by_hand=False)
    found, rows = buffer[:], loop_by_hand()
    complete = 2 * T - n_steps  # the transform holds back what it cannot look ahead from
    assert found.batch_size == (N, complete)
    assert found["observation"].equal(rows["observation"][:, :complete])
    for env in range(N):
        for t in range(complete):
            total, last = rows["reward"][env, t].clone(), t
            while last - t + 1 < n_steps and not rows["done"][env, last]:
                last += 1
                total += GAMMA ** (last - t) * rows["reward"][env, last]
            assert_close(found["next", "reward"][env, t, 0], total)
            assert found["next", "observation"][env, t].equal(rows["next_observation"][env, last])


@pytest.mark.parametrize("kind", KINDS)
def test_reward_to_go_in_a_buffer_that_a_collector_fills_is_each_envs_own(kind):
    from torchrl.envs.transforms import Reward2GoTransform

    buffer = buffer_of(2, transform=Reward2GoTransform(gamma=GAMMA, out_keys=["to_go"]))
    fill(buffer, kind, 2, by_hand=False)
    rows, to_go = loop_by_hand(), torch.empty(N, 2 * T)
    for env in range(N):
        for t in reversed(range(2 * T)):
            goes_on = (t + 1) % T and not rows["done"][env, t]
            to_go[env, t] = rows["reward"][env, t] + (GAMMA * to_go[env, t + 1] if goes_on else 0)
    assert_close(buffer[:]["to_go"].squeeze(-1), to_go)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("ndim", "size", "add", "second_of"),
    [
        (1, 2 * N, lambda batch: batch, lambda whole: whole[N:]),
        (2, 2 * N * T, lambda batch: batch, lambda whole: whole[:, T:]),
        (1, 2 * N * T, lambda batch: batch.reshape(-1), lambda whole: whole[N * T :].reshape(N, T)),
    ],
    ids=["an item for each env", "2 dims", "an item for each row"],
)
def test_batches_come_back_from_a_buffer_as_they_were(kind, ndim, size, add, second_of):
    from torchrl.objectives.value import GAE

    estimator, buffer = GAE(gamma=GAMMA, lmbda=0.8, value_network=None), buffer_of(ndim, size)
    first, second = (batch.clone() for batch in kept_batches(kind))
    for batch in (first, second):
        for part in (batch, batch["next"]):
            part["state_value"] = part["observation"].sum(-1, keepdim=True).sin()
        buffer.extend(add(batch))
    found = second_of(buffer[:])
    assert found.batch_size == (N, T)
    for key in second.keys(True, True):
        assert found[key].equal(second[key]), key
    assert estimator(found.clone())["advantage"].equal(estimator(second.clone())["advantage"])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_one_dim_are_env_by_env(kind):
    buffer = buffer_of(1)
    fill(buffer, kind, 1, by_hand=False)
    second = buffer[:][N * T :]
    assert second["observation"].equal(loop_by_hand(SECOND)["observation"].flatten(0, 1))


@pytest.mark.parametrize("ndim", [1, 2])
def test_masked_rows_are_left_out_of_one_dim_and_marked_in_two(ndim):
    with muster.make_vec(ENVS, backend="serial") as envs:  # next_step: rows that only reset an env are masked
        collected = muster.Collector(envs, zeros_policy, frames_per_batch=N * T).rollout()
    mask = collected["collector", "mask"]
    assert not mask.all()
    buffer = buffer_of(ndim)
    with muster.make_vec(ENVS, backend="serial") as envs:
        collector = muster.Collector(envs, zeros_policy, frames_per_batch=N * T, total_frames=1, replay_buffer=buffer)
        assert list(collector) == [None]
    found = buffer[:]
    if ndim == 1:
        assert found["collector", "mask"].all()
        assert found["observation"].equal(collected["observation"][mask])
    else:
        assert found["collector", "mask"].equal(mask)
        assert found["observation"].equal(collected["observation"])
