"""`Collector`: envs that fail, collectors that were shut down, and what is refused."""

from __future__ import annotations

import contextlib
import functools

import gymnasium as gym
import pytest
import torch
from agent_envs import Script
from collecting import SERIAL, Constant, collect, count_env, zeros_policy
from counting_env import CountingEnv, FailingEnv

import muster
from muster.errors import ClosedError, ConfigError, EnvError, SpecMismatch, UsageError
from muster.rollout.collector import Collector


@pytest.mark.parametrize("overlap", [False, True])
def test_after_an_env_error_the_next_batch_starts_afresh(overlap):
    envs = [count_env(length=9), functools.partial(FailingEnv, length=9)]
    with Collector(envs, zeros_policy, frames_per_batch=14, overlap=overlap, make_vec_options=SERIAL) as collector:
        with pytest.raises(EnvError, match="the motor is stuck"):
            collector.rollout()
        batch = collector.rollout()
    assert batch["observation"][0].tolist() == [[1, count] for count in range(7)]
    assert batch["observation"][1].tolist() == [[1, count] for count in range(7)]


def test_restarted_rows_are_masked():
    envs = [count_env(length=9), functools.partial(FailingEnv, length=9)]
    options = {**SERIAL, "on_failure": "restart"}
    with (
        Collector(envs, zeros_policy, frames_per_batch=16, make_vec_options=options) as collector,
        pytest.warns(RuntimeWarning, match=r"env 1 failed and was replaced.* RuntimeError: the motor is stuck"),
    ):
        batch = collector.rollout()
    assert batch["collector", "mask"][0].all()
    assert batch["collector", "mask"][1].tolist() == [True] * 4 + [False] + [True] * 3
    assert batch["next", "truncated"][1, 4].item()
    assert batch["collector", "traj_ids"][1, 5] != batch["collector", "traj_ids"][1, 3]
    assert len(collector.last_episodes.returns) == 0


def test_a_collector_that_was_shut_down_says_so():
    _, collector = collect(count_env(), zeros_policy)
    with pytest.raises(ClosedError, match="shut down"):
        collector.rollout()


def test_the_callers_vector_env_stays_open():
    with muster.make_vec(count_env(), 2, backend="serial", autoreset_mode="same_step") as envs:
        with Collector(envs, zeros_policy, frames_per_batch=4) as collector:
            collector.rollout()
        assert not envs.closed
        with pytest.raises(ConfigError, match="num_envs"):
            Collector(envs, zeros_policy, frames_per_batch=4, num_envs=3)


@pytest.mark.parametrize(
    "wrong",
    [
        {"frames_per_batch": 0},
        {"frames_per_batch": 2.5},
        {"seed": -1},
        {"max_frames_per_traj": 0},
        {"split_trajs": True, "compact": True},
        {"replay_buffer": [], "compact": True},
        {"overlap": True},
        {"policy_factory": Constant},
    ],
)
def test_options_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Collector(count_env(), zeros_policy, make_vec_options=SERIAL, **{"frames_per_batch": 4, **wrong})


GOOD = Constant().state_dict()


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({}, r"unknown \[\], missing \['best'\]"),
        ({**GOOD, "scale": torch.zeros(1)}, r"unknown \['scale'\], missing \[\]"),
        ({"best": torch.zeros(2)}, r"weights\['best'\] has shape \(2,\), the policy's \(\)"),
        ({"best": 0.0}, "is a float; expected a tensor"),
        ({"best": torch.zeros((), dtype=torch.complex64)}, "has dtype torch.complex64"),
        ({"best": torch.zeros((), device="meta")}, "has no values"),
        ([torch.zeros(())], "weights must be a module, a state dict or a TensorDict, got list"),
    ],
)
def test_weights_that_are_not_the_policys_are_refused(weights, message):
    with (
        Collector(count_env(), Constant(), num_envs=2, frames_per_batch=4, make_vec_options=SERIAL) as collector,
        pytest.raises((SpecMismatch, UsageError), match=message),
    ):
        collector.update_policy_weights_(weights)


def test_a_function_has_no_weights_to_update():
    _, collector = collect(count_env(), zeros_policy)
    with pytest.raises(UsageError, match="the policy is a function without weights"):
        collector.update_policy_weights_(GOOD)


def test_gymnasiums_vector_env_has_to_say_how_it_resets():
    with contextlib.closing(gym.vector.SyncVectorEnv([count_env()])) as envs:
        envs.metadata = {}
        with pytest.raises(UsageError, match=r'SyncVectorEnv does not say in metadata\["autoreset_mode"\]'):
            Collector(envs, zeros_policy, frames_per_batch=4)


def test_a_policy_of_agents_gives_actions_by_group():
    with pytest.raises(SpecMismatch, match=r"gave a Tensor, expected a dict of actions by group: \['a', 'b'\]"):
        collect(Script, zeros_policy)


def test_spaces_without_a_shape_are_refused_by_name():
    class Texts(CountingEnv):
        def __init__(self):
            super().__init__()
            self.observation_space = gym.spaces.Dict({"note": gym.spaces.Text(5)})

    with pytest.raises(ConfigError, match="note"):
        Collector(Texts, zeros_policy, frames_per_batch=4, make_vec_options=SERIAL)


def test_observations_that_would_hide_a_key_of_the_batch_are_refused():
    class Hiding(CountingEnv):
        def __init__(self):
            super().__init__()
            self.observation_space = gym.spaces.Dict({"action": gym.spaces.Discrete(2)})

    with pytest.raises(ConfigError, match="'action'"):
        Collector(Hiding, zeros_policy, frames_per_batch=4, make_vec_options=SERIAL)


@pytest.mark.parametrize("env", [count_env(), Script])
def test_a_vector_env_that_copies_for_its_owner_goes_on_doing_so(env):
    with muster.make_vec(env, 2, autoreset_mode="same_step") as envs:
        with Collector(envs, None, frames_per_batch=8) as collector:
            collector.rollout()
        envs.reset()
        own, *_ = envs.step(envs.action_space.sample())
        own = own["a"] if isinstance(own, dict) else own
        before = own.tolist()
        envs.step(envs.action_space.sample())
        assert own.tolist() == before
