"""PPO on small envs whose best policy, or whose value, is known."""

from __future__ import annotations

import copy
import functools
import io
import itertools
import math
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from states import alike, not_finite
from torch.testing import assert_close

import muster
from muster.algorithms import PPO, PPOConfig
from muster.errors import ConfigError, TrainingDiverged, UsageError
from muster.rollout import gae

Step = tuple[Any, float, bool, bool, dict[str, Any]]


class Clock(gym.Env[Any, Any]):
    """Observes how many steps it made, gets the same reward for each, is truncated after 5 if not terminated before."""

    observation_space = spaces.Box(0, 100, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, terminated_after: int = 100, reward: float = 1.0) -> None:
        self.terminated_after = terminated_after
        self.reward = reward

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Step:
        self.steps += 1
        obs = np.full(1, self.steps, np.float32)
        return obs, self.reward, self.steps == self.terminated_after, self.steps == 5, {}


AT_KL = torch.tensor(3)  # among the figures of a loss
SMALL: dict[str, Any] = {"num_envs": 4, "num_steps": 32, "learning_rate": 0.01}
NORMALIZED = {"normalize_observations": True, "normalize_rewards": True}


@contextmanager
def ppo_on(env: Any, **options: Any) -> Iterator[PPO]:
    config = PPOConfig(**SMALL | options)
    with muster.make_vec(env, config.num_envs, backend="serial", autoreset_mode="same_step") as envs:
        yield PPO(envs, config)


@pytest.mark.slow
class TestLearning:
    def test_cartpole_is_solved_with_the_defaults(self):
        def reached(seed: int) -> float:
            with muster.make_vec("CartPole-v1", 8, autoreset_mode="same_step") as envs:
                *_, last = PPO(envs, PPOConfig(seed=seed)).train()
            return last.episodes.mean_return

        # How a processor rounds decides which seeds end below: one of five does.
        assert any(reached(seed) >= 475 for seed in (2, 3))


class TestBootstrapping:
    def rollout(self, **env_options: Any) -> tuple[list[int], torch.Tensor, torch.Tensor, Callable[[int], float]]:
        """One env, 12 steps: the clock before each step, targets, values, and the critic's value at a clock."""
        make = functools.partial(Clock, **env_options)
        with ppo_on(make, num_envs=1, num_steps=12, gamma=0.5, gae_lambda=0.0) as ppo:
            rollout = ppo.collect_rollout()

            def value_at(clock: int) -> float:
                return ppo.policy(torch.tensor([[float(clock)]]))[1].item()

            return [int(clock) for clock in rollout.observations], rollout.targets, rollout.values, value_at

    def test_truncation_bootstraps_from_final_obs(self):
        clocks, targets, _, value_at = self.rollout()
        assert clocks == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
        # The last step of an episode leads to clock 5, which is seen in no row.
        assert_close(targets.tolist(), [1 + 0.5 * value_at(clock + 1) for clock in clocks])

    @pytest.mark.parametrize("ends_at", [3, 5])  # with the fifth step it is truncated, too
    def test_termination_does_not_bootstrap(self, ends_at: int):
        clocks, targets, values, value_at = self.rollout(terminated_after=ends_at)
        expected = [1 + (0.5 * value_at(clock + 1) if clock < ends_at - 1 else 0.0) for clock in clocks]
        assert_close(targets.tolist(), expected)
        assert_close(values.tolist(), [value_at(clock) for clock in clocks])

    @pytest.mark.parametrize("autoreset_mode", ["same_step", "next_step"])
    def test_advantages_are_those_of_gae(self, autoreset_mode: str):
        """That of muster.rollout, which tests/rollout/test_returns.py holds against arithmetic by hand."""
        with muster.make_vec(Clock, 3, backend="serial", autoreset_mode=autoreset_mode) as envs, torch.no_grad():
            ppo = PPO(envs, PPOConfig(num_envs=3, num_steps=13, gamma=0.9, gae_lambda=0.8))
            batch, collect = None, ppo._collect

            def kept() -> Any:
                nonlocal batch
                batch = collect()
                return batch

            ppo._collect = kept
            rollout = ppo.collect_rollout()
            assert batch is not None
            rewards, *ends = (batch["next", name].squeeze(-1) for name in ("reward", "terminated", "truncated"))
            mask, clocks = batch["collector", "mask"], batch["observation"]
            values, following = (ppo.policy(x.flatten(0, 1))[1].view(3, 13) for x in (clocks, clocks + 1))
        given = (x.transpose(0, 1) for x in (rewards, values, following, *ends))
        expected = gae(*given, gamma=0.9, gae_lambda=0.8, mask=mask.transpose(0, 1))
        for ours, theirs in zip((rollout.advantages, rollout.targets), expected, strict=True):
            assert_close(ours, theirs.transpose(0, 1)[mask])


