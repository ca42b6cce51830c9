"""``on_failure="replay"``: failed steps come as if nothing had happened."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.wrappers import NormalizeObservation

import muster
from envs import Scripted
from muster.errors import ConfigError, WorkerError
from processes import kill_worker
from slow import slow

REPLAY: dict[str, Any] = {"on_failure": "replay", "max_restarts": 10**6}


class Drawn(Scripted):
    """Draws its rows. `Scripted` says when it fails."""

    observation_space = spaces.Box(0, 1, (3,), np.float64)

    def __init__(self, **script: Any) -> None:
        super().__init__(**script)
        self.observation_space = spaces.Box(0, 1, (3,), np.float64)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        return self.np_random.random(3), {}

    def step(self, action: Any) -> Any:
        super().step(action)
        return self.np_random.random(3), float(action), bool(self.np_random.random() < 0.05), False, {}


def play(envs: Any, steps: int) -> tuple[list[Any], int, list[str]]:
    """All rows, how often a step was played again, and the reasons of restarts."""
    rows, replayed, reasons, actions = [envs.reset(seed=3)[0]], 0, list[str](), np.random.default_rng(0)
    for step in range(steps):
        time.sleep(0.001 * (step % 8 == 0))
        *row, infos = envs.step(actions.integers(0, 2, envs.num_envs))
        rows.append(row)
        replayed += int(infos.get("_replayed", np.zeros(1)).sum())
        reasons += [one for one in infos.get("restarted", ()) if one]
        ended = row[2] | row[3]
        if envs.metadata["autoreset_mode"] is gym.vector.AutoresetMode.DISABLED and ended.any():
            rows.append(envs.reset(options={"reset_mask": ended})[0])
    return rows, replayed, reasons


def serial(env: Any, num_envs: int, steps: int, **options: Any) -> list[Any]:
    with muster.make_vec(env, num_envs, backend="serial", replayable=True, **options) as envs:
        return play(envs, steps)[0]


def assert_same(rows: list[Any], expected: list[Any]) -> None:
    for row, other in itertools.zip_longest(rows, expected):
        for one, of_other in zip(row, other, strict=True):
            np.testing.assert_array_equal(one, of_other)


@pytest.mark.parametrize("mode", ["next_step", "same_step", "disabled"])
@pytest.mark.parametrize("count", [(6, 2), *slow((4, 4), (16, 4))])
def test_a_killer_changes_no_row(count: tuple[int, int], mode: str) -> None:
    num_envs, workers = count
    expected = serial("CartPole-v1", num_envs, 1500, autoreset_mode=mode)
    ended, moments = threading.Event(), np.random.default_rng(1)
    with muster.make_vec("CartPole-v1", num_envs, num_workers=workers, autoreset_mode=mode, **REPLAY) as envs:

        def kill() -> None:
            while not ended.wait(moments.uniform(0.01, 0.1)):
                with contextlib.suppress(TypeError):  # one that is just being replaced
                    kill_worker(envs, int(moments.integers(workers)))

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            rows, replayed, reasons = play(envs, 1500)
        finally:
            ended.set()
            killer.join()
    assert_same(rows, expected)
    assert replayed
    assert not reasons


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ({"raises_at": 20}, {}),
        ({"raises_at": 20}, {"backend": "serial"}),
        ({"raises_at": 20}, {"one_env_per_process": True}),
        ({"raises_at": "reset"}, {}),
        ({"dies_at": 20}, {"num_workers": 1}),
        ({"hangs_at": 20}, {"step_timeout": 1.0}),
    ],
)
def test_a_step_that_fails_once_is_played_again(script: Any, options: Any, tmp_path: Any) -> None:
    expected = serial(Drawn, 2, 60)
    kwargs = {**script, "env": 1, "once": str(tmp_path / "once")}
    with muster.make_vec(Drawn, 2, env_kwargs=kwargs, **REPLAY, **options) as envs:
        envs.set_attr("length", 10**5)
        rows, replayed, reasons = play(envs, 60)
        assert envs.call(lambda env, index: env.length) == (10**5, 10**5)
        state = envs.get_states()[1]
        envs.set_states([state], [1])
    assert_same(rows, expected)
    assert (replayed > 0, reasons) == (script.get("raises_at") != "reset", [])


def test_what_fails_again_is_a_restart() -> None:
    with muster.make_vec(Drawn, 2, env_kwargs={"raises_at": 20, "env": 1}, **REPLAY) as envs:
        _, replayed, reasons = play(envs, 60)
    assert replayed == 0
    assert "played again, ValueError" in reasons[0]


def test_an_env_that_does_not_come_to_its_state_is_a_restart() -> None:
    with muster.make_vec("CartPole-v1", 2, num_workers=2, wrappers=[NormalizeObservation], **REPLAY) as envs:
        play(envs, 100)
        kill_worker(envs, 0)
        *_, truncated, infos = envs.step([0, 0])
    assert truncated.tolist() == [True, False]
    assert "ReplayDiffers: env 0 did not come to step" in infos["restarted"][0]


class Words(gym.Env[Any, Any]):
    """Observes texts, with an object in its infos."""

    observation_space, action_space = spaces.Text(9), spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.t = 0
        return "0", {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return str(self.t), 0.0, self.t == 4, False, {"seen": {self.t}}


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
def test_texts_and_objects_are_those_of_the_step(mode: str) -> None:
    with muster.make_vec(Words, 1, num_workers=1, autoreset_mode=mode, **REPLAY) as envs:
        envs.reset(seed=0)
        for t in range(1, 5):
            kill_worker(envs, 0)
            obs, *_, infos = envs.step([0])
            if mode == "same_step" and t == 4:
                assert (obs, infos["final_obs"][0], infos["final_info"]["seen"][0]) == (("0",), "4", {4})
            else:
                assert (obs, infos["seen"][0]) == ((str(t),), {t})


class Fragile(gym.Env[Any, Any]):
    """Cannot be reset with some seeds."""

    observation_space, action_space = spaces.Box(0, 1, (1,), np.float64), spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        if (drawn := self.np_random.random()) < 0.05:
            raise ValueError("no layout for this draw")
        return np.array([drawn]), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return np.array([self.np_random.random()]), 1.0, self.t == 5, False, {}


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
@pytest.mark.parametrize("on_failure", ["restart", "replay"])
def test_a_reset_that_fails_for_its_seed_is_followed_by_one_with_another(on_failure: str, mode: str) -> None:
    options: dict[str, Any] = {"on_failure": on_failure, "replayable": True, "max_restarts": 60, "autoreset_mode": mode}
    with muster.make_vec(Fragile, 2, num_workers=1, **options) as envs:
        play(envs, 600)
        assert envs.stats()["restarts"] > 3
        envs.set_states(envs.get_states())


def test_envs_that_differ_do_not_count_twice() -> None:
    options = {"on_failure": "replay", "wrappers": [NormalizeObservation], "num_workers": 1}
    with muster.make_vec("CartPole-v1", 12, **options) as envs:
        play(envs, 100)
        kill_worker(envs, 0)
        assert envs.step([0, 1] * 6)[3].sum() > 6


def test_failures_are_counted() -> None:
    options = {"on_failure": "replay", "max_restarts": 2, "env_kwargs": {"dies_at": 5}}
    with muster.make_vec(Drawn, 1, **options) as envs, pytest.raises(WorkerError, match="failed 3 times"):
        play(envs, 60)


def test_it_is_for_envs_that_have_states() -> None:
    with pytest.raises(ConfigError, match="on_failure must be one of 'raise', 'restart', 'replay'"):
        muster.make_vec("CartPole-v1", 1, on_failure="again")
    with pytest.raises(ConfigError, match="left out with concurrent"):
        muster.make_vec("CartPole-v1", 1, on_failure="replay", concurrent=True)
    with pytest.raises(ConfigError, match="with caller steps"):
        muster.make_vec("CartPole-v1", 2, on_failure="replay", caller_steps=True)
    pytest.importorskip("tensordict")
    with pytest.raises(ConfigError, match="on_failure must be"):
        muster.MultiCollector("CartPole-v1", None, num_collectors=1, frames_per_batch=1, on_failure="replay")
