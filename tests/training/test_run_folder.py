"""What a run's folder holds, whatever happens."""

from __future__ import annotations

import csv
import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from muster.errors import UsageError
from muster.training.run_folder import RunFolder


def test_metrics_can_be_read_while_the_run_goes_on(tmp_path: Path):
    with RunFolder(tmp_path / "run") as folder:
        folder.append_metrics({"steps": 10, "mean_return": math.nan})
        folder.append_metrics({"mean_return": 1.5, "steps": 20})
        with folder.metrics_path.open(newline="") as file:
            assert list(csv.DictReader(file)) == [
                {"steps": "10", "mean_return": ""},
                {"steps": "20", "mean_return": "1.5"},
            ]


def test_config_is_json(tmp_path: Path):
    with RunFolder(tmp_path / "run") as folder:
        folder.write_config({"env": "CartPole-v1", "target_kl": None})
        assert json.loads(folder.config_path.read_text()) == {"env": "CartPole-v1", "target_kl": None}


def test_checkpoint_is_replaced_as_a_whole(tmp_path: Path):
    with RunFolder(tmp_path / "run") as folder:
        folder.save_checkpoint({"steps": 1})
        with pytest.raises(Exception, match="pickle"):
            folder.save_checkpoint({"steps": (i for i in range(3))})
        assert torch.load(folder.checkpoint_path, weights_only=True) == {"steps": 1}


def test_a_full_disk_is_said_of_the_file_and_leaves_the_checkpoint_before(tmp_path: Path):
    with RunFolder(tmp_path / "run") as folder:
        folder.save_checkpoint({"steps": 1})
        aside = folder.path / "checkpoint.pt.tmp"
        aside.symlink_to("/dev/full")
        with pytest.raises(OSError, match="No space") as raised:
            folder.save_checkpoint({"steps": 2, "policy": torch.zeros(50_000)})
        assert raised.value.filename == str(folder.checkpoint_path)
        assert not aside.is_symlink()
        assert torch.load(folder.checkpoint_path, weights_only=True) == {"steps": 1}


def test_a_folder_that_holds_a_run_is_refused_and_left_as_it_is(tmp_path: Path):
    with RunFolder(tmp_path) as first:
        first.append_metrics({"steps": 1})
    with pytest.raises(UsageError, match=r"already holds a run; choose another run folder"):
        RunFolder(tmp_path)
    assert first.metrics_path.read_text().split() == ["steps", "1"]


def test_commands_that_are_shown_take_a_path_that_begins_as_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with RunFolder(Path("-a b")), pytest.raises(UsageError, match=r"--resume './-a b'$"):
        RunFolder(Path("-a b"))


def test_a_folder_with_other_files_is_fine(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("mine")
    RunFolder(tmp_path).close()
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_file_in_place_of_the_folder_is_named(tmp_path: Path):
    (tmp_path / "run").write_text("mine")
    with pytest.raises(UsageError, match="is a file, not a folder"):
        RunFolder(tmp_path / "run")


def test_runs_that_begin_in_the_same_second_get_folders_of_their_own(tmp_path: Path):
    count, ready = 8, threading.Barrier(8)

    def create(_: int) -> RunFolder:
        ready.wait()
        return RunFolder.create(tmp_path, "module:ALE/Pong-v5")

    with ThreadPoolExecutor(count) as threads:
        folders = [folder for _ in range(10) for folder in threads.map(create, range(count))]
    for folder in folders:
        folder.close()
    assert len({folder.path for folder in folders}) == 10 * count
    assert all(folder.path.parent == tmp_path for folder in folders)
    assert all(folder.path.name.startswith("module-ALE-Pong-v5-") for folder in folders)
