"""Runs in a queue of jobs: the same line each time, signals that save, and the script for Slurm."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from command import muster

SCRIPT = Path(__file__).parents[2] / "examples" / "slurm_array.sh"
SIZE = ("--num-envs", "2", "--num-steps", "32", "--num-minibatches", "1")


def until(true: Callable[[], object], program: subprocess.Popen[str]) -> None:
    while not true():
        assert program.poll() is None, program.communicate()
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_script_for_slurm_saves_when_asked_and_is_queued_again_until_it_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    subprocess.run(["bash", "-n", SCRIPT], check=True)
    asked = [line.removeprefix("#SBATCH ") for line in SCRIPT.read_text().splitlines() if line.startswith("#SBATCH")]
    assert {"--signal=B:USR1@120", "--requeue", "--array=1-5", "--open-mode=append"} <= set(asked)
    commands = tmp_path / "bin"
    commands.mkdir()
    main = "from muster.cli import main; main()"
    for name, line in {
        "scontrol": 'echo "$@" >> requeued',
        "muster": f"exec '{sys.executable}' -c '{main}' \"$@\"",
    }.items():
        (commands / name).write_text(f"#!/bin/bash\n{line}\n")
        (commands / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    environ = {**os.environ, "PATH": f"{commands}:{os.environ['PATH']}"}
    environ |= {"SLURM_ARRAY_TASK_ID": "3", "SLURM_JOB_ID": "77"}
    run, line = Path("runs/array/seed3"), ["bash", str(SCRIPT), "CartPole-v1", *SIZE, "--num-workers", "2"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    job = subprocess.Popen([*line, "--total-steps", "100M"], env=environ, **pipes)
    try:
        until((run / "checkpoint.safetensors").exists, job)
        step = [one for one in psutil.Process(job.pid).children(recursive=True) if one.is_running()]
        before = (run / "checkpoint.safetensors").stat().st_mtime_ns
        for number in (signal.SIGUSR2, signal.SIGUSR1):
            for process in step:  # as Slurm does without B:, before the minute of the next checkpoint
                process.send_signal(number)
            until(lambda before=before: (run / "checkpoint.safetensors").stat().st_mtime_ns > before, job)
            before = (run / "checkpoint.safetensors").stat().st_mtime_ns
        assert {one.pid for one in psutil.Process(job.pid).children(recursive=True)} == {one.pid for one in step}
        job.send_signal(signal.SIGUSR1)  # to the script alone
        out, err = job.communicate(timeout=60)
    finally:
        job.kill()
    assert job.returncode == 143, (out, err)
    assert Path("requeued").read_text() == "requeue 77\n"
    reached = int((run / "metrics.csv").read_text().splitlines()[-1].split(",")[2])
    line += ["--total-steps", str(reached + 64)]
    done = subprocess.run(line, env=environ, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"from step {reached:,}" in done.stdout
    steps = [int(row.split(",")[2]) for row in (run / "metrics.csv").read_text().splitlines()[1:]]
    assert steps == list(range(64, reached + 65, 64))


def test_a_line_goes_on_with_its_own_run_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text("def around(env):\n    return env\n")
    line = ("train", "CartPole-v1", *SIZE, "--backend", "serial", "--run-dir", "run", "--learning-rate", "1e-3")
    line += ("--resume-or-begin",)
    assert muster(*line, "--total-steps", "64", "--wrapper", "own.py:around").exit_code == 0
    for more, said in (
        ((), "--wrapper must be"),
        (("--wrapper", "own.py:around", "--gamma", "0.5"), "--gamma must be"),
        (("--wrapper", "own.py:around", "--seed", "5"), "--seed must be 0, which the run in run has settled, got 5"),
        (("--resume", "run"), "neither --resume nor --seeds"),
    ):
        result = muster(*line, "--total-steps", "128", *more)
        assert (result.exit_code, said in result.stderr) == (2, True), result.output
    result = muster(*line, "--total-steps", "128", "--wrapper", "own.py:around")
    assert result.exit_code == 0, result.output
    assert "from step 64" in result.stdout
