"""Figures of episodes' last infos, by collectors wherever they run, and by evaluations."""

from __future__ import annotations

import functools
import threading
import warnings

import numpy as np
import pytest
import torch
from agent_envs import Script
from collecting import collect, zeros_policy
from counting_env import CountingEnv
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from stable_baselines3 import PPO as SB3PPO
from stable_baselines3.common.utils import safe_mean
from stable_baselines3.common.vec_env import DummyVecEnv

import muster
from local_nodes import LocalNodes
from muster.algorithms.ppo_config import EpisodeWindow
from muster.errors import ConfigError
from muster.rollout.collector import Collector
from muster.rollout.episodes import Episodes
from muster.rollout.evaluation import evaluate
from muster.rollout.multi_collector import MultiCollector
from slow import slow

pytestmark = pytest.mark.timeout(120)
SERIAL = {"backend": "serial"}


class Scored(CountingEnv):
    """Reports in the last step, or in `each`, whether the episode's number is even: a success; and `value` as score."""

    def __init__(self, length=3, each=False, value=None) -> None:
        super().__init__(length)
        self.each, self.value = each, value

    def step(self, action):
        obs, reward, terminated, truncated, _ = super().step(action)
        info = {"is_success": terminated and self.episode % 2 == 0, "score": self.value}
        return obs, reward, terminated, truncated, info if self.each or terminated else {"is_success": True, "other": 1}


def scored(**options):
    return functools.partial(Scored, **options)


def by_gymnasium(mode):
    return lambda **options: Collector(SyncVectorEnv([scored(**options)] * 2, autoreset_mode=mode), **of_two)


stays = functools.partial(lambda lock, obs: zeros_policy(obs), threading.Lock())
of_two = {"policy": zeros_policy, "frames_per_batch": 24}
WAYS = {
    "same_step": lambda **o: Collector(scored(**o), num_envs=2, make_vec_options=SERIAL, **of_two),
    "next_step": lambda **o: Collector(muster.make_vec(scored(**o), 2, backend="serial"), **of_two),
    "overlap": lambda **o: Collector(scored(**o), num_envs=2, make_vec_options=SERIAL, overlap=True, **of_two),
    "gymnasium, same_step": by_gymnasium(AutoresetMode.SAME_STEP),
    "gymnasium, next_step": by_gymnasium(AutoresetMode.NEXT_STEP),
    "processes": lambda **o: MultiCollector(scored(**o), num_envs=2, num_collectors=2, **of_two),
    "nodes": lambda **o: MultiCollector(scored(**o), num_envs=2, num_collectors=2, cluster=LocalNodes(2), **of_two),
    "async": lambda **o: MultiCollector(scored(**o), num_envs=2, num_collectors=1, sync=False, **of_two),
    "staying": lambda **o: MultiCollector(scored(**o), num_envs=2, num_collectors=1, policy=stays, frames_per_batch=24),
}


@pytest.mark.filterwarnings("ignore:the policy cannot be copied")
@pytest.mark.parametrize("each", [False, True], ids=["last step", "each step"])
@pytest.mark.parametrize("way", [*(way for way in WAYS if way != "nodes"), *slow("nodes")])
def test_the_last_info_of_each_episode_counts(way: str, each: bool):
    with WAYS[way](length=3, each=each) as collector:
        collector.rollout()
        episodes = collector.last_episodes
    expected = [1.0, 0.0, 1.0, 0.0] if "next_step" not in way else [1.0, 0.0, 1.0]
    assert [episodes.infos["is_success"][episodes.env_ids == env].tolist() for env in (0, 1)] == [expected] * 2
    assert episodes.figures == {"success_rate": np.mean(expected)}


def test_an_episode_that_the_collector_cuts_has_the_info_of_its_last_step():
    _, collector = collect(scored(length=9, each=True, value=2.5), T=4, max_frames_per_traj=2, episode_info=["score"])
    assert collector.last_episodes.infos["score"].tolist() == [2.5] * 4


@pytest.mark.parametrize("names", [None, (), []])
def test_without_names_nothing_is_read(names):
    _, collector = collect(scored(), episode_info=names)
    assert collector.last_episodes.infos == collector.last_episodes.figures == {}


@pytest.mark.parametrize(
    ("value", "number"),
    [(True, 1.0), (np.float32(0.5), 0.5), (7, 7.0), (np.array([2.0]), 2.0), (torch.tensor(3.0), 3.0), (10**30, 1e30)],
    ids=str,
)
def test_numbers_and_flags_count(value, number: float):
    _, collector = collect(scored(value=value), episode_info=["score"])
    assert collector.last_episodes.figures == {"score": number}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (np.ones(3), r"ndarray of shape \(3,\)"),
        ("won", "str"),
        ({"a": 1}, "dict"),
        ([1, 2], "list"),
        (object(), "object"),
    ],
    ids=lambda one: type(one).__name__ if not isinstance(one, str) else one,
)
def test_what_is_no_number_is_named_once(value, said: str):
    with Collector(
        scored(value=value), num_envs=2, make_vec_options=SERIAL, episode_info=("score", "is_success"), **of_two
    ) as collector:
        with pytest.warns(UserWarning, match=f"episode_info: 'score' is neither number nor flag, but .*{said}") as told:
            collector.rollout()
        collector.rollout()
        assert len(told) == 1
        assert collector.last_episodes.figures == {"success_rate": 0.5}


