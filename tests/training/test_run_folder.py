"""What a run's folder holds, whatever happens."""

from __future__ import annotations

import csv
import math
import os
import re
import resource
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from muster.errors import UsageError
from muster.training.checkpoints import packed, read_checkpoint
from muster.training.run_folder import RunFolder, new_folder


def test_metrics_can_be_read_while_the_run_goes_on(tmp_path: Path):
    with RunFolder(tmp_path / "run") as folder:
        folder.append_metrics({"steps": 10, "mean_return": math.nan})
        folder.append_metrics({"mean_return": 1.5, "steps": 20})
        with folder.metrics_path.open(newline="") as file:
            assert list(csv.DictReader(file)) == [
                {"steps": "10", "mean_return": ""},
                {"steps": "20", "mean_return": "1.5"},
            ]


def test_checkpoint_is_replaced_as_a_whole(tmp_path: Path):
    with RunFolder(tmp_path / "run") as folder:
        folder.save_checkpoint(packed({"steps": 1}))
        with pytest.raises(TypeError, match="^steps in the run's state is a generator, which no checkpoint has$"):
            folder.save_checkpoint(packed({"steps": (i for i in range(3))}))
        assert read_checkpoint(folder.path) == {"steps": 1}


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """A disk that is full: no file may grow beyond this size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_said_of_the_file_and_leaves_the_checkpoint_before(tmp_path: Path):
    with RunFolder(tmp_path / "run") as folder:
        folder.save_checkpoint(packed({"steps": 1}))
        with files_of_at_most(20_000), pytest.raises(OSError, match="too large") as raised:
            folder.save_checkpoint(packed({"steps": 2, "policy": torch.zeros(50_000)}))
        assert raised.value.filename == str(folder.checkpoint_path)
        assert sorted(os.listdir(folder.path)) == ["checkpoint.safetensors", "metrics.csv"]
        assert read_checkpoint(folder.path) == {"steps": 1}


def test_rows_that_a_full_disk_had_no_room_for_are_written_whole_by_the_next(tmp_path: Path):
    run = tmp_path / "run"
    with RunFolder(run) as folder:
        folder.write_config({})
        folder.append_metrics({"steps": 1, "loss": 0.5}, {"losses/a": 0.5})
        size = folder.metrics_path.stat().st_size
        with files_of_at_most(size + 4):  # room for a part of the row
            for step in (2, 3):
                with pytest.raises(OSError, match="too large"):
                    folder.append_metrics({"steps": step, "loss": 0.25}, {"losses/a": 0.25})
            assert folder.metrics_path.stat().st_size == size
        folder.append_metrics({"steps": 4, "loss": 0.125}, {"losses/a": 0.125})
    assert folder.metrics_path.read_text().split() == ["steps,loss", "1,0.5", "2,0.25", "3,0.25", "4,0.125"]
    events = EventAccumulator(str(run))
    events.Reload()
    assert [(one.step, one.value) for one in events.Scalars("losses/a")] == [(1, 0.5), (2, 0.25), (3, 0.25), (4, 0.125)]


def test_a_row_with_new_columns_that_a_full_disk_had_no_room_for_is_written_by_the_next(tmp_path: Path):
    with RunFolder(tmp_path / "run") as folder:
        with files_of_at_most(4), pytest.raises(OSError, match="too large"):
            folder.append_metrics({"steps": 1, "loss": 0.5})
        folder.append_metrics({"steps": 2, "loss": 0.25})
        with files_of_at_most(folder.metrics_path.stat().st_size):
            for step in (3, 4):
                with pytest.raises(OSError, match="too large"):
                    folder.append_metrics({"steps": step, "loss": 0.125, "eval": step})
        folder.append_metrics({"steps": 5, "loss": math.nan})
    rows = ["1,0.5,", "2,0.25,", "3,0.125,3", "4,0.125,4", "5,,"]
    assert folder.metrics_path.read_text().split() == ["steps,loss,eval", *rows]


def test_a_file_is_synced_before_it_replaces_the_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    steps: list[str] = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (steps.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda *names, **options: (steps.append("replace"), replace(*names, **options)))
    with RunFolder(tmp_path / "run") as folder:
        folder.append_metrics({"steps": 1})
        for write, name in (
            (lambda: folder.save_checkpoint(packed({"steps": 1})), "checkpoint.safetensors"),
            (lambda: folder.drop_metrics_after(1), "metrics.csv"),
        ):
            steps.clear()
            write()
            aside, last = steps[-3:-1]
            assert re.fullmatch(rf".*/\.{name}\.[0-9a-f]{{16}}\.tmp", aside)
            assert last == "replace"
        folder.save_checkpoint(packed({"steps": 1}))
        assert str(folder.metrics_path) in steps  # no checkpoint without its rows


def test_a_run_that_was_killed_before_its_first_checkpoint_is_begun_again(tmp_path: Path):
    with RunFolder(tmp_path) as killed:
        killed.write_config({"algorithm": "PPO", "preset": "numbers"})
        killed.append_metrics({"steps": 1})
    aside = tmp_path / f".checkpoint.safetensors.{'0' * 16}.tmp"
    aside.write_text("half of it")
    with RunFolder(tmp_path) as again:
        again.append_metrics({"steps": 2})
        with pytest.raises(UsageError, match="another process is training there"):
            RunFolder(tmp_path)
    assert again.metrics_path.read_text().split() == ["steps", "2"]
    assert not aside.exists()


def test_a_folder_that_holds_a_run_is_refused_and_left_as_it_is(tmp_path: Path):
    with RunFolder(tmp_path) as first:
        first.append_metrics({"steps": 1})
        first.save_checkpoint(packed({}))
    with pytest.raises(UsageError, match=r"already holds a run; choose another run folder"):
        RunFolder(tmp_path)
    assert first.metrics_path.read_text().split() == ["steps", "1"]


def test_commands_that_are_shown_take_a_path_that_begins_as_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    with RunFolder(Path("-a b")) as folder:
        folder.save_checkpoint(packed({}))
    with pytest.raises(UsageError, match=r"--resume './-a b'$"):
        RunFolder(Path("-a b"))


def test_a_folder_with_other_files_is_fine(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("mine")
    RunFolder(tmp_path).close()
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("name", ["metrics.csv", "config.json"])
def test_files_of_somebody_else_stay(tmp_path: Path, name: str):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_text('{"mine": 1}')
    with pytest.raises(UsageError, match="already holds a run"):
        RunFolder(tmp_path)
    assert (tmp_path / name).read_text() == '{"mine": 1}'


def test_metrics_of_a_run_whose_states_are_gone_stay(tmp_path: Path):
    with RunFolder(tmp_path) as run:
        run.write_config({"algorithm": "PPO", "preset": "numbers"})
        for steps in (1, 2):
            run.append_metrics({"steps": steps})
    with pytest.raises(UsageError, match="already holds a run"):
        RunFolder(tmp_path)
    assert run.metrics_path.read_text().split() == ["steps", "1", "2"]


def test_a_file_in_place_of_the_folder_is_named(tmp_path: Path):
    (tmp_path / "run").write_text("mine")
    with pytest.raises(UsageError, match="is a file, not a folder"):
        RunFolder(tmp_path / "run")
    with pytest.raises(UsageError, match="or lies in one"):
        RunFolder(tmp_path / "run" / "inner")


def test_runs_that_begin_in_the_same_second_get_folders_of_their_own(tmp_path: Path):
    count, ready = 8, threading.Barrier(8)

    def create(_: int) -> RunFolder:
        ready.wait()
        return RunFolder(new_folder(tmp_path, "module:ALE/Pong-v5"))

    with ThreadPoolExecutor(count) as threads:
        folders = [folder for _ in range(10) for folder in threads.map(create, range(count))]
    for folder in folders:
        folder.close()
    assert len({folder.path for folder in folders}) == 10 * count
    assert all(folder.path.parent == tmp_path for folder in folders)
    assert all(folder.path.name.startswith("module-ALE-Pong-v5-") for folder in folders)
