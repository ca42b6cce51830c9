"""Evaluations while a run trains: they change nothing, are seen, and the best state is kept."""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import muster as package
from command import muster
from muster.algorithms import PPO, PPOConfig
from muster.errors import UsageError
from muster.training import evaluations
from muster.training.checkpoints import packed, read_checkpoint
from muster.training.plan import RunOptions

OPTIONS = ("--backend=serial", "--num-envs=4", "--num-steps=32", "--num-minibatches=1", "--update-epochs=2")
EVALUATED = ("--eval-every=200", "--eval-episodes=2")


def train(run: Path, *words: str, env: str = "CartPole-v1") -> str:
    """What a run says whose rollouts have 128 rows."""
    result = muster("train", env, "--run-dir", str(run), "--learning-rate=0.01", *OPTIONS, *words)
    assert result.exit_code == 0, result.output
    return result.output


def metrics(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def evaluated(run: Path) -> dict[int, float]:
    return {int(row["steps"]): float(row["eval_return"]) for row in metrics(run) if row["eval_return"]}


def saved(run: Path, name: str = "checkpoint.safetensors") -> dict:
    return read_checkpoint(run, name)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "run"
    train(run, "--total-steps=1024", *EVALUATED)
    return run


C_INT = """
from gymnasium.envs.classic_control import CartPoleEnv

class CInt(CartPoleEnv):
    def reset(self, *, seed=None, options=None):
        if seed is not None and seed >= 2**31:
            raise OverflowError("signed integer is greater than maximum")
        return super().reset(seed=seed, options=options)
"""


def test_seeds_of_a_simulator_in_c_fit_into_an_int(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "simulator_in_c.py").write_text(C_INT)
    monkeypatch.syspath_prepend(tmp_path)
    train(tmp_path / "run", "--total-steps=128", "--eval-every=128", "--eval-episodes=4", env="simulator_in_c:CInt")
    assert len(evaluated(tmp_path / "run")) == 1


@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
def test_training_is_bit_for_bit_what_it_is_without(tmp_path: Path, env: str):
    words = ("--total-steps=512", "--normalize-observations", "--normalize-rewards")
    train(tmp_path / "with", *words, *EVALUATED, env=env)
    train(tmp_path / "without", *words, env=env)
    with_, without = (saved(tmp_path / name) for name in ("with", "without"))
    assert torch.equal(with_["minibatch_rng"], without["minibatch_rng"])
    assert all(torch.equal(with_["policy"][name], one) for name, one in without["policy"].items())
    rows, others = metrics(tmp_path / "with"), metrics(tmp_path / "without")
    left_out = {"seconds", "steps_per_second", "share_learning", "eval_return", "eval_length"}
    assert [{name: row[name] for name in row if name not in left_out} for row in rows] == [
        {name: row[name] for name in row if name not in left_out} for row in others
    ]
    assert "eval_return" not in others[0]
    assert len(evaluated(tmp_path / "with")) == 2


def test_csv_and_tensorboard_have_each_evaluation(run: Path):
    assert list(evaluated(run)) == [256, 512, 640, 896, 1024]
    events = EventAccumulator(str(run))
    events.Reload()
    shown = {event.step: event.value for event in events.Scalars("eval/mean_reward")}
    assert shown == pytest.approx(evaluated(run))
    assert [event.value for event in events.Scalars("eval/mean_ep_length")] == pytest.approx([*shown.values()])


def test_the_best_state_is_kept_and_told(tmp_path: Path):
    said = train(tmp_path / "run", "--total-steps=1024", *EVALUATED)
    every = evaluated(tmp_path / "run")
    best = max(every, key=lambda steps: every[steps])
    held = saved(tmp_path / "run", "best.safetensors")
    assert held["steps"] == best
    assert held["evaluation"]["mean_return"] == every[best]
    assert re.search(rf"best evaluation  {every[best]:.1f} at step {best:,}: .*best\.safetensors", said)
    result = muster("eval", str(tmp_path / "run"), "--episodes=1", "--checkpoint=best")
    assert f"PPO after {best:,} steps" in result.output


def test_a_run_that_goes_on_keeps_what_was_best(run: Path):
    held = saved(run, "best.safetensors")
    (run / "best.safetensors").write_bytes(packed({**held, "evaluation": {**held["evaluation"], "mean_return": 501.0}}))
    result = muster("train", "--resume", str(run), "--total-steps=1152", "--eval-every=64")
    assert result.exit_code == 0, result.output
    assert list(evaluated(run))[-2:] == [1024, 1152]
    assert saved(run, "best.safetensors")["steps"] == held["steps"]
    assert f"best evaluation  501.0 at step {held['steps']:,}" in result.output


def test_a_run_may_begin_and_stop_to_be_evaluated(tmp_path: Path):
    run = tmp_path / "run"
    train(run, "--total-steps=128")
    assert muster("train", "--resume", str(run), "--total-steps=256", *EVALUATED).exit_code == 0
    assert muster("train", "--resume", str(run), "--total-steps=512", "--eval-every=None").exit_code == 0
    assert [(row["steps"], bool(row["eval_return"])) for row in metrics(run)] == [
        ("128", False), ("256", True), ("384", False), ("512", False)
    ]  # fmt: skip


def test_an_evaluation_that_does_not_end_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(evaluations, "STEPS_PER_EPISODE", 50)  # those of Pendulum have 200
    said = train(tmp_path / "run", "--total-steps=256", *EVALUATED, env="Pendulum-v1")
    assert "evaluation at step 256 does not count: 2 of 2 episodes had not ended after 100 steps." in said
    assert evaluated(tmp_path / "run") == {}
    assert not (tmp_path / "run" / "best.safetensors").exists()


STOPPING = """
import os, signal
from gymnasium.envs.classic_control import CartPoleEnv

class Stopping(CartPoleEnv):
    made = 0
    def __init__(self):
        super().__init__()
        Stopping.made += 1
        self.number = Stopping.made
    def step(self, action):
        if self.number == 3:  # the first is looked at, the second trained on
            os.kill(os.getpid(), signal.{signal})
        return super().step(action)
"""


@pytest.mark.parametrize(("name", "status", "said"), [("SIGINT", 130, "Ctrl-C"), ("SIGTERM", 143, "SIGTERM")])
def test_a_signal_within_an_evaluation_ends_the_run_with_all_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, status: int, said: str
):
    (tmp_path / "stopping.py").write_text(STOPPING.replace("{signal}", name))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "stopping", raising=False)
    run = tmp_path / "run"
    result = muster("train", "stopping:Stopping", "--backend=serial", "--num-envs=1", "--num-steps=128",
                    "--eval-every=128", "--total-steps=512", "--run-dir", str(run))  # fmt: skip
    assert result.exit_code == status, result.output
    assert f"Stopped by {said}." in result.output
    assert f"muster train --resume {run}" in result.output
    assert [(row["steps"], row["eval_return"]) for row in metrics(run)] == [("128", "")]
    assert saved(run)["steps"] == 128
    assert not (run / "best.safetensors").exists()


def test_an_evaluation_that_cannot_be_played_is_an_error_not_one_that_took_too_long():
    options = PPOConfig(num_envs=2, num_steps=8, num_minibatches=1)
    with package.make_vec("CartPole-v1", 2, backend="serial", autoreset_mode="same_step") as envs:
        apart = package.make_vec("CartPole-v1", 2, backend="serial", autoreset_mode="same_step")
        playing = evaluations.Evaluations(
            PPO(envs, options), apart, Console(), RunOptions(eval_every=1, eval_episodes=2)
        )
        with apart, patch.object(apart, "reset", side_effect=UsageError("not now")), pytest.raises(UsageError):
            playing.play()