@pytest.mark.parametrize("way", ["same_step", "processes"])
def test_a_name_that_no_env_has_is_said_once(way: str, monkeypatch):
    monkeypatch.setitem(of_two, "episode_info", ("is_success", "nope"))
    with WAYS[way](length=3) as collector:
        with pytest.warns(UserWarning, match="'nope'") as told:
            collector.rollout()
        collector.rollout()
    assert len(told) == 1


def test_nothing_is_said_of_envs_without_is_success():
    with warnings.catch_warnings(action="error"):
        collect("CartPole-v1", zeros_policy, T=64)


@pytest.mark.parametrize("names", ["is_success", 3, {"is_success"}, ["is_success", 1], b"x"], ids=str)
@pytest.mark.parametrize("kind", [Collector, functools.partial(MultiCollector, num_collectors=1)], ids=["one", "multi"])
def test_names_that_are_none(kind, names):
    with pytest.raises(ConfigError, match=r"episode_info must be a list of names, such as \[\"is_success\"\], or None"):
        kind("CartPole-v1", num_envs=1, frames_per_batch=8, episode_info=names)


class Team(Script):
    """Agent a_0 ends after 3 steps, as a success; b_0 after 6, without one, and its team has a score of its own."""

    def __init__(self) -> None:
        ends = {(3, "a_0"): "terminated", (6, "b_0"): "terminated"}
        super().__init__(["a_0 b_0"] * 3 + ["b_0"] * 3 + [""], ends)

    def step(self, actions):
        *rows, ended, cut, infos = super().step(actions)
        for agent, info in infos.items():
            info["is_success"] = agent == "a_0" and ended[agent]
        if ended["b_0"]:
            infos["b_0"]["score"] = 4
        return *rows, ended, cut, infos


@pytest.mark.parametrize("mode", ["same_step", "next_step"])
def test_agents_count_with_the_info_of_their_own_end(mode: str):
    with (
        muster.make_vec(Team, 2, backend="serial", autoreset_mode=mode) as envs,
        Collector(envs, frames_per_batch=8, episode_info=("is_success", "score")) as collector,
    ):
        found = []
        for _ in range(4):  # of 4 steps each, so that an episode lies in two
            collector.rollout()
            found.append(collector.last_episodes)
    assert [one.infos["is_success"].tolist() for one in found if len(one.returns)][:2] == [[0.5, 0.5]] * 2
    assert next(one for one in found if len(one.returns)).figures == {"success_rate": 0.5, "score": 4.0}


def test_episodes_are_shown_in_a_line():
    ended = Episodes(np.array([1.0, 2.0]), np.array([10, 20]), np.array([0, 1]), {"is_success": np.array([1.0, 0.0])})
    assert repr(ended) == "<Episodes: 2 episodes, means: return 1.5 +- 0.5, length 15, success_rate 0.5>"
    assert repr(Episodes(np.empty(0), np.empty(0, np.int64), np.empty(0, np.int64))) == "<Episodes: none>"


def test_an_evaluation_has_those_of_its_own_episodes():
    with muster.make_vec(scored(value=2), 2, backend="serial") as envs:
        played = evaluate(envs, zeros_policy, episodes=5, episode_info=("is_success", "score"))
    assert played.infos["is_success"].tolist() == [1, 0, 1, 1, 0]
    assert played.figures == {"success_rate": 0.6, "score": 2.0}


class Lasting(Scored):
    """Episodes of 1 to 7 steps, by their numbers."""

    def reset(self, **arguments):
        obs, info = super().reset(**arguments)
        self.length = 1 + self.episode * 5 % 7
        return obs, info


def test_success_rates_are_those_of_stable_baselines3():
    theirs, window = [], EpisodeWindow()
    model = SB3PPO("MlpPolicy", DummyVecEnv([Lasting] * 3), n_steps=64, device="cpu")
    model._setup_learn(1)
    with Collector(Lasting, zeros_policy, num_envs=3, frames_per_batch=192, make_vec_options=SERIAL) as collector:
        for _ in range(4):
            for _ in range(64):
                _, _, dones, infos = model.env.step(np.zeros(3, np.int64))
                model._update_info_buffer(infos, dones)
            collector.rollout()
            window.add(collector.last_episodes)
            theirs.append(safe_mean(model.ep_success_buffer))
            assert window.figures()["success_rate"] == pytest.approx(theirs[-1])
    assert len(set(theirs)) > 1
    assert window.ended > 100
