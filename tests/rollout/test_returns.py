"""Returns against hand arithmetic, against TorchRL, and against themselves with rows left out."""

from __future__ import annotations

import math

import pytest
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import RolloutBuffer
from tensordict import TensorDict
from torch import Tensor
from torch.testing import assert_close
from torchrl.objectives.value.functional import generalized_advantage_estimate, vtrace_advantage_estimate

from muster.errors import SpecMismatch
from muster.rollout import gae, split_trajectories, vtrace

GAMMA, LAMBDA = 0.9, 0.8


def column(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64).unsqueeze(1)


def flags(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.bool).unsqueeze(1)


def random_rollout(*shape: int, seed: int = 0) -> dict[str, Tensor]:
    """Random rewards, values and flags; a third of the steps end an episode, elsewhere next_values follow values."""
    rng = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=rng, dtype=torch.float64)
    terminated = torch.rand(shape, generator=rng) < 0.2
    truncated = (torch.rand(shape, generator=rng) < 0.2) & ~terminated
    next_values = torch.randn(shape, generator=rng, dtype=torch.float64)
    inside = ~(terminated | truncated)[:-1]
    next_values[:-1][inside] = values[1:][inside]
    rewards = torch.randn(shape, generator=rng, dtype=torch.float64)
    return {
        "rewards": rewards,
        "values": values,
        "next_values": next_values,
        "terminated": terminated,
        "truncated": truncated,
    }


class TestGAE:
    def test_hand_computed_numbers_of_an_unfinished_episode(self):
        advantages, targets = gae(
            column(1, 2, 3), column(10, 20, 30), column(20, 30, 40), flags(0, 0, 0), flags(0, 0, 0),
            gamma=0.5, gae_lambda=0.5,
        )  # fmt: skip
        # Deltas 1 + 10 - 10, 2 + 15 - 20, 3 + 20 - 30; each advantage adds a quarter of the one after it.
        assert_close(advantages, column(1 - 4.75 / 4, -3 - 7 / 4, -7))
        assert_close(targets, column(10 - 0.1875, 20 - 4.75, 30 - 7))

    def test_termination_is_worth_nothing_more(self):
        advantages, _ = gae(
            column(1, 1), column(10, 20), column(99, 20), flags(1, 0), flags(0, 0), gamma=0.5, gae_lambda=0.5
        )
        assert_close(advantages, column(1 - 10, 1 + 10 - 20))

    def test_truncation_bootstraps_from_the_final_observation(self):
        advantages, _ = gae(
            column(1, 1), column(10, 20), column(99, 20), flags(0, 0), flags(1, 0), gamma=0.5, gae_lambda=0.5
        )
        assert_close(advantages, column(1 + 49.5 - 10, 1 + 10 - 20))

    def test_an_episode_both_terminated_and_truncated_is_terminated(self):
        advantages, _ = gae(column(1), column(10), column(99), flags(1), flags(1), gamma=0.5, gae_lambda=0.5)
        assert_close(advantages, column(-9))

    def test_nan_as_the_value_after_termination_does_no_harm(self):
        advantages, _ = gae(column(1), column(10), column(math.nan), flags(1), flags(0), gamma=0.5, gae_lambda=0.5)
        assert_close(advantages, column(-9))

    @pytest.mark.parametrize("shape", [(1, 1), (7, 1), (50, 4), (20, 3, 2)])
    def test_agrees_with_torchrl(self, shape: tuple[int, ...]):
        rollout = random_rollout(*shape)
        advantages, targets = gae(**rollout, gamma=GAMMA, gae_lambda=LAMBDA)
        time_last = {name: tensor.reshape(shape[0], -1).T.unsqueeze(-1) for name, tensor in rollout.items()}
        theirs, their_targets = generalized_advantage_estimate(
            GAMMA,
            LAMBDA,
            time_last["values"],
            time_last["next_values"],
            time_last["rewards"],
            time_last["terminated"] | time_last["truncated"],
            time_last["terminated"],
        )
        # TorchRL holds its discounts in float32.
        assert_close(advantages.reshape(shape[0], -1), theirs.squeeze(-1).T, rtol=1e-5, atol=1e-6)
        assert_close(targets.reshape(shape[0], -1), their_targets.squeeze(-1).T, rtol=1e-5, atol=1e-6)

    def test_agrees_with_stable_baselines3(self):
        rollout = random_rollout(40, 3, seed=1)
        # It has no truncated steps: `collect_rollouts` adds their values to the rewards.
        rollout["truncated"].zero_()
        ended = rollout["terminated"]
        rollout["next_values"][:-1][~ended[:-1]] = rollout["values"][1:][~ended[:-1]]
        space = spaces.Discrete(2)
        buffer = RolloutBuffer(40, space, space, device="cpu", gamma=GAMMA, gae_lambda=LAMBDA, n_envs=3)
        buffer.rewards[:], buffer.values[:] = rollout["rewards"], rollout["values"]
        buffer.episode_starts[1:] = ended[:-1]
        buffer.compute_returns_and_advantage(rollout["next_values"][-1].float(), ended[-1].numpy())
        advantages, targets = gae(**rollout, gamma=GAMMA, gae_lambda=LAMBDA)
        assert_close(advantages.float(), torch.from_numpy(buffer.advantages))
        assert_close(targets.float(), torch.from_numpy(buffer.returns))

    def test_gives_no_gradients_and_keeps_the_dtype_of_values(self):
        values = torch.zeros(2, 1, requires_grad=True)
        advantages, targets = gae(
            column(1, 1), values, values, flags(0, 0), flags(0, 0), gamma=GAMMA, gae_lambda=LAMBDA
        )
        assert (advantages.dtype, targets.dtype) == (torch.float32, torch.float32)
        assert not advantages.requires_grad
        assert not targets.requires_grad

    def test_its_arguments_stay_as_they_were(self):
        rollout = random_rollout(20, 4)
        before = {name: tensor.clone() for name, tensor in rollout.items()}
        gae(**rollout, gamma=GAMMA, gae_lambda=LAMBDA, mask=torch.zeros(20, 4, dtype=torch.bool))
        for name, tensor in rollout.items():
            assert torch.equal(tensor, before[name])


