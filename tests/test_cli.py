"""The ``muster`` command as a person meets it."""

from __future__ import annotations

import csv
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import matplotlib.image
import pytest

import programs
from command import muster
from muster.training.checkpoints import read_checkpoint

SMALL = ("--num-envs", "8", "--num-steps", "32")  # rollouts of 256 rows
# -P: as for an installed script, Python itself does not look into the working folder.
RUN_MUSTER = ["-P", "-c", "from muster.cli import main; main()"]


def read_metrics(run: Path) -> list[dict[str, str]]:
    with (run / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_version_is_that_of_the_package():
    assert muster("--version").output.strip() == importlib.metadata.version("muster-rl")


def test_train_leaves_a_whole_run_folder(tmp_path: Path):
    run = tmp_path / "run"
    result = muster(
        "train", "CartPole-v1", "--total-steps", "3000", "--seed", "7", "--num-workers", "1", "--run-dir", str(run)
    )
    assert result.exit_code == 0, result.output
    config = json.loads((run / "config.json").read_text())
    assert (config["env"], config["seed"], config["num_envs"], config["total_steps"]) == ("CartPole-v1", 7, 16, 3000)
    rows = read_metrics(run)
    assert [int(row["steps"]) for row in rows] == [1024, 2048, 3072]
    assert 9 <= float(rows[-1]["mean_return"]) <= 500
    assert read_checkpoint(run)["steps"] == 3072
    assert matplotlib.image.imread(run / "learning_curve.png").ndim == 3
    assert (
        "CartPole-v1  PPO, 3,000 steps, seed 7, 16 envs on 1 worker, 1 thread of torch, preset 'classic control'\n"
        in result.output
    )
    assert f"{float(rows[-1]['mean_return']):.1f} over the last 100 episodes  the goal is 475" in result.output
    assert str(run / "learning_curve.png") in result.output


def test_the_same_seed_gives_the_same_metrics(tmp_path: Path):
    measured = []
    for name, workers in (("a", "1"), ("b", "2")):
        arguments = ("--total-steps", "1000", "--num-workers", workers, "--run-dir", str(tmp_path / name))
        assert muster("train", "CartPole-v1", *arguments).exit_code == 0
        rows = read_metrics(tmp_path / name)
        measured.append([{k: v for k, v in row.items() if "second" not in k and "share" not in k} for row in rows])
    assert measured[0] == measured[1]


def test_runs_without_a_folder_get_one_in_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    assert muster("train", "Pendulum-v1", "--total-steps", "1", "--num-envs", "2").exit_code == 0
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.startswith("Pendulum-v1-seed0-")
    assert len(read_metrics(run)) == 1


@pytest.mark.parametrize(
    ("arguments", "exit_code", "message"),
    [
        (("CartPole-v1", "--critic", "own"), 2, "--critic must be left out, as it is for envs with agents"),
        (
            ("CartPole-v1", "--num-workers", "17"),
            2,
            "--num-workers must be at most 16 for 16 envs, as a worker",
        ),
    ],
)
def test_what_cannot_be_trained_leaves_no_folder(
    tmp_path: Path, arguments: tuple[str, ...], exit_code: int, message: str
):
    run = tmp_path / "run"
    result = muster("train", *arguments, "--run-dir", str(run))
    assert result.exit_code == exit_code
    assert message in result.stderr
    assert not run.exists()


def test_what_was_reached_is_kept_when_the_env_fails(tmp_path: Path):
    (tmp_path / "fragile.py").write_text(
        "import gymnasium\n"
        "from gymnasium.envs.classic_control import CartPoleEnv\n"
        "class Fragile(CartPoleEnv):\n"
        "    count = 0\n"
        "    def step(self, action):\n"
        "        self.count += 1\n"
        "        if self.count == 40:\n"
        "            raise ArithmeticError('the pole broke')\n"
        "        return super().step(action)\n"
        "gymnasium.register('Fragile-v0', Fragile)\n"
    )
    run = tmp_path / "run"
    training = [*RUN_MUSTER, "train", "fragile:Fragile-v0", *SMALL, "--num-workers", "1", "--run-dir", str(run)]
    done = programs.run(*training, cwd=tmp_path, imports=programs.TORCH)
    assert done.returncode == 1
    assert "ArithmeticError" in done.stderr
    assert "the pole broke" in done.stderr
    assert "muster/cli.py" not in done.stderr
    assert f"What was reached is saved in {run}" in done.stdout
    assert f"To go on: muster train --resume {run} --trust" in done.stdout  # whose env is a file's
    assert [row["steps"] for row in read_metrics(run)] == ["256"]
    assert read_checkpoint(run)["steps"] == 256


@pytest.mark.timeout(240)
def test_ctrl_c_ends_cleanly_with_what_was_reached_and_the_run_goes_on(tmp_path: Path):
    run = tmp_path / "run"
    training = [*RUN_MUSTER, "train", "CartPole-v1", *SMALL, "--total-steps", "100m", "--run-dir", str(run)]
    child = programs.start(*training, imports=programs.TORCH)
    deadline = time.monotonic() + 150
    while not ((run / "metrics.csv").exists() and len(read_metrics(run)) > 1):
        assert time.monotonic() < deadline
        assert child.poll() is None, child.communicate()
        time.sleep(0.05)
    refused = muster("train", "--resume", str(run))
    assert (refused.exit_code, "another process is training there" in refused.stderr) == (1, True)
    os.killpg(child.pid, signal.SIGINT)  # as a terminal does
    output, errors = child.communicate(timeout=60)
    assert child.returncode == 130
    assert "Stopped by Ctrl-C" in output
    assert f"To go on: muster train --resume {run}" in output
    assert "Traceback" not in output + errors
    assert read_checkpoint(run)["steps"] == int(read_metrics(run)[-1]["steps"])
    assert (run / "learning_curve.png").exists()
    with pytest.raises(ProcessLookupError):
        os.killpg(child.pid, 0)
    reached = int(read_metrics(run)[-1]["steps"])
    result = muster("train", "--resume", str(run), "--total-steps", str(reached + 256), "--backend", "serial")
    assert result.exit_code == 0, result.output
    assert [int(row["steps"]) for row in read_metrics(run)] == list(range(256, reached + 257, 256))


@pytest.mark.parametrize(("number", "name"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "Ctrl-C")])
def test_signals_are_said_also_while_envs_are_built(tmp_path: Path, number: int, name: str):
    (tmp_path / "slow_env.py").write_text(
        "import pathlib, time\ndef make():\n    pathlib.Path('built').touch()\n    time.sleep(60)\n"
    )
    with programs.start(*RUN_MUSTER, "bench", "slow_env:make", cwd=tmp_path) as bench:
        while not (tmp_path / "built").exists():
            time.sleep(0.01)
        bench.send_signal(number)
        _, stderr = bench.communicate()
    assert (bench.returncode, stderr) == (128 + number, f"muster bench: stopped by {name}\n")


