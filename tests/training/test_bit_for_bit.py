"""Runs that go on as if they had never been interrupted: checkpoints, metrics and episodes are the same."""

from __future__ import annotations

import csv
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import muster as package
import programs
from command import muster
from muster.training.checkpoints import read_checkpoint
from muster.training.run_folder import BEST, CHECKPOINT
from slow import slow

SIZE: dict[str, Any] = {"num_envs": 4, "num_steps": 32, "total_steps": 1024, "seed": 1, "update_epochs": 1}
SIZE |= {"eval_every": 512, "eval_episodes": 2}
TIMES = ("seconds", "steps_per_second", "share_")  # of metrics.csv


class Masked(gym.Env[Any, Any]):
    """Draws observations, masks and ends."""

    observation_space = spaces.Dict(x=spaces.Box(-1, 1, (3,), np.float32), action_mask=spaces.MultiBinary(4))
    action_space = spaces.Discrete(4)

    def see(self) -> Any:
        mask = (self.np_random.random(4) < 0.5).astype(np.int8)
        mask[self.np_random.integers(4)] = 1
        return {"x": self.np_random.uniform(-1, 1, 3).astype(np.float32), "action_mask": mask}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.t = 0
        return self.see(), {}

    def step(self, action: Any) -> Any:
        self.t += 1
        return self.see(), float(action == self.t % 4), bool(self.np_random.random() < 0.03), False, {}


def rows_of(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open(newline="") as file:
        return [{k: v for k, v in row.items() if not k.startswith(TIMES)} for row in csv.DictReader(file)]


def assert_same(one: Path, other: Path) -> None:
    assert rows_of(one) == rows_of(other)
    for name in (CHECKPOINT, BEST):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "CartPole": ("CartPole-v1", {"num_workers": 1}, {"num_workers": 2}),
    "memory and masks": (Masked, {"policy": "gru", "backend": "serial"}, {"backend": "thread"}),
    "collectors": ("CartPole-v1", {"num_collectors": 2}, {}),
    "agents": ("pettingzoo/mpe/simple_spread_v3", {}, {"backend": "serial"}),
}


def stopping(after: int) -> Any:
    """A callback that ends a run after so many iterations."""
    left = iter(range(after)[::-1])
    return lambda row: bool(next(left))


@pytest.mark.parametrize("case", [*list(CASES)[:2], *slow(*list(CASES)[2:])])
def test_a_run_that_was_stopped_goes_on_bit_for_bit(case: str, tmp_path: Path) -> None:
    env, options, others = CASES[case]
    if "pettingzoo" in str(env):
        pytest.importorskip("mpe2")
    whole = package.train(env, {**SIZE, **options}, run_dir=tmp_path / "whole").path
    cut = tmp_path / "cut"
    given = {} if isinstance(env, str) else {"env": env}
    package.train(env, {**SIZE, **options}, run_dir=cut, callback=stopping(3))
    package.train(**given, resume=cut, callback=stopping(2), **others)
    package.train(**given, resume=cut, **others)
    assert_same(whole, cut)


@pytest.mark.parametrize("kills", [2, *slow(10)])
def test_a_run_that_was_killed_goes_on_bit_for_bit(kills: int, tmp_path: Path) -> None:
    words = ["train", "CartPole-v1", *(f"--{name.replace('_', '-')}={value}" for name, value in SIZE.items())]
    words += ["--checkpoint-every=128", "--total-steps=4096"]
    assert muster(*words, f"--run-dir={tmp_path / 'whole'}").exit_code == 0
    killed = tmp_path / "killed"
    words += [f"--run-dir={killed}"]
    for kill in range(kills):
        started = programs.start(
            "-c", "from muster.cli import main; main()", *words, imports=programs.TORCH, stdout=subprocess.DEVNULL
        )
        before = steps_in(killed)
        while steps_in(killed) < before + 300 * (kill + 1) / kills and started.poll() is None:
            time.sleep(0.01)
        started.send_signal(signal.SIGKILL)
        started.wait()
        words = ["train", f"--resume={killed}"]
    assert muster(*words).exit_code == 0
    assert_same(tmp_path / "whole", killed)


def steps_in(run: Path) -> int:
    return int(read_checkpoint(run)["steps"]) if (run / CHECKPOINT).exists() else 0


def test_envs_that_cannot_be_played_again_are_said_and_begin_new_episodes(tmp_path: Path, capsys: Any) -> None:
    wrapper = gym.wrappers.NormalizeObservation
    run = package.train("CartPole-v1", {**SIZE, "total_steps": 256}, wrappers=[wrapper], run_dir=tmp_path / "r").path
    said = capsys.readouterr().out
    assert "A resumed run will begin new episodes: env 0 did not come to step" in said
    assert "envs" not in read_checkpoint(run)["collector"]
    package.train("CartPole-v1", {**SIZE, "total_steps": 256, "replayable": False}, run_dir=tmp_path / "off")
    said = capsys.readouterr().out
    assert "plays their episodes again" not in said
    assert "new episodes" not in said
    package.train("CartPole-v1", {**SIZE, "total_steps": 256}, run_dir=tmp_path / "on")
    assert "--no-replayable" in capsys.readouterr().out
    resumed = muster("train", f"--resume={tmp_path / 'on'}", "--total-steps=384", "--no-replayable")
    assert (resumed.exit_code, package.train(resume=tmp_path / "on", total_steps=512).policy.steps) == (0, 512)
    assert "This checkpoint has no states of envs" not in resumed.output


def test_another_env_of_the_same_name_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = "import gymnasium\n\ndef make():\n    return gymnasium.make('CartPole-v1'{})\n"
    (tmp_path / "another_namesake.py").write_text(text.format(""))
    words = [f"--{name.replace('_', '-')}={value}" for name, value in SIZE.items()]
    assert muster("train", "another_namesake.py:make", *words, "--run-dir=run").exit_code == 0
    (tmp_path / "another_namesake.py").write_text(text.format(").unwrapped.__class__(sutton_barto_reward=True"))
    resumed = muster("train", "--resume=run", "--trust", "--total-steps=2048")
    assert resumed.exit_code == 0  # it has the same spaces and arguments, and each env differs
    assert resumed.output.count("begin new episodes") == 1
