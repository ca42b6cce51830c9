"""A run that this user has made may name a module by an env's id; nobody else's run may."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from command import muster
from muster.training.own_runs import is_own, seal_of

MODULE = """
import gymnasium as gym
gym.register("Mine-v0", "gymnasium.envs.classic_control:CartPoleEnv", max_episode_steps=20)
"""
SHORT = ("--total-steps", "16", "--num-envs", "2", "--num-steps", "8", "--num-minibatches", "1", "--num-workers", "1")


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which this user's key is."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state"


def sealed(**config: Any) -> dict[str, Any]:
    return {**config, "with": {"seal": seal_of(config)}}


def test_a_run_of_ones_own_goes_on_and_is_evaluated(tmp_path: Path, state: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "own_run_envs.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert muster("train", "own_run_envs:Mine-v0", *SHORT, "--run-dir", "r").exit_code == 0
    assert "own_run_envs" not in sys.modules  # workers alone have imported it
    resumed = muster("train", "--resume", "r", "--total-steps", "32")
    assert resumed.exit_code == 0, resumed.output
    config = json.loads((tmp_path / "r" / "config.json").read_text())
    (tmp_path / "r" / "config.json").write_text(json.dumps({**config, "env_kwargs": {"render_mode": None}}))
    edited = muster("eval", "r")
    assert edited.exit_code == 1
    assert "Pass --trust" in edited.stderr


def test_another_key_and_another_content_are_nobodys_own(state: Path, monkeypatch: pytest.MonkeyPatch):
    config = sealed(env="a:B-v0", env_kwargs={"size": 5}, wrappers=[], make_vec={})
    assert is_own(json.loads(json.dumps(config)))
    assert (state / "muster" / "run_key").stat().st_mode & 0o077 == 0
    for changed in (
        {"env": "c:B-v0"},
        {"env_kwargs": {"size": 6}},
        {"with": {}},
        {"with": None},
        {"with": {"seal": 3}},
    ):
        assert not is_own({**config, **changed})
    monkeypatch.setenv("XDG_STATE_HOME", str(state / "other"))
    assert not is_own(config)


def test_without_a_place_for_a_key_no_run_is_ones_own(state: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/none")
    config = sealed(env="a:B-v0")
    assert config["with"]["seal"] == ""
    assert not is_own(config)


def test_runs_that_begin_at_once_share_the_key(state: Path):
    with ThreadPoolExecutor(8) as threads:
        seals = set(threads.map(lambda _: seal_of({"env": "a:B-v0"}), range(64)))
    assert len(seals) == 1
    assert [path.name for path in (state / "muster").iterdir()] == ["run_key"]