class TestSeeds:
    def run(self, seed: int, **vec_options: Any) -> tuple[list[dict[str, float]], dict[str, Any]]:
        with muster.make_vec("CartPole-v1", 4, autoreset_mode="same_step", **vec_options) as envs:
            ppo = PPO(envs, PPOConfig(seed=seed, total_steps=500, num_envs=4, num_steps=64, **NORMALIZED))
            return [metrics.as_row() for metrics in ppo.train()], ppo.policy.state_dict()

    def test_same_seed_same_policy_on_any_backend_and_number_of_workers(self):
        rows, weights = self.run(3, backend="serial")
        for options in ({"backend": "serial"}, {"num_workers": 3}):
            other_rows, other_weights = self.run(3, **options)
            assert other_rows == rows
            assert all(torch.equal(other_weights[name], weights[name]) for name in weights)

    def test_same_seed_same_policy_whatever_omp_num_threads_says(self):
        before, policies = torch.get_num_threads(), []
        try:
            for threads in (1, 4):
                torch.set_num_threads(threads)  # as OMP_NUM_THREADS would
                with ppo_on("CartPole-v1", hidden_sizes=(300, 200)) as ppo:
                    ppo.iterate()
                    policies.append(
                        (ppo.state_dict()["policy"], {"action": ppo.act(torch.ones(1000, 4), sample=False)})
                    )
        finally:
            torch.set_num_threads(before)
        assert alike(list(policies[0]), list(policies[1]))

    def test_neighbouring_seeds_share_nothing(self):
        seen: set[float] = set()
        for seed in range(3):
            with muster.make_vec("CartPole-v1", 4, backend="serial", autoreset_mode="same_step") as envs:
                rollout = PPO(envs, PPOConfig(seed=seed, num_envs=4, num_steps=2, num_minibatches=1)).collect_rollout()
            firsts = set(rollout.observations[::2, 0].tolist())
            assert len(firsts) == 4
            assert not firsts & seen
            seen |= firsts

    def test_global_generators_and_threads_are_left_alone(self):
        torch_state, numpy_state = torch.get_rng_state(), str(np.random.get_state())  # noqa: NPY002
        threads = torch.get_num_threads()
        with ppo_on("CartPole-v1", torch_threads=threads + 1) as ppo:
            ppo.iterate()
            assert torch.get_num_threads() == threads
        assert torch.equal(torch.get_rng_state(), torch_state)
        assert str(np.random.get_state()) == numpy_state  # noqa: NPY002


