"""MAPPO and IPPO: rows of agents that come and go, by hand; masks, critics, networks, and what they learn."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from envs_of_agents import Broken, Comings, Lots
from gymnasium import spaces
from tensordict import TensorDict
from torch.testing import assert_close

import muster
from muster.algorithms import MAPPO, PPO, MAPPOConfig, PPOConfig
from muster.errors import ConfigError, TrainingDiverged, UsageError

CONNECT_FOUR = "pettingzoo/classic/connect_four_v3"
TAG = "pettingzoo/mpe/simple_tag_v3"


@contextmanager
def mappo_on(env: Any, **options: Any) -> Iterator[MAPPO]:
    config = MAPPOConfig(**{"num_envs": 1, "num_steps": 6, "num_minibatches": 1, "critic": "own"} | options)
    made = {"backend": "serial", "autoreset_mode": "same_step", "state": True}
    with muster.make_vec(env, config.num_envs, **made) as envs:
        yield MAPPO(envs, config)


def values_of_observations(mappo: MAPPO) -> None:
    """Makes the first number of an observation its value."""
    for policy in mappo.policies.values():
        policy.forward = lambda obs, masks=None: (torch.zeros(*obs.shape[:2], 2), obs[..., 0])


def targets_of(mappo: MAPPO, team: str = "w") -> tuple[list[float], list[float]]:
    """The value targets of both agents in the rows that count, over six steps."""
    found: tuple[list[float], list[float]] = [], []
    for _ in range(6 // mappo.config.num_steps):
        rollout = mappo.collect_rollouts()[team]
        for i, agent in enumerate(found):
            agent += rollout.targets[:, i][rollout.counts[:, i]].tolist()
    return found


class TestRowsByHand:
    """gamma = 1/2, lambda = 0: a target is the reward and half of what the agent observes next."""

    ALWAYS: ClassVar[list[float]] = [1 + 0.5, 2 + 1, 3 + 1.5, 4 + 2, 5 + 2.5, 6 + 3]

    @pytest.mark.parametrize("num_steps", [6, 3, 2, 1])
    @pytest.mark.parametrize(("how", "then"), [("terminated", 0.0), ("truncated", 6.0)])
    def test_agents_that_end_and_return(self, how: str, then: float, num_steps: int):
        with mappo_on(lambda: Comings(how), gamma=0.5, gae_lambda=0.0, num_steps=num_steps, num_envs=2) as mappo:
            values_of_observations(mappo)
            always, returns = targets_of(mappo)
        assert sorted(always) == sorted(2 * self.ALWAYS)
        # Rows 0, 1, 4 and 5: row 2 shows the end, and in row 3 the agent is not there.
        assert sorted(returns) == sorted(2 * [1 + 5.5, 2 + then, 5 + 7.5, 6 + 8])

    @pytest.mark.parametrize(("num_steps", "next_seen"), [(6, 14), (2, 11)])
    def test_what_follows_an_absence_is_what_the_agent_observes_then(self, num_steps: int, next_seen: int):
        """In rollouts of two steps it is not known yet, and the value of the last observation stands for it.

        The step in which an agent is gone has no reward for it.
        """
        with mappo_on(lambda: Comings("pauses"), gamma=0.5, gae_lambda=0.0, num_steps=num_steps) as mappo:
            values_of_observations(mappo)
            with pytest.warns(RuntimeWarning, match="left env.agents"):
                always, pauses = targets_of(mappo)
        assert always == self.ALWAYS
        assert pauses == [1 + 5.5, 0 + next_seen / 2, 5 + 7.5, 6 + 8]

    @pytest.mark.filterwarnings("ignore:.*left env.agents")
    def test_what_an_absence_leaves_open_to_the_end_is_the_value_of_the_last_observation(self):
        class Away(Comings):
            """Ends after three steps, while w_1 is away; observations grow by 20 an episode."""

            episode = -1

            def reset(self, **options: Any) -> Any:
                self.episode += 1
                return super().reset(**options)

            def step(self, actions: dict[str, Any]) -> Any:
                obs, rewards, terminated, truncated, infos = super().step(actions)
                self.agents = self.agents if self.t < 3 else []
                return obs, rewards, terminated, dict.fromkeys(truncated, self.t == 3), infos

            def _obs(self) -> dict[str, Any]:
                return {agent: one + 20 * self.episode for agent, one in super()._obs().items()}

        with mappo_on(lambda: Away("pauses"), gamma=0.5, gae_lambda=0.0) as mappo:
            values_of_observations(mappo)
            _, away = targets_of(mappo)
        assert away == [1 + 5.5, 0 + 5.5, 1 + 15.5, 0 + 15.5]

    @pytest.mark.filterwarnings("ignore:.*left env.agents")
    @pytest.mark.parametrize(("how", "expected"), [("terminated", [3, 2, 11, 6]), ("pauses", [12, 11, 11, 6])])
    def test_advantages_go_through_absences_and_stop_at_ends(self, how: str, expected: list[float]):
        with mappo_on(lambda: Comings(how), gamma=1.0, gae_lambda=1.0) as mappo:
            for policy in mappo.policies.values():
                policy.forward = lambda obs, masks=None: (torch.zeros(*obs.shape[:2], 2), torch.zeros(obs.shape[:2]))
            always, returns = targets_of(mappo)
        assert always == [21, 20, 18, 15, 11, 6]
        assert returns == expected

    def test_the_row_of_an_end_does_not_count_after_a_rollout_that_was_cut_short(self, monkeypatch: pytest.MonkeyPatch):
        """As by preemptive_threshold: after two steps, in the second of which w_1 has ended."""
        stop = np.zeros(1)

        class Cut(Comings):
            def step(self, actions: dict[str, Any]) -> Any:
                result = super().step(actions)
                stop[:] = self.t == 2
                return result

        with mappo_on(lambda: Cut("terminated"), gamma=0.5, gae_lambda=0.0) as mappo:
            values_of_observations(mappo)
            fill = mappo.collector.fill
            monkeypatch.setattr(mappo.collector, "fill", lambda storage: fill(storage, stop))
            for expected in ([1 + 5.5, 2], [5 + 7.5, 6 + 8, 1 + 5.5, 2]):
                rollout = mappo.collect_rollouts()["w"]
                assert rollout.targets[:, 1][rollout.counts[:, 1]].tolist() == expected

    def test_who_waits_is_learnt_from_by_value_alone(self):
        with mappo_on(CONNECT_FOUR, num_steps=16, num_envs=2, gamma=0.5, gae_lambda=0.0) as mappo:
            rollout = mappo.collect_rollouts()["player"]
            assert rollout.acts.sum(-1).tolist() == [1] * len(rollout.acts)
            assert rollout.counts.all()
            losses = [
                mappo.learners["player"].loss(rollout._replace(**{name: change(rollout)}), 0.2)[1]
                for name, change in {
                    "advantages": lambda rows: rows.advantages.masked_fill(~rows.acts, 100.0),
                    "targets": lambda rows: rows.targets.masked_fill(~rows.acts, 100.0),
                    "values": lambda rows: rows.values,
                }.items()
            ]
        assert_close(losses[0][0], losses[2][0])  # the policy's loss
        assert losses[1][1] > losses[2][1] + 10  # the value's


class TestMasks:
    def test_a_forbidden_choice_has_no_probability_in_acting_and_learning(self):
        with mappo_on(CONNECT_FOUR, num_steps=128, num_envs=4, normalize_observations=False) as mappo:
            for _ in range(2):
                rollout = mappo.collect_rollouts()["player"]
                chosen = rollout.masks.gather(-1, rollout.actions)[rollout.acts]
                assert chosen.all()
                assert not rollout.masks.all()
                logits, _ = mappo.policies["player"](rollout.observations, rollout.masks)
                assert logits.softmax(-1)[~rollout.masks].max() == 0
                figures = mappo.learners["player"].loss(rollout, 0.2)[1]
                assert figures.isfinite().all()
                assert abs(figures[3]) < 1e-6  # the same probabilities as while collecting
        assert mappo.episodes.ended
        assert set(mappo.episodes.returns) == {0.0}  # of both players: an illegal move costs one of them 1


class TestCritics:
    @pytest.mark.parametrize("space", [None, {"w_0": spaces.Box(0, 1), "w_1": spaces.Box(0, 1)}, spaces.Box(0, 1)])
    def test_a_line_says_which_critic_it_is(self, space: Any, caplog: pytest.LogCaptureFixture):
        class Stating(Comings):
            state_space = space

            def state(self) -> Any:
                return np.zeros(1, np.float32)

        make = functools.partial(Stating, "truncated")
        config = MAPPOConfig(num_envs=2, num_steps=8, total_steps=16, num_minibatches=1)
        with muster.make_vec(make, 2, backend="serial", autoreset_mode="same_step", state=True) as envs:
            mappo = MAPPO(envs, config)
        if isinstance(space, spaces.Box):
            assert mappo.critic_sees.startswith("The centralised critic sees the env's state, Box(")
            assert not caplog.messages
        else:
            assert "all agents' observations" in mappo.critic_sees
            (said,) = caplog.messages
            assert "Stating has a state() without a state_space" in said

    def test_a_centralised_critic_sees_the_state_and_the_agents_index(self):
        with mappo_on("pettingzoo/mpe/simple_spread_v3", critic="centralised") as mappo:
            policy, rollout = mappo.policies["agent"], mappo.collect_rollouts()["agent"]
            seen = rollout.observations
            assert_close(seen["sights", "state"], seen["own"].flatten(1))  # of MPE: all agents' observations
            by_hand = [
                policy.critic.critic(torch.cat([seen["sights", "state"], torch.eye(3)[i].expand(6, 3)], -1))
                for i in range(3)
            ]
            assert_close(policy(seen)[1], torch.cat(by_hand, -1))
            assert_close(policy(seen)[0], policy.policy.actor(seen["own"]))

    def test_of_envs_without_a_state_it_sees_what_all_agents_observe(self):
        with mappo_on(TAG, critic="centralised") as mappo:
            assert mappo.facts.state_space is not None
        with muster.make_vec(TAG, 1, backend="serial", autoreset_mode="same_step") as envs:  # no state=True
            mappo = MAPPO(envs, MAPPOConfig(num_envs=1, num_steps=6, num_minibatches=1))
            seen = mappo.collect_rollouts()["agent"].observations
            assert seen["sights", "adversary"].shape == (6, 3, 16)
            judged = torch.cat([seen["sights", name].flatten(1) for name in ("adversary", "agent")], -1)
            policy = mappo.policies["agent"]
            assert_close(policy(seen)[1], policy.critic.critic(torch.cat([judged, torch.ones(6, 1)], -1)))

    def test_groups_and_agents_that_share_nothing_have_networks_and_figures_of_their_own(self):
        with mappo_on(TAG, num_envs=2, num_steps=32, share_params={"adversary": False}) as mappo:
            assert list(mappo.policies) == [
                "adversary/adversary_0",
                "adversary/adversary_1",
                "adversary/adversary_2",
                "agent",
            ]
            before = copy.deepcopy({name: policy.state_dict() for name, policy in mappo.policies.items()})
            row = mappo.iterate().as_row()
        for name, policy in mappo.policies.items():
            assert f"entropy/{name}" in row
            assert any(not torch.equal(old, policy.state_dict()[key]) for key, old in before[name].items())
        assert row["mean_return"] == pytest.approx((3 * row["mean_return/adversary"] + row["mean_return/agent"]) / 4)


def test_the_loss_is_that_of_torchrl_on_the_rows_that_count():
    # Not above: workers import this file for its envs, and TorchRL takes seconds.
    from tensordict.nn import (
        ProbabilisticTensorDictModule,
        ProbabilisticTensorDictSequential,
        TensorDictModule,
    )
    from torchrl.objectives import ClipPPOLoss

    with mappo_on(
        lambda: Comings("terminated"), num_envs=8, norm_adv=False, ent_coef=0.01, learning_rate=0.01
    ) as mappo:
        for _ in range(3):  # until the policies differ from those that collected
            mappo.iterate()
        rollout, learner = mappo.collect_rollouts()["w"], mappo.learners["w"]
        learner.update(rollout, mappo.schedule.at(0), 0)
        policy, config = mappo.policies["w"], mappo.config
        loss, figures = learner.loss(rollout, 0.2)
    assert not rollout.counts.all()
    actor = ProbabilisticTensorDictSequential(
        TensorDictModule(lambda obs: policy(obs.unsqueeze(0))[0].squeeze(0), ["observation"], ["logits"]),
        ProbabilisticTensorDictModule(
            ["logits"], ["action"], distribution_class=torch.distributions.Categorical, return_log_prob=True
        ),
    )
    critic = TensorDictModule(
        lambda obs: policy(obs.unsqueeze(0))[1].squeeze(0).unsqueeze(-1), ["observation"], ["state_value"]
    )
    theirs = ClipPPOLoss(
        actor, critic, clip_epsilon=0.2, entropy_coeff=config.ent_coef, critic_coeff=0.5 * config.vf_coef,
        loss_critic_type="l2", normalize_advantage=False,
    )  # fmt: skip

    def rows(counted: torch.Tensor) -> TensorDict:
        named = {
            "observation": rollout.observations, "action": rollout.actions.squeeze(-1),
            "action_log_prob": rollout.log_probs, "sample_log_prob": rollout.log_probs,
            "advantage": rollout.advantages.unsqueeze(-1), "value_target": rollout.targets.unsqueeze(-1),
        }  # fmt: skip
        return TensorDict({name: one[counted] for name, one in named.items()}, [int(counted.sum())])

    of_policy, of_value = theirs(rows(rollout.acts)), theirs(rows(rollout.counts))
    assert_close(of_policy["loss_objective"].detach(), figures[0])
    assert_close(of_policy["entropy"].detach(), figures[2])
    assert_close(
        (of_policy["loss_objective"] + of_policy["loss_entropy"] + of_value["loss_critic"]).detach(), loss.detach()
    )


def test_same_seed_same_run_whatever_steps_the_envs():
    states = []
    for options in ({"backend": "serial"}, {"num_workers": 1}, {"num_workers": 2}, {"backend": "thread"}):
        sizes = {"num_envs": 4, "num_steps": 16, "total_steps": 128, "num_minibatches": 2, "update_epochs": 1}
        config = MAPPOConfig(**sizes, normalize_observations=True, seed=3)
        with muster.make_vec(Lots, 4, autoreset_mode="same_step", state=True, **options) as envs:
            mappo = MAPPO(envs, config)
            list(mappo.train())
            states.append(mappo.state_dict())
    for other in states[1:]:
        assert_close(other["teams"], states[0]["teams"], rtol=0, atol=0)


def test_what_is_not_finite_ends_the_run_with_env_agent_and_step():
    with (
        mappo_on(lambda: Broken("terminated")) as mappo,
        pytest.raises(TrainingDiverged, match="Env 0 returned an observation that holds nan for 'w_0' in its step 3"),
    ):
        mappo.iterate()


def test_other_envs_and_options_are_refused_by_name():
    with (
        muster.make_vec("CartPole-v1", 2, backend="serial", autoreset_mode="same_step") as envs,
        pytest.raises(UsageError, match="For one agent per env there is PPO"),
    ):
        MAPPO(envs, MAPPOConfig(num_envs=2))
    with muster.make_vec(TAG, 2, backend="serial", autoreset_mode="same_step") as envs:
        with pytest.raises(UsageError, match="For several agents there is MAPPO"):
            PPO(envs, PPOConfig(num_envs=2))
        with pytest.raises(UsageError, match=r"pass MAPPOConfig\(num_envs=2\)"):
            MAPPO(envs, MAPPOConfig(num_envs=4))
        with pytest.raises(ConfigError, match=r"share_params names \['wolf'\].*'adversary', 'agent'"):
            MAPPO(envs, MAPPOConfig(num_envs=2, share_params={"wolf": False}))


@pytest.mark.parametrize("critic", ["centralised", "own"])
def test_groups_with_spaces_of_their_own_learn(critic: str):
    with mappo_on(Lots, critic=critic, num_envs=8, num_steps=32, total_steps=5_000, gamma=0.5) as mappo:
        *_, last = mappo.train()
    assert [team.mean_return > 7 for team in last.teams.values()] == [True, True]
