"""What becomes of what workers print: worker_output."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from gymnasium import spaces

import muster
from envs import Scripted
from muster.errors import ConfigError, WorkerDied
from processes import kill_worker
from slow import slow

QUIET, CRASH, FLOOD = 0, 1, 2


class Talking(Scripted):
    """Prints, and so do its children; the action says what else."""

    def __init__(self) -> None:
        super().__init__()
        self.action_space = spaces.Discrete(3)
        print("built")
        subprocess.run(["sh", "-c", "echo child; echo complaint >&2"], check=True)

    def step(self, action: Any) -> Any:
        if action == CRASH:
            print("last words", file=sys.stderr, flush=True)
            time.sleep(0.2)
            os.abort()
        for _ in range(20 if action == FLOOD else 0):
            print("x" * (1 << 20))
        print("stepped")
        return super().step(0)


@pytest.mark.parametrize("context", ["forkserver", "fork", *slow("spawn")])
def test_each_worker_has_a_log(context: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options: dict[str, Any] = {"num_workers": 2, "context": context, "on_failure": "restart"}
    with muster.make_vec(Talking, 3, worker_output=tmp_path / "new" / "logs", **options) as envs:
        envs.reset()
        for _ in range(3):
            envs.step([0, 0, 0])
        envs.step([0, 0, CRASH])
    logs = [(tmp_path / "new" / "logs" / f"worker-{i}.log").read_text().splitlines() for i in range(2)]
    heads = [line for log in logs for line in log if line.startswith("--- ")]
    assert [re.sub(r"^--- [-\d]+ [:\d]+ |, pid \d+", "", head) for head in heads[:2]] == [
        "worker 0 (envs 0 to 1): it starts",
        "worker 1 (env 2): it starts",
    ]
    assert "died: killed by SIGABRT" in heads[2]
    assert [log.count("built") for log in logs] == [2, 2]
    assert [log.count("child") for log in logs] == [log.count("complaint") for log in logs] == [2, 2]
    assert logs[0].count("stepped") == 8
    assert capfd.readouterr() == ("", "")


def test_a_log_is_begun_anew_where_it_is_long(tmp_path: Path) -> None:
    with muster.make_vec(Talking, 1, worker_output=tmp_path) as envs:
        envs.reset()
        envs.step([FLOOD])
        kept = tmp_path / "worker-0.log.1"
        while (tmp_path / "worker-0.log").stat().st_size:
            time.sleep(0.05)
        envs.step([0])
    assert kept.read_text().count("x") == 20 << 20
    assert (tmp_path / "worker-0.log").read_text() == "stepped\n"


def test_a_log_that_was_removed_does_not_grow_without_end(tmp_path: Path) -> None:
    with muster.make_vec(Talking, 1, worker_output=tmp_path) as envs:
        envs.reset()
        (tmp_path / "worker-0.log").unlink()
        envs.step([FLOOD])
        log = Path(f"/proc/{envs.stats()['workers'][0]['pid']}/fd/1")
        while log.stat().st_size:
            time.sleep(0.05)


def test_a_start_begins_a_line_of_the_log(tmp_path: Path) -> None:
    with muster.make_vec(Talking, 1, worker_output=tmp_path, on_failure="restart") as envs:
        envs.reset()
        envs.call(lambda env, index: os.write(1, b"no end"))
        kill_worker(envs, 0)
        envs.step([0])
    lines = (tmp_path / "worker-0.log").read_text().splitlines()
    assert sum(line.startswith("---") for line in lines) == 2


@pytest.mark.parametrize("output", ["inherit", "quiet", "FOLDER"])
def test_last_words_are_the_same(output: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with muster.make_vec(Talking, 1, worker_output=output.replace("FOLDER", str(tmp_path))) as envs:
        envs.reset()
        with pytest.raises(WorkerDied) as died:
            envs.step([CRASH])
    words = died.value.last_words.splitlines()
    assert words[:2] == ["complaint", "last words"]
    assert "in step" in died.value.last_words
    assert bool(capfd.readouterr().out) == (output == "inherit")


def test_a_full_disk_costs_the_log_and_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "worker-0.log").symlink_to("/dev/full")
    with muster.make_vec(Talking, 1, worker_output=tmp_path) as envs:
        envs.reset()
        for _ in range(5):
            envs.step([0])
        envs.call(lambda env, i: None)
    lines = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert lines == ["/dev/full: No space left on device; what that worker prints is lost"]


@pytest.mark.parametrize("wrong", ["/etc/hostname", "/sys", "s3://bucket/logs", "", 5, "/tmp/\ud800"])
def test_a_folder_that_cannot_be_written_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigError, match='worker_output must be "inherit", "quiet" or a folder'):
        muster.make_vec(Talking, 1, worker_output=wrong)


@pytest.mark.parametrize("backend", ["thread", "serial"])
def test_it_is_for_processes(backend: str) -> None:
    with pytest.raises(ConfigError, match="worker_output must be left out"):
        muster.make_vec(Talking, 1, backend=backend, worker_output="quiet")