class TestProgress:
    def test_returns_are_nan_until_an_episode_ends_and_then_exact(self):
        with ppo_on(Clock, num_steps=4, total_steps=32) as ppo:
            first, second = (metrics.episodes for metrics in ppo.train())
        assert first.episodes == 0
        assert math.isnan(first.mean_return)
        assert second == (4, 5.0, 5.0, 5.0, 5.0)

    def test_metrics_print_in_three_lines(self):
        with ppo_on(Clock, total_steps=128) as ppo:
            first, second, third = repr(next(ppo.train())).splitlines()
        assert first.startswith("steps 128, episodes ")
        assert second.startswith("policy_loss ")
        assert third.startswith("explained_variance ")

    def test_returns_are_of_the_last_100_episodes(self):
        with ppo_on(Clock, num_steps=5 * 30, total_steps=600) as ppo:
            (metrics,) = ppo.train()
            assert metrics.episodes.episodes == 120
            assert len(ppo.episodes.returns) == 100

    def test_target_kl_leaves_a_margin_of_a_half(self):
        steps = []
        for target in (1.0, 1 / 1.4, 1 / 1.6):
            with ppo_on("CartPole-v1", num_minibatches=1, update_epochs=3, target_kl=target) as ppo:
                inner = ppo.learner.loss
                ppo.learner.loss = lambda *given, inner=inner: (
                    lambda loss, parts: (loss, parts.index_fill(0, AT_KL, 1.0))
                )(*inner(*given))
                ppo.iterate()
                steps.append(len(ppo.learner.optimizer.state))
        assert [bool(count) for count in steps] == [True, True, False]

    def test_any_gymnasium_vector_env_will_do(self):
        envs = SyncVectorEnv([Clock] * 4, autoreset_mode=AutoresetMode.SAME_STEP)
        (metrics,) = PPO(envs, PPOConfig(**SMALL, total_steps=128)).train()
        assert metrics.episodes.mean_return == 5.0

    def test_rows_that_only_reset_an_env_are_left_out(self):
        with muster.make_vec(Clock, 2, backend="serial") as envs:  # next_step
            ppo = PPO(envs, PPOConfig(num_envs=2, num_steps=12, gamma=0.5, gae_lambda=0.0))
            rollout = ppo.collect_rollout()
            clocks = rollout.observations[:, 0].tolist()
            assert clocks == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4] * 2
            after = ppo.policy(rollout.observations + 1)[1].tolist()
            assert_close(rollout.targets.tolist(), [1 + 0.5 * value for value in after])
            metrics = ppo.iterate()
        assert metrics.steps == 40
        assert metrics.episodes == (8, 5.0, 5.0, 5.0, 5.0)

    @pytest.mark.parametrize(("num_envs", "num_steps"), [(1, 2), (2, 2), (2, 3), (2, 4)])
    def test_few_rows_that_are_left_are_learnt_from(self, num_envs: int, num_steps: int):
        make = functools.partial(Clock, terminated_after=1)  # every other row only resets the env
        with muster.make_vec(make, num_envs, backend="serial") as envs:
            ppo = PPO(envs, PPOConfig(num_envs=num_envs, num_steps=num_steps, num_minibatches=num_envs))
            before = ppo.state_dict()["policy"]
            for _ in range(3):
                assert not math.isnan(ppo.iterate().explained_variance)
            assert not not_finite(ppo.state_dict())
            assert not alike(ppo.state_dict()["policy"], before)

    def test_it_trains_where_gradients_are_switched_off(self):
        # So does an interrupt that falls into torch's own switching, for the rest of the process.
        with torch.no_grad(), ppo_on(Clock) as ppo:
            before = ppo.state_dict()["policy"]
            ppo.iterate()
            assert not alike(ppo.state_dict()["policy"], before)


RESUMED: dict[str, Any] = {"total_steps": 512, **NORMALIZED}


class TestGoingOn:
    def saved_after(self, iterations: int) -> tuple[dict[str, Any], PPO]:
        with ppo_on("CartPole-v1", **RESUMED) as ppo:
            for _ in range(iterations):
                ppo.iterate()
            file = io.BytesIO()
            torch.save(ppo.state_dict(), file)
            file.seek(0)
            return torch.load(file, weights_only=True), ppo

    def test_everything_goes_on_where_it_stopped(self):
        state, first = self.saved_after(2)
        with ppo_on("CartPole-v1", **RESUMED, seed=0) as ppo:
            ppo.load_state_dict(state)
            assert ppo.steps == 256
            assert ppo.episodes.summary() == first.episodes.summary()
            obs = torch.randn(5, 4)
            assert torch.equal(ppo.act(obs), first.act(obs))
            assert torch.equal(ppo.observations.moments.mean, first.observations.moments.mean)
            rest = list(ppo.train())
        assert [metrics.steps for metrics in rest] == [384, 512]
        assert_close([metrics.learning_rate for metrics in rest], [0.005, 0.0025])
        assert rest[-1].episodes.episodes >= first.episodes.ended

    def test_a_rollout_that_was_not_learnt_from_does_not_count(self):
        with ppo_on(Clock) as ppo, ppo_on(Clock) as other:
            ppo.iterate()
            ppo.collect_rollout()
            other.load_state_dict(ppo.state_dict())
            assert other.iterate().steps == 256