class TestVTrace:
    def test_hand_computed_numbers(self):
        advantages, targets = vtrace(
            column(math.log(0.5), math.log(4)), column(1, 2), column(10, 20), column(20, 30), flags(0, 0), flags(0, 0),
            gamma=0.5,
        )  # fmt: skip
        # Ratios 0.5 and, clipped, 1. Deltas 0.5 * (1 + 10 - 10) and 2 + 15 - 20.
        assert_close(targets, column(10 + 0.5 + 0.5 * 0.5 * -3, 20 - 3))
        assert_close(advantages, column(0.5 * (1 + 0.5 * 17 - 10), 2 + 15 - 20))

    def test_truncation_bootstraps_from_the_final_observation(self):
        advantages, targets = vtrace(
            column(0, 0), column(1, 1), column(10, 20), column(99, 20), flags(0, 0), flags(1, 0), gamma=0.5
        )
        assert_close(targets, column(1 + 49.5, 1 + 10))
        assert_close(advantages, column(1 + 49.5 - 10, 1 + 10 - 20))

    @pytest.mark.parametrize("clips", [(1.0, 1.0), (2.0, 0.5)])
    def test_agrees_with_torchrl(self, clips: tuple[float, float]):
        rollout = random_rollout(50, 4)
        log_ratios = torch.randn(50, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        advantages, targets = vtrace(log_ratios, **rollout, gamma=GAMMA, rho_clip=clips[0], c_clip=clips[1])
        time_last = {name: tensor.T.unsqueeze(-1) for name, tensor in rollout.items()}
        theirs, their_targets = vtrace_advantage_estimate(
            GAMMA,
            log_ratios.T.unsqueeze(-1),
            torch.zeros(4, 50, 1, dtype=torch.float64),
            time_last["values"],
            time_last["next_values"],
            time_last["rewards"],
            time_last["terminated"] | time_last["truncated"],
            time_last["terminated"],
            rho_thresh=clips[0],
            c_thresh=clips[1],
        )
        assert_close(advantages, theirs.squeeze(-1).T)
        assert_close(targets, their_targets.squeeze(-1).T)


class TestMask:
    @pytest.mark.parametrize("seed", range(5))
    def test_masked_rows_count_as_if_they_were_not_there(self, seed: int):
        kept_rows = random_rollout(20, 1, seed=seed)
        log_ratios = torch.randn(20, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        where = torch.randperm(33, generator=torch.Generator().manual_seed(seed))[:20].sort().values
        mask = torch.zeros(33, 1, dtype=torch.bool)
        mask[where] = True

        def spread(tensor: Tensor) -> Tensor:
            filler = False if tensor.dtype == torch.bool else math.nan
            return torch.full((33, 1), filler, dtype=tensor.dtype).index_put((where,), tensor)

        spread_rows = {name: spread(tensor) for name, tensor in kept_rows.items()}
        pairs = (
            (gae(**kept_rows, gamma=GAMMA, gae_lambda=LAMBDA),
             gae(**spread_rows, gamma=GAMMA, gae_lambda=LAMBDA, mask=mask)),
            (vtrace(log_ratios, **kept_rows, gamma=GAMMA),
             vtrace(spread(log_ratios), **spread_rows, gamma=GAMMA, mask=mask)),
        )  # fmt: skip
        for expected, got in pairs:
            for dense, sparse in zip(expected, got, strict=True):
                assert_close(sparse[where], dense)
                assert torch.equal(sparse[~mask], torch.zeros(13, dtype=torch.float64))

    def test_a_masked_row_that_is_truncated_cuts_the_trajectory(self):
        # A worker was restarted in row 1: row 0 must not see the new episode's rewards.
        advantages, _ = gae(
            column(1, 0, 1000), column(10, 10, 10), column(10, 10, 10), flags(0, 0, 0), flags(0, 1, 0),
            gamma=0.5, gae_lambda=0.5, mask=flags(1, 0, 1),
        )  # fmt: skip
        assert_close(advantages, column(1 + 5 - 10, 0, 1000 + 5 - 10))

    def test_one_agents_death_leaves_the_others_alone(self):
        rollout = random_rollout(10, 2, 3)
        mask = torch.ones(10, 2, 3, dtype=torch.bool)
        rollout["terminated"][4, 0, 1] = True
        mask[5:, 0, 1] = False
        with_dead, _ = gae(**rollout, gamma=GAMMA, gae_lambda=LAMBDA, mask=mask)
        without, _ = gae(**rollout, gamma=GAMMA, gae_lambda=LAMBDA)
        assert_close(with_dead[mask], without[mask])
        assert with_dead[5:, 0, 1].eq(0).all()


class TestWrongArguments:
    def test_another_shape_is_named_and_not_broadcast(self):
        rollout = random_rollout(10, 2, 3) | {"terminated": torch.zeros(10, 2, dtype=torch.bool)}
        with pytest.raises(SpecMismatch, match=r"terminated: expected shape \[10, 2, 3\].*got \[10, 2\]"):
            gae(**rollout, gamma=GAMMA, gae_lambda=LAMBDA)

    def test_flags_that_are_not_bool_are_named(self):
        rollout = random_rollout(10, 2) | {"truncated": torch.zeros(10, 2)}
        with pytest.raises(SpecMismatch, match=r"truncated: expected dtype torch.bool, got torch.float32"):
            gae(**rollout, gamma=GAMMA, gae_lambda=LAMBDA)


def rollout_of(obs: Tensor, done: Tensor, mask: Tensor | None = None) -> TensorDict:
    rollout = TensorDict(
        {
            "observation": obs,
            "walker": TensorDict({"reward": obs.expand(*obs.shape[:2], 3)}, batch_size=(*obs.shape[:2], 3)),
            "next": {"done": done.unsqueeze(-1)},
        },
        batch_size=obs.shape[:2],
        names=[None, "time"],
    )
    if mask is not None:
        rollout["collector", "mask"] = mask
    return rollout


class TestSplitTrajectories:
    def test_each_trajectory_becomes_a_padded_row(self):
        obs = torch.tensor([[1, 3, 5, 7], [2, 4, 6, 8]]).unsqueeze(-1)
        done = torch.tensor([[0, 1, 0, 0], [0, 0, 0, 1]], dtype=torch.bool)
        split = split_trajectories(rollout_of(obs, done))
        assert split.batch_size == (3, 4)
        assert split.names == [None, "time"]
        assert split["observation"][..., 0].tolist() == [[1, 3, 0, 0], [5, 7, 0, 0], [2, 4, 6, 8]]
        assert split["collector", "mask"].tolist() == [[True, True, False, False]] * 2 + [[True] * 4]
        assert split["walker", "reward"].shape == (3, 4, 3)

    def test_masked_rows_are_dropped_and_the_rest_moves_up(self):
        # next_step autoreset: the row after done is the reset.
        obs = torch.arange(1, 7).reshape(1, 6, 1)
        done = torch.tensor([[0, 1, 0, 0, 0, 0]], dtype=torch.bool)
        mask = torch.tensor([[1, 1, 0, 1, 1, 1]], dtype=torch.bool)
        split = split_trajectories(rollout_of(obs, done, mask))
        assert split["observation"][..., 0].tolist() == [[1, 2, 0], [4, 5, 6]]

    def test_advantages_are_the_same_before_and_after(self):
        rollout = random_rollout(30, 3)
        ended = rollout["terminated"] | rollout["truncated"]
        batch = TensorDict(
            {
                **rollout,
                "next": {"done": ended.unsqueeze(-1)},
                "gae": gae(**rollout, gamma=GAMMA, gae_lambda=LAMBDA)[0],
            },
            batch_size=(30, 3),
        )
        split = split_trajectories(batch.transpose(0, 1)).transpose(0, 1)
        mask = split["collector", "mask"]
        advantages, _ = gae(**{name: split[name] for name in rollout}, gamma=GAMMA, gae_lambda=LAMBDA, mask=mask)
        assert_close(advantages, split["gae"])
        assert int(mask.sum()) == 90

    def test_a_rollout_whose_rows_are_all_masked_has_no_trajectories(self):
        nothing = torch.zeros(2, 4, dtype=torch.bool)
        split = split_trajectories(rollout_of(torch.ones(2, 4, 1), nothing, nothing))
        assert split.batch_size == (0, 0)

    def test_ids_that_change_split_and_are_counted_where_there_are_none(self):
        obs, nothing = torch.arange(8).reshape(2, 4, 1), torch.zeros(2, 4, dtype=torch.bool)
        assert split_trajectories(rollout_of(obs, nothing))["collector", "traj_ids"].tolist() == [[0] * 4, [1] * 4]
        rollout = rollout_of(obs, nothing)
        rollout["collector", "traj_ids"] = torch.tensor([[5, 5, 5, 7], [6, 6, 6, 6]])
        split = split_trajectories(rollout)
        assert split["observation"][..., 0].tolist() == [[0, 1, 2, 0], [3, 0, 0, 0], [4, 5, 6, 7]]
        assert split["collector", "traj_ids"].tolist() == [[5, 5, 5, 0], [7, 0, 0, 0], [6, 6, 6, 6]]

    def test_missing_done_is_named(self):
        with pytest.raises(SpecMismatch, match=r'expected \("next", "done"\) of shape \[2, 4, 1\], got none'):
            split_trajectories(TensorDict({"observation": torch.ones(2, 4, 1)}, batch_size=(2, 4)))

    def test_a_batch_without_env_dimension_is_named(self):
        with pytest.raises(SpecMismatch, match=r"expected batch_size \[N, T\], got \[4\]"):
            split_trajectories(TensorDict({"observation": torch.ones(4, 1)}, batch_size=(4,)))

    def test_a_batch_whose_time_comes_first_is_named(self):
        nothing = torch.zeros(2, 4, dtype=torch.bool)
        time_first = rollout_of(torch.ones(2, 4, 1), nothing).transpose(0, 1)
        with pytest.raises(
            SpecMismatch, match=r"expected batch_size \[N, T\], got \[4, 2\] with names \['time', None\]"
        ):
            split_trajectories(time_first)
