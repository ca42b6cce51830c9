"""What a command reports of errors, and what it does where the standard streams are closed, broken or full."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import pytest

from muster.command_line.mistakes import report
from muster.errors import ConfigError, EnvError, RecipeError, UsageError

MUSTER = f"{sys.executable} -P -m muster"
FULL = "muster: error: stdout cannot be written to: {}; send it elsewhere, such as to a file or to /dev/null\n"


@pytest.mark.parametrize(
    ("line", "status", "said"),
    [
        ("{ sleep 0.2; muster --version; } | true", 1, ""),
        ("muster --version >/dev/full", 1, FULL.format("No space left on device")),
        ("ulimit -f 0; muster --version >out", 1, FULL.format("File too large")),
        ("muster doctor --help >&-", 0, ""),
        ("muster plott 2>&-", 2, ""),
        ("muster plott 2>/dev/full", 2, ""),
    ],
)
def test_streams_that_take_nothing_end_a_command_without_pythons_own_lines(
    tmp_path: Path, line: str, status: int, said: str
) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    script = f"set -o pipefail; {line.replace('muster', MUSTER, 1)}"
    done = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, env=environment, cwd=tmp_path, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (status, "", said)


RAISED = EnvError("ValueError: no", env_index=1, worker_index=0, step=3, worker_traceback="Traceback:\n  the line\n")


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (ConfigError("num_envs", "at least 1", 0), 2, "--num-envs must be at least 1, got 0"),
        (ConfigError("the run has settled --seed"), 2, "the run has settled --seed"),
        (RecipeError("there is no file"), 2, "there is no file"),
        (UsageError("a holds no run"), 1, "a holds no run"),
        (OSError(2, "No such file", "a"), 1, "a: No such file"),
        (MemoryError("1 TB"), 1, "there is not enough memory; choose smaller numbers (MemoryError: 1 TB)"),
        (gym.error.NameNotFound("No `A`."), 1, "No `A`. If it is of a package that is installed, write the module"),
    ],
    ids=lambda one: type(one).__name__,
)
def test_an_error_is_one_line_and_has_a_status(
    error: Exception, status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report("muster train", error) == status
    written = capsys.readouterr().err
    assert written.startswith(f"muster train: error: {said}")
    assert written.count("\n") == 1


def test_the_traceback_of_an_env_stands_before_the_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert report("muster train", RAISED) == 1
    line = "muster train: error: env 1 (worker 0, step 3): ValueError: no"
    assert capsys.readouterr().err == f"Traceback:\n  the line\n{line}\n"


def test_a_crash_in_native_code_shows_the_line_of_the_env(tmp_path: Path) -> None:
    (tmp_path / "crashing.py").write_text("import ctypes\ndef make_env():\n    ctypes.string_at(0)\n")
    command = [sys.executable, "-P", "-m", "muster", "bench", "crashing.py:make_env", "--num-envs", "2"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == -11
    assert "Fatal Python error: Segmentation fault" in done.stderr
    assert f'File "{tmp_path}/crashing.py", line 3 in make_env' in done.stderr