class TestOneStateAnIteration:
    """Whatever ends an iteration, what is saved is the last complete one, whole."""

    @pytest.mark.parametrize("where", ["act", "after rollout", "first minibatch", "fifth minibatch"])
    def test_an_interrupted_iteration_leaves_nothing(self, where: str, monkeypatch: pytest.MonkeyPatch):
        with ppo_on("CartPole-v1", **RESUMED) as ppo:
            ppo.iterate()
            before = ppo.state_dict()
            interrupt(ppo, where, monkeypatch)
            with pytest.raises(KeyboardInterrupt):
                ppo.iterate()
            assert alike(ppo.state_dict(), before)
            assert ppo.metrics is not None
            assert ppo.metrics.steps == ppo.steps == 128
            assert ppo.episodes.summary() == ppo.metrics.episodes
            assert alike(dict(ppo.policy.state_dict()), before["policy"])
            monkeypatch.undo()
            assert ppo.iterate().steps == 256

    def test_what_was_handed_out_stays_as_it_was(self):
        with ppo_on("CartPole-v1", **RESUMED) as ppo, ppo_on("CartPole-v1", **RESUMED) as other:
            ppo.iterate()
            state = ppo.state_dict()
            kept = copy.deepcopy(state)
            other.load_state_dict(state)
            for one in (ppo, other):
                one.iterate()
            assert alike(state, kept)


