"""PPO whose envs are in collectors: what acts there, what fails there, and what comes of it here."""

from __future__ import annotations

import functools
import math
import os
import signal
import threading
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from states import alike
from tensordict import TensorDict
from torch.testing import assert_close

from local_nodes import LocalNodes
from muster.algorithms import MAPPO, PPO, ActorCritic, MAPPOConfig, PPOConfig
from muster.algorithms.actor_critic import CHOSEN, Gaussian, as_seen
from muster.errors import ConfigError, TrainingDiverged, WorkerDied

pytestmark = pytest.mark.timeout(60)

SMALL: dict[str, Any] = {"num_envs": 4, "num_steps": 32, "learning_rate": 0.01, "update_epochs": 2}
FORKED = {"num_collectors": 2, "context": "fork"}
GRU: dict[str, Any] = {"policy": "gru", "memory_size": 8, "hidden_sizes": (8,)}


def ppo_on(env: Any, collectors: dict[str, Any] = FORKED, policy: ActorCritic | None = None, **options: Any) -> PPO:
    return PPO(env, PPOConfig(**SMALL | options), policy, collectors=collectors)


class Sure(Gaussian):
    """Draws what is likeliest, so that an action tells which weights and statistics it is of."""

    def sample(self, params: torch.Tensor, rng: torch.Generator | None = None) -> torch.Tensor:
        return self.mode(params)


class Surest(ActorCritic):
    def __init__(self, observation_space: Any, action_space: Any, rng: torch.Generator) -> None:
        super().__init__(observation_space, action_space, rng)
        self.head = Sure(action_space)


class Drift(gym.Env[Any, Any]):
    """Observations of all sizes, which no action changes; ends its process in the step in which ``flag`` is missing."""

    observation_space = spaces.Box(-1e6, 1e6, (3,), np.float32)
    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def __init__(self, flag: Path | None = None) -> None:
        self.flag = flag

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return self.observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert np.isfinite(action).all()
        if self.flag is not None and not self.flag.exists():
            self.flag.touch()
            os._exit(1)
        self.steps += 1
        return self.observe(), float(action[0]), False, self.steps == 10, {}

    def observe(self) -> Any:
        return (self.np_random.normal(3, 1, 3) * (1, 10, 1000)).astype(np.float32)


def test_each_row_is_acted_by_the_weights_and_statistics_of_the_learner(monkeypatch: pytest.MonkeyPatch):
    policy = Surest(Drift.observation_space, Drift.action_space, torch.Generator().manual_seed(0))
    with ppo_on(Drift, {"num_collectors": 2}, policy, normalize_observations=True) as ppo:
        collect, means = ppo.collector.rollout, []

        def rollout() -> TensorDict:
            batch = collect()
            assert (batch["collector", "policy_version"] == ppo.collector.policy_version).all()
            with torch.no_grad():
                expected = policy.head.mode(
                    policy.decide(as_seen(batch["observation"].flatten(0, 1), ppo.observations))[0]
                )
            assert_close(batch[CHOSEN].flatten(0, 1), expected)
            means.append(expected.mean())
            return batch

        monkeypatch.setattr(ppo.collector, "rollout", rollout)
        for _ in range(3):
            ppo.iterate()
        assert len(set(means)) == 3  # the learner has moved meanwhile


