"""What is printed while a policy trains, also of envs that are restarted."""

from __future__ import annotations

import csv
import io
import math
import re
import sys
from pathlib import Path

import pytest
from rich.console import Console

from command import muster
from muster.rollout.storage import Loss
from muster.training import console as console_module
from muster.training.console import TrainingDisplay, format_return, format_seconds, say_restarts


class Clock:
    """Stands in for ``time``; moves only when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(console_module, "time", clock)
    return clock


def test_a_file_gets_a_plain_line_every_10_seconds(clock: Clock):
    output = io.StringIO()
    with TrainingDisplay(Console(file=output, width=80), total_steps=100_000) as display:
        for second in range(1, 26):
            clock.now = second
            display.update(second * 1000, mean_return=20.25)
    lines = [" ".join(line.split()) for line in output.getvalue().splitlines()]
    assert lines == [
        "10,000/100,000 steps 1,000 steps/s return 20.2 1 min 30 s left",
        "20,000/100,000 steps 1,000 steps/s return 20.2 1 min 20 s left",
    ]


def test_a_terminal_sees_every_update_within_its_width(clock: Clock):
    output = io.StringIO()
    terminal = Console(file=output, width=80, force_terminal=True, color_system=None)
    with TrainingDisplay(terminal, total_steps=10_000_000) as display:
        clock.now = 1
        display.update(2048, mean_return=math.nan)
        clock.now = 2
        display.update(9_999_000, mean_return=-12345.6)
    drawn = output.getvalue()
    assert "2,048/10,000,000 steps" in drawn
    assert "none yet" in drawn
    assert "-12,345.6" in drawn
    assert "…" not in drawn


def test_speed_and_time_left_are_those_of_the_last_10_seconds(clock: Clock):
    output = io.StringIO()
    with TrainingDisplay(Console(file=output, width=80), total_steps=20_000) as display:
        for second in range(1, 31):
            clock.now = second
            display.update(second * 100 if second < 15 else 1400 + (second - 14) * 1000, mean_return=1.0)
    last = output.getvalue().splitlines()[-1]
    assert "17,400/20,000 steps" in last
    assert "1,000 steps/s" in last
    assert "3 s left" in last


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.6, "1 min 0 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")]
)
def test_seconds_in_words_and_returns_with_one_decimal(seconds: float, text: str):
    assert format_seconds(seconds) == text
    assert [format_return(value) for value in (1234.56, -1, math.nan)] == ["1,234.6", "-1.0", "none yet"]


def test_an_evaluation_is_shown_until_the_next(clock: Clock):
    output, terminal_output = io.StringIO(), io.StringIO()
    terminal = Console(file=terminal_output, width=80, force_terminal=True, color_system=None)
    with (
        TrainingDisplay(Console(file=output, width=80), 1_000_000) as plain,
        TrainingDisplay(terminal, 1_000_000) as live,
    ):
        for second, evaluated in ((10, 480.25), (20, None)):
            clock.now = second
            for display in (plain, live):
                display.update(second * 1000, 20.25, evaluated=evaluated)
    assert [re.search(r"return .*\)", line)[0].split() for line in output.getvalue().splitlines()] == [
        ["return", "20.2", "(eval", "480.2)"]
    ] * 2
    assert "(eval 480.2)" in terminal_output.getvalue()
    assert "…" not in terminal_output.getvalue()


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
    said = re.compile(r"restarted at step|restarts? of envs|^ *restarts ")
    return [line for line in result.stdout.splitlines() if said.search(line)]


def test_each_restart_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    *lines, last = train(tmp_path, monkeypatch, "Failing", "--num-envs=2", "--total-steps=48")
    # Step 19 of each env, of 2.
    assert lines == [f"env {env} was restarted at step 38: RuntimeError: [the motor] is stuck" for env in (0, 1)]
    assert last.split() == ["restarts", "2"]
    with (tmp_path / "run" / "metrics.csv").open(newline="") as file:
        assert [row["restarts"] for row in csv.DictReader(file)] == ["0", "2"]


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
