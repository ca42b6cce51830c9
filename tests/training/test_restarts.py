"""Envs that fail in a run that restarts them: what is said of it."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console

from command import muster
from muster.rollout.storage import Loss
from muster.training.restarts import say_restarts

FAILING = """
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv

class Failing(CartPoleEnv):
    taken = 0
    def step(self, action):
        self.taken += 1
        if self.taken == 20:
            raise RuntimeError("[the motor] is stuck\\nand smokes")
        self.state = np.zeros(4)  # no episode ends by itself
        return super().step(action)

class Ending(Failing):
    def step(self, action):
        obs, reward, _, truncated, infos = super().step(action)
        return obs, reward, self.taken % 15 == 0, truncated, infos
"""


def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, env: str, *words: str) -> list[str]:
    (tmp_path / "failing.py").write_text(FAILING)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "failing", raising=False)
    result = muster("train", f"failing:{env}", "--backend=thread", "--num-workers=1", "--on-failure=restart",
                    "--num-steps=16", "--num-minibatches=1", "--run-dir", str(tmp_path / "run"), *words)  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "Warning" not in result.output
    return [line for line in result.stdout.splitlines() if re.search(r"restarted at step|restarts? of envs", line)]


def test_each_restart_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    lines = train(tmp_path, monkeypatch, "Failing", "--num-envs=2", "--total-steps=48")
    # Step 19 of each env, of 2.
    assert lines == [f"env {env} was restarted at step 38: RuntimeError: [the motor] is stuck" for env in (0, 1)]


def test_restarts_in_an_evaluation_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    words = ("--num-envs=1", "--total-steps=16", "--eval-every=16", "--eval-episodes=1")
    (line,) = train(tmp_path, monkeypatch, "Ending", *words)
    assert re.fullmatch(r"\d+ restarts? of envs in the evaluation at step 16", line)


def test_those_beyond_the_fifth_of_a_rollout_are_counted():
    output = io.StringIO()
    losses = [Loss(3, env, "RuntimeError: x") for env in range(8)]
    say_restarts(losses, Console(file=output), begun_at=12_768, num_envs=8)
    lines = output.getvalue().splitlines()
    assert lines[:5] == [f"env {env} was restarted at step 12,792: RuntimeError: x" for env in range(5)]
    assert lines[5:] == ["3 more restarts of envs until step 12,800"]