def interrupt(ppo: PPO, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the next iteration end with a Ctrl-C at a place of its own."""
    target, name, calls_before = {
        "act": (ppo.policy, "decide", 7),
        "after rollout": (ppo.learner, "update", 0),
        "first minibatch": (ppo.learner, "loss", 0),
        "fifth minibatch": (ppo.learner, "loss", 4),
    }[where]
    inner, calls = getattr(target, name), itertools.count()

    def interrupted(*arguments: Any, **options: Any) -> Any:
        if next(calls) == calls_before:
            raise KeyboardInterrupt
        return inner(*arguments, **options)

    if name == "act":
        ppo.collector.policy = lambda obs, explore=ppo.collector.policy: (interrupted(obs), explore(obs))[1]
        ppo.collector._actors = [ppo.collector._actor(part) for part in ppo.collector._stepping.parts]
    else:
        monkeypatch.setattr(target, name, interrupted)


class Glitch(Clock):
    """A clock of one reset, whose step ``at`` breaks ``what``; actions that are not finite end the test."""

    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, what: str, at: int, number: float = math.nan, dtype: Any = np.float32) -> None:
        self.observation_space = spaces.Box(0, 100, (1,), dtype)
        super().__init__(terminated_after=4 if what == "terminated" else 100)
        self.what, self.at, self.number, self.total = what, at, number, 0

    def step(self, action: Any) -> Step:
        assert np.isfinite(action).all()
        obs, reward, terminated, truncated, info = super().step(action)
        obs = obs.astype(self.observation_space.dtype)
        self.total += 1
        ends = terminated if self.what == "terminated" else truncated if self.what == "truncated" else False
        if ends or (self.what == "observation" and self.total == self.at):
            obs[0] = self.number
        return (
            obs,
            self.number if self.what == "reward" and self.total == self.at else reward,
            terminated,
            truncated,
            info,
        )


class TestRowsThatAreNotFinite:
    @pytest.mark.parametrize("autoreset_mode", ["same_step", "next_step"])
    @pytest.mark.parametrize(
        ("what", "step", "number"),
        [
            ("observation", 43, math.nan),
            ("reward", 43, math.inf),
            ("truncated", 5, math.nan),
            ("observation", 64, -math.inf),
            ("reward", 64, math.nan),
        ],
    )
    def test_they_are_refused_by_env_and_step_and_enter_nothing(
        self, what: str, step: int, number: float, autoreset_mode: str
    ):
        make_all = [functools.partial(Glitch, what if i == 2 else "nothing", step, number) for i in range(4)]
        with muster.make_vec(make_all, backend="serial", autoreset_mode=autoreset_mode) as envs:
            ppo = PPO(envs, PPOConfig(**SMALL, **NORMALIZED))
            good = ppo.state_dict()
            with pytest.raises(TrainingDiverged, match=r"Env 2 returned an? .*(nan|inf) in its step (\d+)") as caught:
                for _ in range(3):
                    ppo.iterate()
                    good = ppo.state_dict()
            assert alike(ppo.state_dict(), good)
            assert not not_finite(ppo.state_dict())
            assert not np.isnan(ppo.episodes.returns).any()
        named = int(re.search(r"step (\d+)", str(caught.value))[1])
        # A reset in a row of its own is a step of the vector env, too.
        assert named == step if what == "truncated" or autoreset_mode == "same_step" else named >= step

    @pytest.mark.parametrize("autoreset_mode", ["same_step", "next_step"])
    def test_the_last_observation_of_a_terminated_episode_may_be_anything(self, autoreset_mode: str):
        make = functools.partial(Glitch, "terminated", 0)
        with muster.make_vec(make, 4, backend="serial", autoreset_mode=autoreset_mode) as envs:
            ppo = PPO(envs, PPOConfig(**SMALL, **NORMALIZED))
            for _ in range(2):
                assert ppo.iterate().episodes.mean_return == 4.0
            assert not not_finite(ppo.state_dict())

    def test_numbers_that_float32_cannot_hold_are_refused_too(self):
        make = functools.partial(Glitch, "observation", 3, 1e200, dtype=np.float64)
        with ppo_on(make, **NORMALIZED) as ppo:
            good = ppo.state_dict()
            with pytest.raises(TrainingDiverged, match=r"observation that holds 1e\+200 in its step 3; .* of float32"):
                ppo.iterate()
            assert alike(ppo.state_dict(), good)


class TestSchedule:
    def rates(self, ppo: PPO) -> list[float]:
        return [metrics.learning_rate for metrics in ppo.train()]

    def after(self, iterations: int, **options: Any) -> dict[str, Any]:
        with ppo_on(Clock, total_steps=4 * 128, **options) as ppo:
            for _ in range(iterations):
                ppo.iterate()
            return ppo.state_dict()

    def test_a_longer_run_goes_on_from_the_rate_reached(self):
        state = self.after(2)
        with ppo_on(Clock, total_steps=6 * 128) as ppo:
            ppo.load_state_dict(state)
            assert_close(self.rates(ppo), [0.005, 0.00375, 0.0025, 0.00125])
            again = ppo.state_dict()
        with ppo_on(Clock, total_steps=6 * 128) as ppo:
            ppo.load_state_dict(again)
            assert self.rates(ppo) == []

    def test_a_run_that_left_rows_out_has_finished_with_its_steps(self):
        options = {**SMALL, "num_envs": 2}
        with muster.make_vec(Clock, 2, backend="serial") as envs:  # next_step: of 128 steps 104 or so are an env's own
            ppo = PPO(envs, PPOConfig(**options, total_steps=100))
            *_, last = ppo.train()
            state = ppo.state_dict()
        assert last.steps < ppo.config.num_iterations * ppo.config.batch_size
        with ppo_on(Clock, num_envs=2, total_steps=1000) as ppo:
            ppo.load_state_dict(state)
            assert ppo.schedule.began_again
            assert ppo.iterate().learning_rate == 0.01

    def test_the_clip_range_falls_in_a_line_too(self):
        seen = []
        with ppo_on(Clock, total_steps=4 * 128, anneal_clip=True) as ppo:
            inner = ppo.learner.update
            ppo.learner.update = lambda rows, rates, steps: (seen.append(rates.clip_coef), inner(rows, rates, steps))[1]
            list(ppo.train())
        assert_close(seen, [0.2, 0.15, 0.1, 0.05])


class TestOptions:
    def test_clipped_rewards_are_for_learning_only(self):
        with ppo_on(functools.partial(Clock, reward=-7.0), gamma=0.0, clip_rewards=2.0) as ppo:
            assert_close(ppo.collect_rollout().targets, torch.full((128,), -2.0))
            assert ppo.iterate().episodes.mean_return == -35.0

    def test_the_network_is_as_the_options_say(self):
        options = {"hidden_sizes": [32, 16, 8], "activation": "relu", "log_std_init": -2.0}
        with ppo_on(functools.partial(Glitch, "nothing", 0), **options) as ppo:
            layers = [type(one).__name__ for one in ppo.policy.critic]
            assert layers == ["Linear", "ReLU"] * 3 + ["Linear"]
            assert [one.out_features for one in ppo.policy.actor[::2]] == [32, 16, 8, 2]
            assert ppo.policy.head.log_std.tolist() == [-2.0, -2.0]


class TestLosses:
    @pytest.mark.parametrize(("clips", "expected"), [(False, (0.25 + 9 + 1) / 6), (True, (0.64 + 14.44 + 1.69) / 6)])
    def test_values_clipped_to_those_that_were_collected_count_where_they_are_worse(self, clips: bool, expected: float):
        with ppo_on(Clock, clip_vloss=clips) as ppo:
            rows = ppo.collect_rollout()
            ppo.policy.forward = lambda obs: (torch.zeros(3, 2), torch.tensor([0.5, 4.0, 10.0]))
            rows = rows.at(torch.arange(3))._replace(
                # Moved from 0 to 0.5, from 3 to 4 and from 10.5 to 10, which count as 0.2, 3.2 and 10.3.
                values=torch.tensor([0.0, 3.0, 10.5]), targets=torch.tensor([1.0, 7.0, 9.0])
            )  # fmt: skip
            _, figures = ppo.learner.loss(rows, ppo.config.clip_coef)
        assert_close(figures[1].item(), expected)


class TestNormalization:
    def test_all_rows_of_a_rollout_are_seen_by_the_same_statistics(self):
        seen = []
        with ppo_on(Clock, normalize_observations=True, num_envs=1, num_steps=7, num_minibatches=1) as ppo:
            ppo.iterate()
            statistics = copy.deepcopy(ppo.observations)
            evaluate = ppo.learner._evaluate
            ppo.learner._evaluate = lambda obs, *rest: (seen.append(obs), evaluate(obs, *rest))[1]
            rollout = ppo.collect_rollout()
        # The second rollout begins with clock 2; the final and the last observation are normalised as its rows are.
        rows, last, final = ([2.0, 3.0, 4.0, 0.0, 1.0, 2.0, 3.0], [4.0], [5.0])
        for had, clocks in zip(seen, (rows, last, final), strict=True):
            assert_close(had, statistics(torch.tensor(clocks).unsqueeze(1)))
        assert_close(rollout.observations, seen[0])

    def test_returns_are_told_as_they_are_and_statistics_stand_still_while_acting(self):
        with ppo_on(Clock, normalize_observations=True, normalize_rewards=True) as ppo:
            assert ppo.iterate().episodes.mean_return == 5.0
            count = ppo.observations.moments.count
            assert count == 128
            ppo.act(torch.zeros(3, 1))
            assert ppo.observations.moments.count == count


class TestRefusals:
    def test_diverging_is_named_and_leaves_the_weights_finite(self):
        with ppo_on(Clock, learning_rate=1e30, max_grad_norm=1e30) as ppo:
            with pytest.raises(
                TrainingDiverged, match=r"diverged after step 128.*Lower learning_rate, which is 1e\+30"
            ):
                ppo.iterate()
            assert all(weights.isfinite().all() for weights in ppo.policy.parameters())

    def test_weights_that_the_last_step_of_an_iteration_breaks_are_not_kept(self):
        with ppo_on(Clock, learning_rate=1e39, update_epochs=1, num_minibatches=1) as ppo:
            before = ppo.state_dict()
            with pytest.raises(TrainingDiverged, match=r"weights that are not finite. Lower learning_rate"):
                ppo.iterate()
            assert alike(ppo.state_dict(), before)

    def test_envs_that_do_not_reset_themselves_are_refused(self):
        with (
            muster.make_vec(Clock, 4, backend="serial", autoreset_mode="disabled") as envs,
            pytest.raises(ConfigError, match="needs envs that reset themselves"),
        ):
            PPO(envs, PPOConfig(**SMALL))

    def test_observations_that_are_no_numbers_are_not_normalized(self):
        with pytest.raises(ConfigError, match="normalize_observations"), ppo_on("Taxi-v4", normalize_observations=True):
            pass

    def test_another_number_of_envs_is_refused(self):
        with (
            muster.make_vec(Clock, 2, backend="serial", autoreset_mode="same_step") as envs,
            pytest.raises(UsageError, match=r"num_envs=2, the config num_envs=4; pass PPOConfig\(num_envs=2\)"),
        ):
            PPO(envs, PPOConfig(**SMALL))

    def test_a_single_env_is_refused(self):
        with pytest.raises(UsageError, match="needs a gymnasium VectorEnv, got Clock"):
            PPO(Clock(), PPOConfig())

    def test_senseless_options_are_named(self):
        with pytest.raises(ConfigError, match="gamma must be a number from 0 to 1, got 99"):
            PPOConfig(gamma=99)
        with pytest.raises(ConfigError, match="num_minibatches must be at most 3, .* got 4"):
            PPOConfig(num_envs=1, num_steps=7, num_minibatches=4)
