"""Copies of a run's state at regular steps: which there are, and that they are what they say."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from command import muster
from muster import load_policy
from muster.errors import UsageError
from muster.training.checkpoints import Checkpoints, read_checkpoint
from muster.training.run_folder import RunFolder

OPTIONS = ("--backend=serial", "--num-envs=4", "--num-steps=32", "--num-minibatches=1", "--update-epochs=1")


def train(*words: str) -> str:
    """What a run says whose rollouts have 128 rows."""
    result = muster("train", *words, *OPTIONS)
    assert result.exit_code == 0, result.output
    return result.output


def copies(run: Path) -> list[int]:
    """The steps in the copies, in the order of their names."""
    files = sorted((run / "checkpoints").iterdir())
    steps = [read_checkpoint(file.parent, file.name)["steps"] for file in files]
    assert [int(file.stem) for file in files] == steps
    return steps


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "run"
    train(
        "CartPole-v1",
        "--run-dir",
        str(run),
        "--total-steps",
        "1024",
        "--checkpoint-every",
        "200",
        "--learning-rate=0.01",
    )
    return run


def test_a_copy_is_made_after_the_iteration_that_reaches_its_steps(run: Path):
    assert copies(run) == [256, 512, 640, 896, 1024]
    newest, last = read_checkpoint(run), read_checkpoint(run, "checkpoints/000000001024.safetensors")
    assert all(torch.equal(last["policy"][name], one) for name, one in newest["policy"].items())


def test_the_newest_stay_and_a_run_that_goes_on_goes_on_with_it(tmp_path: Path):
    run = tmp_path / "run"
    train("CartPole-v1", "--run-dir", str(run), "--total-steps", "384", "--checkpoint-every", "128", "--keep", "2")
    assert copies(run) == [256, 384]
    assert muster("train", "--resume", str(run), "--total-steps", "640").exit_code == 0
    assert copies(run) == [512, 640]
    assert muster("train", "--resume", str(run), "--total-steps", "768", "--keep", "3").exit_code == 0
    assert copies(run) == [512, 640, 768]


def test_each_copy_can_be_evaluated_and_loaded(run: Path):
    for name in (
        "512",
        "000000000512",
        "000000000512.safetensors",
        str(run / "checkpoints" / "000000000512.safetensors"),
    ):
        result = muster("eval", str(run), "--episodes", "1", "--checkpoint", name)
        assert "CartPole-v1, PPO after 512 steps" in result.output
    obs = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    first, newest, last = (load_policy(run, checkpoint=name) for name in ("256", None, run / "checkpoint.safetensors"))
    assert (first.steps, newest.steps, last.steps) == (256, 1024, 1024)
    assert np.array_equal(newest(obs), last(obs))
    assert not np.array_equal(newest(obs), first(obs))


def test_a_checkpoint_that_is_not_there_is_one_line_with_those_that_are(run: Path):
    result = muster("eval", str(run), "--checkpoint", "513")
    assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1)
    assert re.search(r"has no checkpoint '513', .*it has: checkpoint, 000000000256, 000000000512,", result.stderr)
    with pytest.raises(UsageError, match="has no checkpoint 'best'"):
        load_policy(run, checkpoint="best")


@pytest.mark.parametrize("kept", ["best.safetensors", "checkpoints/000000000128.safetensors"])
def test_a_run_whose_newest_state_is_gone_stays_as_it_is_until_an_older_one_is_copied(tmp_path: Path, kept: str):
    run = tmp_path / "run"
    made = ("--checkpoint-every=128", "--eval-every=128", "--eval-episodes=1", "--keep=1")
    train("CartPole-v1", "--run-dir", str(run), "--total-steps=128", *made)
    for name in {"checkpoint.safetensors", "best.safetensors", "checkpoints/000000000128.safetensors"} - {kept}:
        (run / name).unlink()
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}

    def refused(*words: str) -> str:
        result = muster("train", *words, "--total-steps=256")
        assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1), result.output
        assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
        return result.stderr

    assert f"has no checkpoint.safetensors. To go on, copy an older state to it: {kept}\n" in refused(
        "--resume", str(run)
    )
    begun_again = ("CartPole-v1", "--run-dir", str(run), *OPTIONS, *made)
    assert "already holds a run" in refused(*begun_again)
    (run / "checkpoint.safetensors").mkdir()
    for words in (("--resume", str(run)), begun_again):
        assert "checkpoint.safetensors is no file" in refused(*words)
    (run / "checkpoint.safetensors").rmdir()
    shutil.copy(run / kept, run / "checkpoint.safetensors")
    result = muster("train", "--resume", str(run), "--total-steps=256")
    assert (result.exit_code, "from step 128" in result.output) == (0, True), result.output


def test_a_run_does_not_go_on_from_a_state_before_its_copies(tmp_path: Path):
    run = tmp_path / "run"
    train("CartPole-v1", "--run-dir", str(run), "--total-steps=384", "--checkpoint-every=128", "--keep=2")
    shutil.copy(run / "checkpoints" / "000000000256.safetensors", run / "checkpoint.safetensors")
    result = muster("train", "--resume", str(run), "--total-steps=512")
    assert result.exit_code == 1
    assert "later states, in places that new ones would take: checkpoints/000000000384.safetensors" in result.stderr
    (run / "checkpoints" / "000000000384.safetensors").unlink()
    assert muster("train", "--resume", str(run), "--total-steps=512").exit_code == 0
    assert copies(run) == [384, 512]


def test_a_run_does_not_go_on_from_a_state_before_its_best(tmp_path: Path):
    run = tmp_path / "run"
    kept = ("--checkpoint-every=128", "--eval-every=128", "--eval-episodes=1")
    train("CartPole-v1", "--run-dir", str(run), "--total-steps=256", *kept)
    shutil.move(run / "checkpoints" / "000000000128.safetensors", tmp_path / "earlier.safetensors")
    shutil.move(run / "checkpoints" / "000000000256.safetensors", run / "best.safetensors")
    shutil.copy(tmp_path / "earlier.safetensors", run / "checkpoint.safetensors")
    before = {path: path.read_bytes() for path in run.iterdir() if path.is_file()}
    result = muster("train", "--resume", str(run), "--total-steps=512")
    assert (result.exit_code, len(result.stderr.splitlines())) == (1, 1), result.output
    assert (
        "from step 128, and has later states, in places that new ones would take: best.safetensors. Move"
        in result.stderr
    )
    assert {path: path.read_bytes() for path in run.iterdir() if path.is_file()} == before
    (run / "best.safetensors").unlink()
    assert muster("train", "--resume", str(run), "--total-steps=512").exit_code == 0


def test_a_run_that_begins_again_for_want_of_states_keeps_its_metrics(tmp_path: Path):
    run = tmp_path / "run"
    train("CartPole-v1", "--run-dir", str(run), "--total-steps=384")
    (run / "checkpoint.safetensors").unlink()
    before = (run / "metrics.csv").read_text()
    result = muster("train", "--resume", str(run), "--total-steps=128")
    assert (result.exit_code, "Its rows so far are in metrics.lost.csv" in result.output) == (0, True), result.output
    assert (run / "metrics.lost.csv").read_text() == before


def test_a_state_that_found_no_room_is_followed_by_that_of_the_next_iteration(tmp_path: Path):
    ppo: Any = SimpleNamespace(steps=1, state_dict=lambda: {"steps": ppo.steps})
    with RunFolder(tmp_path / "run") as folder:
        checkpoints = Checkpoints(folder, steps=0)
        checkpoints.save(ppo)
        with patch.object(folder, "save_checkpoint", side_effect=OSError("full")), pytest.raises(OSError, match="full"):
            checkpoints.save(ppo, now=True)
        ppo.steps = 2
        checkpoints.save(ppo)
    assert read_checkpoint(folder.path)["steps"] == checkpoints.saved == 2
