"""The results of steps, resets and calls, on every backend."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from backend_under_test import MakeVec, same_run
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import muster
from muster.errors import EnvError, UsageError
from sample_envs import Counter, Returning


class ReusingAll(gym.Env[Any, Any]):
    """An env that reuses the objects, arrays and lists that it returns, in its reset too."""

    observation_space = spaces.Dict(x=spaces.Box(-9, 9, (1,)), graph=spaces.Graph(spaces.Box(-9, 9, (1,)), None))
    action_space = spaces.Discrete(2)

    def __init__(self) -> None:
        self.nodes = np.zeros((2, 1), np.float32)
        self.large = np.zeros(100_000)  # too big for the infos' part of the slab
        self.trace: list[int] = []

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.nodes[:] = self.large[:] = 0
        self.trace.clear()
        return self._obs(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.trace.append(len(self.trace) + 1)
        self.nodes[:] = self.large[:] = len(self.trace)
        return self._obs(), 0.0, len(self.trace) == 3, False, {"trace": self.trace, "large": self.large}

    def _obs(self) -> dict[str, Any]:
        return {"x": self.nodes[0], "graph": spaces.GraphInstance(self.nodes, None, None)}


class BusySimulator(Counter):
    """A simulator whose second reset raises."""

    resets = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.resets += 1
        if self.resets == 2:
            raise RuntimeError("busy")
        return super().reset(seed=seed, options=options)


class Listening(Counter):
    """An env whose actions have no fixed length."""

    action_space = spaces.Sequence(spaces.Box(0, 9, (2,)), stack=True)


class Constant(gym.Env[Any, Any]):
    """An env that always observes ``values``, in a dtype."""

    action_space = spaces.Discrete(2)

    def __init__(self, dtype: Any, values: tuple[float, ...]) -> None:
        self.observation_space = spaces.Box(-9, 9, (len(values),), np.dtype(dtype))
        self.obs = np.array(values, dtype)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return self.obs, {}


class StepContract:
    """The part of `BackendContract` that is about the results of steps, resets and calls."""

    @pytest.mark.parametrize("mode", ["next_step", "same_step"])
    @pytest.mark.parametrize("env_id", ["CartPole-v1", "HalfCheetah-v5", "Pendulum-v1"])
    def test_rows_equal_gymnasiums_sync_vector_env(self, make: MakeVec, env_id: str, mode: str) -> None:
        if env_id == "HalfCheetah-v5":
            pytest.importorskip("mujoco")
        kwargs = {"max_episode_steps": 30}
        reference = gym.make_vec(
            env_id, 3, "sync", vector_kwargs={"autoreset_mode": AutoresetMode[mode.upper()]}, **kwargs
        )
        same_run(make(env_id, 3, autoreset_mode=mode, env_kwargs=kwargs), reference, 100)

    def test_same_step_keeps_the_final_obs_of_envs_that_reuse_their_buffer(self, make: MakeVec) -> None:
        envs = make([Counter] * 3, autoreset_mode="same_step")
        envs.reset(seed=10)
        for _ in range(3):
            envs.step(np.zeros(3, int))
        obs, rewards, terminated, _, infos = envs.step(np.zeros(3, int))
        assert terminated.all()
        assert rewards.tolist() == [4, 4, 4]
        assert obs.tolist() == [[10, 2, 0], [11, 2, 0], [12, 2, 0]]
        assert [final.tolist() for final in infos["final_obs"]] == [[10, 1, 4], [11, 1, 4], [12, 1, 4]]
        assert envs.episode_returns.tolist() == [10, 10, 10]
        assert envs.episode_lengths.tolist() == [4, 4, 4]

    def test_same_step_keeps_final_objects_that_the_reset_reuses(self, make: MakeVec) -> None:
        envs = make([ReusingAll] * 2, autoreset_mode="same_step")
        first = envs.reset()[0]
        actions = np.zeros(2, int)
        envs.step(actions)
        assert first["graph"][0].nodes.tolist() == [[0], [0]]
        envs.step(actions)
        infos = envs.step(actions)[4]
        assert infos["final_obs"][1]["graph"].nodes.tolist() == [[3], [3]]
        assert infos["final_info"]["trace"][1] == [1, 2, 3]
        assert infos["final_info"]["large"][1][0] == 3

    @pytest.mark.parametrize("mode", ["next_step", "same_step"])
    def test_an_autoreset_that_failed_is_tried_again(self, make: MakeVec, mode: str) -> None:
        envs = make(
            [functools.partial(BusySimulator, length=1), functools.partial(Counter, length=9)], autoreset_mode=mode
        )
        envs.reset(seed=5)
        actions = np.zeros(2, int)
        if mode == "next_step":
            assert envs.step(actions)[2].tolist() == [True, False]
        with pytest.raises(EnvError, match="busy"):
            envs.step(actions)
        _, rewards, terminated, _, _ = envs.step(actions)
        assert (rewards[0], terminated[0]) == (0.0, False)

    def test_next_step_resets_on_the_step_after_the_end(self, make: MakeVec) -> None:
        envs = make([functools.partial(Counter, length=1 + i) for i in range(2)])
        envs.reset(seed=5)
        actions = np.zeros(2, int)
        obs, _, terminated, _, _ = envs.step(actions)
        assert (terminated.tolist(), obs.tolist()) == ([True, False], [[5, 1, 1], [6, 1, 1]])
        obs, rewards, terminated, _, _ = envs.step(actions)
        assert (terminated.tolist(), obs.tolist()) == ([False, True], [[5, 2, 0], [6, 1, 2]])
        assert rewards.tolist() == [0, 2]

    def test_disabled_refuses_to_step_an_ended_env_until_it_is_reset(self, make: MakeVec) -> None:
        envs = make([functools.partial(Counter, length=1 + i) for i in range(2)], autoreset_mode="disabled")
        envs.reset(seed=5)
        _, _, terminated, _, _ = envs.step(np.zeros(2, int))
        with pytest.raises(UsageError, match=r"env 0 has ended.*reset_mask"):
            envs.step(np.zeros(2, int))
        obs, _ = envs.reset(options={"reset_mask": terminated})
        assert obs.tolist() == [[5, 2, 0], [6, 1, 1]]
        obs, *_ = envs.step(np.zeros(2, int))
        assert obs.tolist() == [[5, 2, 1], [6, 1, 2]]

    def test_copies_stay_and_views_follow(self, make: MakeVec) -> None:
        for copy in (True, False):
            envs = make([Counter] * 2, copy=copy)
            first, _ = envs.reset(seed=1)
            kept = first.copy()
            envs.step(np.zeros(2, int))
            assert (first == kept).all() == copy
            assert np.shares_memory(envs.step(np.zeros(2, int))[0], envs.step(np.zeros(2, int))[0]) != copy

    def test_envs_own_their_actions_and_get_gymnasiums_types(self, make: MakeVec) -> None:
        envs = make([Counter] * 2)
        envs.reset()
        actions = np.array([1, 2])
        envs.step(actions)
        actions[:] = 0
        assert [type(one[0]) for one in envs.get_attr("actions")] == [np.int64, np.int64]
        assert envs.get_attr("actions") == ([1], [2])

    def test_envs_own_the_objects_in_their_actions(self, make: MakeVec) -> None:
        envs = make([Listening] * 2)
        envs.reset()
        actions = tuple(np.full((1, 2), env, np.float32) for env in range(2))
        envs.send(actions)
        for action in actions:
            action[:] = 7
        envs.recv()
        assert [heard[0].tolist() for heard in envs.get_attr("actions")] == [[[0, 0]], [[1, 1]]]

    def test_calls_and_attributes_reach_every_env(self, make: MakeVec) -> None:
        envs = make([functools.partial(Counter, length=9)] * 3, env_kwargs=[{"render_mode": "ansi"}] * 3)
        envs.reset(seed=7)
        assert envs.render_mode == "ansi"
        assert envs.metadata["speed"] == 7
        assert envs.metadata["autoreset_mode"] is AutoresetMode.NEXT_STEP
        assert envs.render() == ("7/0", "8/0", "9/0")
        assert envs.get_attr("length") == (9, 9, 9)
        envs.set_attr("length", [1, 2, 3])
        envs.set_attr("step_s", 0.0)
        assert envs.get_attr("length") == (1, 2, 3)
        with pytest.raises(EnvError, match=r"env 0 .*AttributeError"):
            envs.get_attr("no_such_thing")
        with pytest.raises(ValueError, match="expected 3 values"):
            envs.set_attr("length", [1])
        assert envs.step(np.zeros(3, int))[2].tolist() == [True, False, False]

    def test_options_seeds_and_masks(self, make: MakeVec) -> None:
        envs = make([Counter] * 3)
        obs, infos = envs.reset(seed=[4, None, 6], options={"level": 2})
        assert obs[:, 0].tolist() == [4, -1, 6]
        assert infos["options"]["level"].tolist() == [2, 2, 2]
        mask = np.array([False, True, False])
        obs, _ = envs.reset(seed=20, options={"reset_mask": mask})
        assert obs.tolist() == [[4, 1, 0], [21, 2, 0], [6, 1, 0]]
        for wrong in ({"reset_mask": [True] * 3}, {"reset_mask": np.zeros(3, int)}):
            with pytest.raises(TypeError, match="reset_mask"):
                envs.reset(options=wrong)
        for mask in (np.zeros(3, bool), np.ones(2, bool)):
            with pytest.raises(ValueError, match="reset_mask"):
                envs.reset(options={"reset_mask": mask})
        for seed, error in ((1.5, UsageError), ([1, 2], ValueError), (-1, ValueError), (True, UsageError)):
            with pytest.raises(error):
                envs.reset(seed=seed)
        assert envs.reset(seed=1)[0][:, 0].tolist() == [1, 2, 3]

    def test_every_env_is_told_its_index_whatever_is_done_with_it(self, make: MakeVec) -> None:
        class Knows(Counter):
            def _index(self) -> Any:
                info = muster.get_worker_info()
                assert info is not None
                return info.env_index

            def reset(self, **given: Any) -> Any:
                obs, _ = super().reset(**given)
                return obs, {"in_reset": self._index()}

            def step(self, action: Any) -> Any:
                return (*super().step(action)[:4], {"in_step": self._index()})

            def called(self) -> Any:
                return self._index()

        envs = make([Knows] * 3)
        assert envs.reset(seed=0)[1]["in_reset"].tolist() == [0, 1, 2]
        assert envs.step(np.zeros(3, int))[4]["in_step"].tolist() == [0, 1, 2]
        assert envs.call("called") == (0, 1, 2)
        assert envs.call(lambda env, index, x, y=0: (index, x, y), 5, y=6) == ((0, 5, 6), (1, 5, 6), (2, 5, 6))
        assert muster.get_worker_info() is None

    def test_foreign_byte_order_is_understood(self, make: MakeVec) -> None:
        factory = functools.partial(Constant, ">f4", (0.5, -1))
        assert make([factory] * 2).reset()[0].tolist() == [[0.5, -1], [0.5, -1]]

    def test_harmless_casts_are_made(self, make: MakeVec) -> None:
        for obs in ([1, 2, 3], np.arange(3), np.ones(3), np.ones(3, np.float16), (True, False, True)):
            envs = make([functools.partial(Returning, obs=obs)] * 2)
            envs.reset()
            envs.step(np.zeros(2, int))
            got = envs.step(np.zeros(2, int))[0]
            assert got.dtype == np.float32
            assert got[0].tolist() == list(obs)

    def test_results_may_be_lists(self, make: MakeVec) -> None:
        class Lists(Counter):
            def reset(self, **given: Any) -> Any:
                return list(super().reset(**given))

            def step(self, action: Any) -> Any:
                return list(super().step(action))

        same_run(make([Lists] * 2), SyncVectorEnv([Counter] * 2), 6)

    def test_bounds_may_differ_where_asked_for(self, make: MakeVec) -> None:
        def other() -> gym.Env[Any, Any]:
            env = Counter()
            env.observation_space = spaces.Box(-5, 5, (3,), np.float64)
            return env

        envs = make([Counter, other], observation_mode="different")
        assert envs.observation_space.high[:, 0].tolist() == [1e9, 5]

    def test_wrappers_are_applied_in_order(self, make: MakeVec) -> None:
        wrappers = (gym.wrappers.FlattenObservation, functools.partial(gym.wrappers.TimeLimit, max_episode_steps=2))
        envs = make("CartPole-v1", 2, wrappers=wrappers)
        envs.reset(seed=0)
        envs.step(np.zeros(2, int))
        assert envs.step(np.zeros(2, int))[3].tolist() == [True, True]

    def test_record_video_films_the_envs(self, make: MakeVec, tmp_path: Path) -> None:
        pytest.importorskip("moviepy")
        # pygame loads surfarray at its first use, in CartPole's render: two threads at once would find it half loaded.
        assert hasattr(pytest.importorskip("pygame").surfarray, "pixels3d")
        envs: Any = make("CartPole-v1", 2, env_kwargs={"render_mode": "rgb_array"})
        folder = tmp_path / "films"
        envs = gym.wrappers.vector.RecordVideo(envs, str(folder), step_trigger=lambda step: step == 0, video_length=5)
        envs.reset(seed=1)
        for _ in range(8):
            envs.step(envs.action_space.sample())
        envs.close()
        assert [path.suffix for path in folder.iterdir()] == [".mp4"]

    def test_gymnasiums_vector_wrappers_work(self, make: MakeVec) -> None:
        envs: Any = make("CartPole-v1", 3)
        envs = gym.wrappers.vector.RecordEpisodeStatistics(envs)
        envs = gym.wrappers.vector.NormalizeObservation(envs)
        envs = gym.wrappers.vector.ClipReward(envs, -1, 1)
        envs.reset(seed=1)
        envs.action_space.seed(1)
        episodes = []
        for _ in range(60):
            infos = envs.step(envs.action_space.sample())[4]
            if "episode" in infos:
                episodes += infos["episode"]["l"][infos["_episode"]].tolist()
        assert len(episodes) >= 3
        assert min(episodes) > 5
