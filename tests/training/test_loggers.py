"""Loggers of a run: wandb by its offline records, functions, and what they make of kills, errors and bad names."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import programs
from command import muster

pytest.importorskip("wandb")
MUSTER = ("-c", "from muster.cli import main; main()")
SIZE = ("--num-envs", "2", "--num-steps", "32", "--num-minibatches", "1", "--backend", "serial")
FUNCTION = """
import os
def log(metrics):
    if os.path.exists("is_down"):
        raise ConnectionError("nobody is there")
    with open("rows.txt", "a") as file:
        file.write(f"{metrics['steps']}\\n")
"""

# As much of it as the example in the docs needs; it is not installed.
MLFLOW = """
import json
def note(*what):
    with open("mlflow.txt", "a") as file:
        print(json.dumps(what), file=file)
def log_metrics(metrics, step=None):
    note(step, {name: float(value) for name, value in metrics.items()})
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a module of its own in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("PYTHONWARNINGS", "ignore")
    for module in ("own_log", "my_log", "mlflow"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    (tmp_path / "own_log.py").write_text(FUNCTION)
    return tmp_path


def records(file: Path) -> Iterator[Any]:
    """The records of a file of wandb: a header of 7 bytes, then the blocks of LevelDB's log format."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, begun = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        if at + 7 + size > len(data):
            return
        begun = (begun if kind in (3, 4) else b"") + data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield Record.FromString(begun)


def wandb_records(run: Path) -> list[Any]:
    found = list[Any]()
    for file in sorted(run.glob("wandb-*/wandb/offline-run-*/*.wandb"), key=lambda file: file.parent.name):
        # On a busy machine wandb's own process writes the last records when `finish` has returned.
        while [one.WhichOneof("record_type") for one in records(file)][-1:] != ["exit"]:
            time.sleep(0.05)
        found += records(file)
    return found


def wandb_rows(run: Path) -> list[dict[str, float]]:
    """The rows that wandb holds, without its own columns."""
    found = [one.history for one in wandb_records(run) if one.WhichOneof("record_type") == "history"]
    rows = [{item.key or item.nested_key[0]: json.loads(item.value_json) for item in one.item} for one in found]
    assert [one.step.num or row["_step"] for one, row in zip(found, rows, strict=True)] == [
        row.get("steps", row["_step"]) for row in rows
    ]
    return [{name: value for name, value in row.items() if not name.startswith("_")} for row in rows]


def csv_rows(run: Path) -> list[dict[str, float]]:
    with (run / "metrics.csv").open(newline="") as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


@pytest.mark.timeout(300)
def test_wandb_and_a_function_hold_each_row_of_the_csv_once_over_a_kill(folder: Path):
    run = Path("run")
    first = ("train", "CartPole-v1", *SIZE, "--total-steps", "100M", "--checkpoint-every", "640", "--run-dir", "run")
    loggers = ("--log", "wandb", "own_log.py:log")
    training = programs.start(*MUSTER, *first, *loggers, imports=programs.TORCH)
    while not (folder / "rows.txt").exists() or len((folder / "rows.txt").read_text().split()) < 15:
        assert training.poll() is None, training.communicate()
        time.sleep(0.02)
    training.send_signal(signal.SIGKILL)
    training.communicate()
    reached = int((folder / "rows.txt").read_text().split()[-1])
    words = ("--resume", "run", "--trust", "--total-steps", str(reached + 640))
    done = programs.run(*MUSTER, "train", *words, imports=programs.TORCH, check=True)
    assert re.search(r"wandb sync run/wandb-[\d-]+/wandb/offline-run-", done.stdout)
    assert len(list(run.glob("wandb-*/wandb/cut-offline-run-*"))) == 1
    rows = csv_rows(run)
    assert [row["steps"] for row in rows] == list(range(64, int(rows[-1]["steps"]) + 1, 64))
    assert wandb_rows(run) == rows
    assert [int(step) for step in (folder / "rows.txt").read_text().split()] == [row["steps"] for row in rows]


def test_a_film_and_the_config_are_with_the_rows_under_one_id(folder: Path):
    run = folder / "run"
    result = muster("train", "CartPole-v1", *SIZE, "--total-steps", "128", "--run-dir", "run", "--log", "wandb")
    assert result.exit_code == 0, result.output
    for trust in ((), ("--trust",)):
        result = muster("eval", "run", "--episodes", "1", "--video", "film.mp4", *trust)
        assert result.exit_code == 0, result.output
        assert ("to send it to wandb" in result.stdout) is not bool(trust)
    assert [row.get("steps") for row in wandb_rows(run)] == [64, 128, None]
    held = [one.run for one in wandb_records(run) if one.WhichOneof("record_type") == "run"]
    assert len({one.run_id for one in held}) == 1
    config = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in held[0].config.update}
    kept = json.loads((run / "config.json").read_text())
    assert {name: config[name] for name in ("env", "num_envs", "learning_rate")} == {
        name: kept[name] for name in ("env", "num_envs", "learning_rate")
    }
    assert list(run.glob("wandb-*/wandb/offline-run-*/files/media/videos/film*.mp4"))


def test_wandb_without_a_login_is_refused_before_envs_start_and_keeps_no_film(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    run = ("train", "CartPole-v1", *SIZE, "--total-steps", "64", "--run-dir", "run", "--log", "wandb")
    assert muster(*run).exit_code == 0
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(folder / "netrc"))
    assert muster("train", "CartPole-v1", "--log", "wandb", "--help").exit_code == 0
    asked = muster("train", "--resume", "run", "--total-steps", "128")
    assert (asked.exit_code, "logged in" in asked.stderr) == (2, False)  # trust comes first
    filmed = muster("eval", "run", "--episodes", "1", "--video", "film.mp4", "--trust")
    assert filmed.exit_code == 0, filmed.output
    assert "The film is not in wandb: wandb does not start: nobody is logged in." in filmed.stdout
    assert (folder / "film.mp4").exists()
    (folder / "no_env.py").write_text("def make():\n    raise AssertionError('started')\n")
    for words in (("no_env.py:make", "--run-dir", "other"), ("--resume", "run", "--trust", "--total-steps", "128")):
        refused = muster("train", *words, "--log", "wandb")
        assert refused.exit_code == 1, refused.output
        said = "wandb does not start: nobody is logged in. Run `wandb login`, or set WANDB_MODE=offline"
        assert refused.stderr == f"muster train: error: {said}\n"
    assert not (folder / "other").exists()


def test_a_logger_that_raises_is_said_once_and_gets_its_rows_later(folder: Path):
    (folder / "is_down").touch()
    words = (*SIZE, "--checkpoint-every", "64", "--log", "own_log.py:log")
    result = muster("train", "CartPole-v1", *words, "--total-steps", "256", "--run-dir", "run")
    assert result.exit_code == 0
    said = "the logger {} raised ConnectionError: nobody is there ({}, line 5)"
    file = folder / "own_log.py"
    assert result.stdout.count(said.format(f"{file}:log", file)) == 1
    assert [row["steps"] for row in csv_rows(Path("run"))] == [64, 128, 192, 256]
    assert not list(Path("run").glob("events*"))  # tensorboard is not named
    (folder / "is_down").unlink()
    line = ("train", "CartPole-v1", *words, "--run-dir", "run", "--resume-or-begin")
    for total, last, said in (("256", 256, "there is nothing left to do"), ("320", 320, "from step 256")):
        result = muster(*line, "--total-steps", total)
        assert result.exit_code == 0, result.output
        assert said in result.stdout
        assert (folder / "rows.txt").read_text().split() == list(map(str, range(64, last + 1, 64)))


def test_the_function_for_mlflow_in_the_docs_logs_each_row(folder: Path):
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    (snippet,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "import mlflow" in block]
    (folder / "my_log.py").write_text(snippet)
    (folder / "mlflow.py").write_text(MLFLOW)
    done = muster("train", "CartPole-v1", *SIZE, "--total-steps", "128", "--run-dir", "run", "--log", "my_log.py:log")
    assert (done.exit_code, "raised" in done.stdout) == (0, False), done.output
    rows = list(map(json.loads, (folder / "mlflow.txt").read_text().splitlines()))
    assert rows == [[int(row["steps"]), row] for row in csv_rows(Path("run"))]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--log", "wandb", "wandb"], "--log must be a list that names each logger once, got ('wandb', 'wandb')"),
        (["--log", "mlflow"], "--log must be csv, tensorboard, wandb, module:function or file.py:function"),
        (["--log", "own_log:nothing"], "module own_log has no 'nothing'. It has: log"),
        (["--run-dir", "s3://bucket/run"], "--run-dir must be a folder of this machine"),
        (["--config", "tabs.yaml"], "tabs.yaml cannot be read: found character '\\t' that cannot start any token"),
        (["--config", "list.yml"], "list.yml cannot be read: it holds no names with values"),
        (["--config", "unknown.yaml"], "unknown.yaml: num_env is no option of the env or of a run"),
        (["--config", "itself.yaml"], "itself.yaml: maximum recursion depth exceeded"),
        (["--config", "deep.yaml"], "deep.yaml cannot be read: maximum recursion depth exceeded"),
        (["--config", "deep.toml"], "deep.toml cannot be read: maximum recursion depth exceeded"),
    ],
)
def test_what_makes_no_sense_is_named_before_the_first_step(words: list[str], said: str, folder: Path):
    (folder / "tabs.yaml").write_text("env: CartPole-v1\nnum_envs:\t8\n\tseed: 1\n")
    (folder / "list.yml").write_text("- 8\n")
    (folder / "unknown.yaml").write_text("num_env: 8\n")
    (folder / "itself.yaml").write_text("env: &a [*a]\n")
    for file, equals in (("deep.yaml", ":"), ("deep.toml", "=")):
        (folder / file).write_text(f"env {equals} {'[' * 3000}{']' * 3000}\n")
    place = () if "--run-dir" in words else ("--run-dir", "run")
    result = muster("train", "CartPole-v1", *SIZE, *place, *words)
    assert result.exit_code == 2, result.output
    assert said in result.stderr
    assert not os.path.exists("s3:")


def test_yaml_is_read_as_toml_is(folder: Path):
    (folder / "run.yaml").write_text(
        "env: CartPole-v1\nnum-envs: 2\ntotal_steps: 64\nlearning_rate: 1e-4\nhidden_sizes: [8, 9]\nbackend: serial\n"
        "num_steps: 32\nenv_kwargs: {sutton_barto_reward: true}\n"
    )
    result = muster("train", "--config", "run.yaml", "--run-dir", "run")
    assert result.exit_code == 0, result.output
    config = json.loads((folder / "run" / "config.json").read_text())
    assert (config["learning_rate"], config["hidden_sizes"]) == (1e-4, [8, 9])
    assert config["env_kwargs"] == {"sutton_barto_reward": True}


def test_wandb_and_yaml_are_imported_only_where_they_are_named():
    code = (
        "import sys; from muster import cli; "
        f"cli.run(['train', 'CartPole-v1', *{SIZE}, '--total-steps', '64', '--run-dir', 'run']); "
        "print('found', {'wandb', 'yaml'} & set(sys.modules))"
    )
    done = programs.run("-c", code, imports=programs.TORCH, check=True)
    assert done.stdout.splitlines()[-1] == "found set()"
