"""Runs that begin with what another run has learnt: weights and statistics, and nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

import muster
from command import muster as command
from muster.errors import ConfigError
from muster.training.checkpoints import read_checkpoint

SMALL: dict[str, Any] = {"backend": "serial", "num_envs": 2, "num_steps": 16, "num_minibatches": 1, "update_epochs": 1}
WORDS = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]


class Wide(gym.Env[Any, Any]):
    """Ends at once. Its Boxes have bounds of the caller's."""

    def __init__(self, bound: float = 1.0, actions: int = 2) -> None:
        self.observation_space = spaces.Box(-bound, bound, (3,), np.float32)
        self.action_space = spaces.Discrete(actions)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return self.np_random.random(3, np.float32), {}

    def step(self, action: Any) -> Any:
        return self.np_random.random(3, np.float32), 1.0, True, False, {}


def train(folder: Path, env: Any = Wide, **options: Any) -> Any:
    options = {"total_steps": 64, "normalize_observations": True, **SMALL, **options}
    return muster.train(env, run_dir=folder, **options)


def state_of(run: Path) -> dict[str, Any]:
    return read_checkpoint(run)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("runs") / "other", hidden_sizes=(8, 8), seed=5).path


def test_weights_and_statistics_are_taken_and_all_else_begins_anew(
    other: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    def stopped(row: dict[str, float]) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(
            tmp_path / "run", init_from=other, env_kwargs={"bound": 9.0}, hidden_sizes=(8, 8), learning_rate=1e-30,
            anneal_lr=False, total_steps=96, callback=stopped,
        )  # fmt: skip
    assert f"begins with the weights and statistics of {other}\n" in capsys.readouterr().out
    taken, begun = state_of(other), state_of(tmp_path / "run")
    for name, weights in taken["policy"].items():
        torch.testing.assert_close(begun["policy"][name], weights, rtol=0, atol=1e-20)
    assert begun["normalizers"]["observations"]["count"] == taken["normalizers"]["observations"]["count"] + 32
    assert begun["steps"] == 32
    assert {one["step"].item() for one in begun["optimizer"]["state"].values()} == {1}
    moved = Path(shutil.move(other, other.with_name("away")))
    try:
        resumed = muster.train(Wide, resume=tmp_path / "run")
        assert resumed.metrics["steps"][-1] == 96
    finally:
        moved.rename(other)


def test_a_run_that_ends_before_its_first_step_is_resumed_from_there(other: Path, tmp_path: Path):
    with pytest.raises(ModuleNotFoundError, match="no_such_logger"):
        train(tmp_path / "run", init_from=other, hidden_sizes=(8, 8), log=["csv", "no_such_logger:log"])
    assert state_of(tmp_path / "run")["steps"] == 0
    run = muster.train(Wide, resume=tmp_path / "run", log=["csv"], learning_rate=1e-30)
    weights = state_of(run.path)["policy"]["actor.0.weight"]
    torch.testing.assert_close(weights, state_of(other)["policy"]["actor.0.weight"], rtol=0, atol=1e-20)


def test_what_does_not_fit_is_named_in_one_line(other: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    train(tmp_path / "run", init_from=str(other), hidden_sizes=(8, 4), total_steps=32)
    said = capsys.readouterr().out.replace("\n", " ")
    assert "; these begin anew: policy.actor.2.weight, policy.actor.2.bias, policy.actor.4.weight, policy." in said
    assert "policy.actor.0.weight" not in said


def test_agents_take_what_fits_by_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    options: dict[str, Any] = {"env_kwargs": {"N": 2}, "total_steps": 32, "normalize_observations": True, **SMALL}
    env = "pettingzoo/mpe/simple_spread_v3"
    other = muster.train(env, run_dir=tmp_path / "other", **options).path
    capsys.readouterr()
    own = muster.train(env, run_dir=tmp_path / "own", init_from=other, seed=1, share_params=True, **options).path
    assert f"statistics of {other}\n" in capsys.readouterr().out
    counts = [state_of(run)["normalizers"]["agent"]["count"] for run in (other, own)]
    assert counts[1] == 2 * counts[0]


@pytest.mark.parametrize("name", ["other space", "other choices", "no run", "no folder", "no checkpoint", "resume"])
def test_what_cannot_be_begun_from_is_refused_in_one_line(other: Path, tmp_path: Path, name: str):
    env, options, origin, said = Wide, {}, other, ""
    if name == "other space":
        env, said = "CartPole-v1", f"and Discrete(2), got '{other}, of Box(-1.0, 1.0, (3,), float32) and Discrete(2)'"
    elif name == "other choices":
        options, said = {"env_kwargs": {"actions": 5}}, "float32) and Discrete(5), got"
    elif name == "no run":
        origin, said = tmp_path, "holds no run: it has no config.json"
    elif name == "no folder":
        origin, said = tmp_path / "none", "holds no run: it has no config.json"
    elif name == "no checkpoint":
        origin, said = Path(shutil.copytree(other, tmp_path / "early")), "has no checkpoint.safetensors"
        (origin / "checkpoint.safetensors").unlink()
    elif name == "resume":
        run = train(tmp_path / "run", total_steps=32).path
        with pytest.raises(ConfigError, match="init_from must be None, which the run in .* has settled"):
            muster.train(Wide, resume=run, total_steps=64, init_from=other)
        return
    with pytest.raises(ConfigError) as caught:
        train(tmp_path / "run", env, init_from=origin, **options)
    assert said in str(caught.value)
    assert "init_from" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_shell_has_the_option(tmp_path: Path):
    first, second = tmp_path / "first", tmp_path / "second"
    line = ("train", "CartPole-v1", *WORDS, "--total-steps=32")
    assert command(*line, "--run-dir", str(first)).exit_code == 0
    again = (*line, "--run-dir", str(second), "--init-from", str(first), "--resume-or-begin")
    result = command(*again)
    assert (result.exit_code, f"statistics of {first}" in result.stdout) == (0, True), result.output
    assert json.loads((second / "config.json").read_text())["run"]["init_from"] == str(first)
    assert command(*again).exit_code == 0  # the same line, once there is a run
    own_run = ("--resume", str(second), "--init-from", str(tmp_path))
    other_space = ("Acrobot-v1", *WORDS, "--run-dir", str(tmp_path / "third"), "--init-from", str(first))
    for words in (own_run, other_space):
        result = command("train", *words, "--total-steps=64")
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output
