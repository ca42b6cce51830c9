"""The same run by several seeds: folders, the picture, the line at the end, and how all of it ends early."""

from __future__ import annotations

import csv
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from command import muster
from muster.training.checkpoints import read_checkpoint
from muster.training.comparison import interquartile_mean

OPTIONS = ("--backend=serial", "--num-envs=4", "--num-steps=32", "--num-minibatches=1", "--update-epochs=1")


def last_return(run: Path) -> float:
    with (run / "metrics.csv").open(newline="") as file:
        return float(list(csv.DictReader(file))[-1]["mean_return"])


def test_each_seed_is_a_run_of_its_own(tmp_path: Path):
    words = ("CartPole-v1", "--total-steps=256", *OPTIONS)
    result = muster("train", *words, "--seed=3", "--seeds=4", "--run-dir", str(tmp_path / "all"))
    assert result.exit_code == 0, result.output
    folders = [tmp_path / "all" / f"seed{seed}" for seed in range(3, 7)]
    assert [json.loads((folder / "config.json").read_text())["seed"] for folder in folders] == [3, 4, 5, 6]
    mean = interquartile_mean(np.array([last_return(folder) for folder in folders]))
    assert re.search(rf"seeds  {mean:,.1f} is the interquartile mean .* of 4, [\d.]+ to [\d.]+ its 95 %", result.output)
    assert imread(tmp_path / "all" / "comparison.png").ndim == 3
    assert muster("train", *words, "--seed=4", "--run-dir", str(tmp_path / "alone")).exit_code == 0
    alone, among = (read_checkpoint(run) for run in (tmp_path / "alone", folders[1]))
    assert all(torch.equal(alone["policy"][name], one) for name, one in among["policy"].items())


STOPPING = """
import os, signal
from gymnasium.envs.classic_control import CartPoleEnv

class Stopping(CartPoleEnv):
    made = steps = 0
    def __init__(self):
        super().__init__()
        Stopping.made += 1
        self.number = Stopping.made
        if {when!r} == "opening" and self.number == {number}:  # the first is looked at, the second trained on
            os.kill(os.getpid(), signal.SIGTERM)
    def step(self, action):
        self.steps += 1
        if {when!r} == "training" and self.number == {number} and self.steps == 200:
            os.kill(os.getpid(), signal.SIGTERM)
        obs, reward, terminated, _, infos = super().step(action)
        return obs, reward, terminated, self.steps % 100 == 0, infos
"""


@pytest.mark.parametrize(
    ("when", "number", "words", "left"),
    [
        pytest.param("opening", 3, (), ["seed0"], marks=pytest.mark.slow),
        pytest.param(  # those for evaluations
            "opening", 5, ("--eval-every=256", "--eval-episodes=1"), ["seed0"], marks=pytest.mark.slow
        ),
        ("training", 3, (), ["seed0", "seed1"]),
    ],
)
def test_a_signal_ends_all_and_what_there_is_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str, number: int, words: tuple[str, ...], left: list[str]
):
    (tmp_path / "stopping.py").write_text(STOPPING.format(when=when, number=number))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "stopping", raising=False)
    runs = tmp_path / "runs"
    result = muster("train", "stopping:Stopping", "--backend=serial", "--num-envs=1", "--num-steps=128",
                    "--total-steps=256", "--seeds=3", "--run-dir", str(runs), *words)  # fmt: skip
    assert result.exit_code == 143, result.output
    assert "topped by SIGTERM" in result.output
    assert sorted(folder.name for folder in runs.iterdir() if folder.is_dir()) == left
    assert f"last mean returns of {len(left)}," in result.output
    assert (runs / "comparison.png").exists()


def test_mistakes_are_one_line(tmp_path: Path):
    for seed in (0, 1):  # as those are that were killed at their start
        (tmp_path / f"seed{seed}").mkdir()
        (tmp_path / f"seed{seed}" / "metrics.csv").touch()
    (tmp_path / "seed1" / "best.safetensors").touch()
    result = muster("train", "CartPole-v1", *OPTIONS, "--seeds=2", "--run-dir", str(tmp_path))
    assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1), result.stderr
    assert "seed1 already holds a run; choose another run folder" in result.stderr
    assert sorted(path.name for path in tmp_path.rglob("*.*")) == ["best.safetensors", "metrics.csv", "metrics.csv"]
    again = muster("train", "CartPole-v1", *OPTIONS, "--total-steps=128", "--seeds=1", "--run-dir", str(tmp_path))
    assert again.exit_code == 0, again.output
    run = str(tmp_path / "run")
    assert muster("train", "CartPole-v1", *OPTIONS, "--total-steps=128", "--run-dir", run).exit_code == 0
    result = muster("train", "--resume", run, "--total-steps=256", "--seeds=2")
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
    assert "--seeds must be left out with resume, which goes on with a single run, got 2" in result.stderr