def test_the_overview_is_quick_to_have():
    code = "import sys; from muster.cli import run; run(['--help']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_bench_compares_the_ways_to_run_an_env():
    result = muster("bench", "CartPole-v1", "--num-envs", "2", "--rounds", "2", "--seconds", "0.02")
    assert result.exit_code == 0, result.output
    assert "CartPole-v1, 2 envs, " in result.output
    rows = [line.split() for line in result.output.splitlines() if line.endswith(" x")]
    assert [" ".join(row[:2]) for row in rows] == [
        'muster backend="serial"',
        "muster processes",
        "muster caller_steps=True",
        "gymnasium SyncVectorEnv",
        "gymnasium AsyncVectorEnv",
    ]
    assert 'envs = muster.make_vec("CartPole-v1", 2' in result.output


def test_bench_ends_with_what_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "sized_module.py").write_text(
        "import gymnasium\n\ndef make_env(size):\n    return gymnasium.make('CartPole-v1', max_episode_steps=size)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "around.py").write_text("from gymnasium.wrappers import RecordEpisodeStatistics as Kept\n")
    options = (
        "--kwargs",
        '{"size": 9}',
        "--wrapper",
        "around.py:Kept",
        "--num-envs",
        "2",
        "--rounds",
        "1",
        "--seconds",
        "0.02",
    )
    result = muster("bench", "sized_module:make_env", *options)
    assert result.exit_code == 0, result.output
    *_, imports, wrapper, line = result.output.splitlines()
    assert imports == "from sized_module import make_env"
    assert wrapper == "from around import Kept as RecordEpisodeStatistics"
    assert line.startswith("envs = muster.make_vec(make_env, 2, env_kwargs={'size': 9}")
    assert line.endswith("wrappers=[RecordEpisodeStatistics])")


@pytest.mark.filterwarnings("ignore")  # Box2D's
def test_bench_says_what_a_way_lacks_and_measures_the_others():
    arguments = ("--num-envs", "2", "--rounds", "1", "--seconds", "0.02", "--json")
    measured = json.loads(muster("bench", "pettingzoo/sisl/multiwalker_v9", *arguments).stdout)
    assert len(measured["muster processes"]) == 1
    assert "Malformed environment ID" in measured["gymnasium SyncVectorEnv"]


def test_bench_of_what_cannot_be_stepped_is_one_line():
    result = muster("bench", "NoSuch-v0", "--rounds", "1")
    assert result.exit_code == 1
    assert result.stderr.startswith("muster bench: error: NoSuch-v0 cannot be stepped: NameNotFound: ")
    assert result.stderr.count("\n") == 1