@pytest.mark.parametrize(
    ("env", "options"),
    [
        ("CartPole-v1", {"normalize_observations": True}),
        ("CartPole-v1", GRU),
        ("pettingzoo/mpe/simple_spread_v3", {**GRU, "normalize_observations": True}),
        ("pettingzoo/mpe/simple_tag_v3", {"normalize_rewards": True}),
    ],
    ids=["one agent", "memory", "agents with memory", "groups"],
)
def test_two_that_go_on_from_one_state_do_the_same(env: str, options: dict[str, Any]):
    algorithm: Any
    algorithm, config = (PPO, PPOConfig) if env == "CartPole-v1" else (MAPPO, MAPPOConfig)
    with algorithm(env, config(**SMALL | options), collectors=FORKED) as trained:
        trained.iterate()
        state, after = trained.state_dict(), []
        for _ in range(2):
            trained.load_state_dict(state)
            trained.iterate()
            after.append(trained.state_dict())
        assert alike(*after)
        learnt = "policy" if "policy" in state else "teams"
        assert not alike(after[0][learnt], state[learnt])
        assert "policy" not in state["collector"]  # once is enough


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an interrupt in a callback is lost
def test_ctrl_c_leaves_the_last_complete_iteration():
    with ppo_on("CartPole-v1", num_steps=512) as ppo:
        for seconds in (0.02, 0.1, 0.3):
            before = ppo.iterate().steps
            alarm = threading.Timer(seconds, signal.raise_signal, (signal.SIGINT,))
            with pytest.raises(KeyboardInterrupt):
                alarm.start()
                while True:
                    before = ppo.iterate().steps
            alarm.join()
            state = ppo.state_dict()
            assert state["steps"] == ppo.steps
            assert ppo.steps >= before
            assert alike(dict(ppo.policy.state_dict()), state["policy"])
            assert ppo.iterate().steps == state["steps"] + 4 * 512


def test_actions_that_are_not_finite_are_told_as_at_home():
    with ppo_on(Drift) as ppo:
        ppo.iterate()
        good = ppo.state_dict()
        with torch.no_grad():
            ppo.policy.actor[-1].bias.fill_(math.nan)
        with pytest.raises(TrainingDiverged, match="after step 128 the policy's actions .* Lower learning_rate"):
            ppo.iterate()
        assert alike(dict(ppo.policy.state_dict()), good["policy"])


def test_what_has_ended_the_collectors_is_told_and_the_state_is_kept(tmp_path: Path):
    with ppo_on(functools.partial(Drift, tmp_path / "flag")) as ppo:
        before = ppo.state_dict()
        with pytest.raises(WorkerDied):
            ppo.iterate()
        assert alike(ppo.state_dict(), before)


@pytest.mark.filterwarnings("ignore:collector 0 .* was replaced:RuntimeWarning")
def test_a_rollout_that_was_lost_whole_is_collected_again(tmp_path: Path):
    lost = functools.partial(Drift, tmp_path / "flag")
    with ppo_on(lost, {"num_collectors": 1, "context": "fork", "on_failure": "restart"}) as ppo:
        assert ppo.iterate().steps == 128


@pytest.mark.parametrize(
    ("collectors", "said"),
    [
        ({}, "say how many"),
        (4, "say how many"),
        ({"num_collectors": 2, "num_envs": 4}, r"no option 'num_envs'\. They have num_collectors, "),
        ({"num_collectors": 2, "wrappers": []}, "'wrappers'.*; options of the envs go into make_vec_options"),
        ({"num_collectors": 2, "make_vec_options": {"copy": False}}, "their.*, got copy"),
    ],
)
def test_options_that_its_collectors_do_not_have_are_refused_by_name(collectors: Any, said: str):
    with pytest.raises(ConfigError, match=said):
        ppo_on("CartPole-v1", collectors)


@pytest.mark.slow
def test_same_seed_same_policy_at_home_and_on_two_nodes():
    states = []
    for where in ({}, {}, {"cluster": LocalNodes(2)}):
        with ppo_on("CartPole-v1", {"num_collectors": 3, **where}, normalize_observations=True) as ppo:
            for _ in range(3):
                ppo.iterate()
            states.append(ppo.state_dict())
    assert alike(states[0], states[1])
    assert alike(states[0], states[2])


@pytest.mark.slow
def test_cartpole_is_learnt():
    options = {name: value for name, value in vars(PPOConfig(total_steps=60_000)).items() if name != "policy"}
    with ppo_on("CartPole-v1", {"num_collectors": 2}, **options) as ppo:
        *_, last = ppo.train()
    assert last.episodes.mean_return > 200
