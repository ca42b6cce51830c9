"""What is said while a run's envs are opened."""

from __future__ import annotations

import io
import re
import threading
from typing import Any

import pytest
from rich.console import Console

from muster.algorithms import PPOConfig
from muster.pool import notices
from muster.training import run_envs
from muster.training.plan import TrainingPlan
from muster.training.run_envs import open_run_envs, start_run_envs


def plan_of(env: str = "CartPole-v1", num_envs: int = 3, **options: Any) -> TrainingPlan:
    return TrainingPlan(env, PPOConfig(num_envs=num_envs), "numbers", options=options)


class Written(io.StringIO):
    """A file that says when something is written into it."""

    def __init__(self) -> None:
        super().__init__()
        self.event = threading.Event()

    def write(self, text: str) -> int:
        self.event.set()
        return super().write(text)


@pytest.fixture
def file(monkeypatch: pytest.MonkeyPatch) -> Written:
    """A file that the opening of envs waits for."""
    file = Written()

    def slow(*args: Any, **options: Any) -> Any:
        assert file.event.wait(20)
        return open_run_envs(*args, **options)

    monkeypatch.setattr(run_envs, "open_run_envs", slow)
    monkeypatch.setattr(run_envs, "SAID_AFTER_S", 0.01)
    return file


def test_a_pipe_gets_a_line(file: Written):
    start_run_envs(plan_of(num_envs=8, backend="thread", num_workers=2), Console(file=file)).close()
    assert file.getvalue() == "starting 8 envs\n"


def test_a_terminal_shows_it_until_the_envs_are_there(file: Written):
    terminal = Console(file=file, force_terminal=True, width=80)
    start_run_envs(plan_of(backend="serial"), terminal, 1).close()
    assert "starting 1 env" in file.getvalue()
    assert "workers" not in file.getvalue()
    assert re.search(r"\x1b\[2K[^\w]*$", file.getvalue().rpartition("starting")[2])  # the line is erased


def test_what_is_quick_is_not_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_envs, "SAID_AFTER_S", 60.0)
    output = io.StringIO()
    start_run_envs(plan_of(backend="serial"), Console(file=output)).close()
    assert output.getvalue() == ""
    assert not any(isinstance(thread, threading.Timer) for thread in threading.enumerate())


def test_it_is_not_said_twice(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    monkeypatch.setattr(notices, "_has_terminal", lambda: True)
    monkeypatch.setattr(notices, "_QUICK_S", 0.0)
    open_run_envs(plan_of(), 1).close()
    assert "starting 1 env in 1 process" in capfd.readouterr().err
    start_run_envs(plan_of(), Console(file=io.StringIO()), 1).close()
    assert capfd.readouterr().err == ""
