"""A disk that is full while a run trains: a small one of its own, in a mount namespace."""

from __future__ import annotations

import json
from typing import Any

import pytest

import programs


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What came of runs of 5 iterations, by the name of what happened to their disk."""
    done = programs.run("-c", RUNS, tmp_path_factory.mktemp("disk"), imports=programs.TORCH)
    if done.returncode == 77:
        pytest.skip(f"no mount namespace here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_it_is_said_once_tried_again_and_ends_no_training(runs: dict[str, dict[str, Any]]):
    run = runs["full for a while"]
    assert run["status"] == 0
    assert run["output"].count("The training goes on, and tries again to save.") == 1
    assert run["output"].count("There is room again: the newest state is saved.") == 1
    assert (run["rows"], run["checkpoint"], run["charts"]) == ([64, 128, 192, 256, 320], 320, [64, 128, 192, 256, 320])
    assert run["copies"] == ["000000000064.safetensors", "000000000320.safetensors"]  # the newest of those that waited


def test_where_it_stays_full_the_error_says_so_and_the_run_goes_on_later(runs: dict[str, dict[str, Any]]):
    run = runs["full to the end"]
    assert run["status"] == 1
    assert run["output"].count("The training goes on") == 1
    assert "What was reached is saved" not in run["output"]
    assert run["errors"].endswith("No space left on device\n")
    again = runs["full to the end, resumed"]
    assert again["status"] == 0, again["errors"]
    assert "from step 64," in again["output"]
    assert (again["rows"], again["checkpoint"], again["charts"]) == ([64, 128, 192, 256, 320], 320, run["all"])


def test_a_run_that_never_found_room_for_a_checkpoint_goes_on(runs: dict[str, dict[str, Any]]):
    assert runs["full from the first checkpoint"]["status"] == 1
    assert runs["full from the first checkpoint"]["checkpoint"] is None
    again = runs["full from the first checkpoint, resumed"]
    assert (again["status"], again["rows"], again["checkpoint"]) == (0, [64, 128, 192, 256, 320], 320)


def test_output_that_goes_to_the_full_disk_ends_no_training(runs: dict[str, dict[str, Any]]):
    run = runs["its output there, too"]
    assert (run["status"], run["checkpoint"]) == (0, 320), run["errors"]


# Trains on a tmpfs that is filled and emptied before given iterations. Prints what there is afterwards.
RUNS = """
import ctypes, json, os, sys
libc, folder = ctypes.CDLL(None, use_errno=True), sys.argv[1]

def check(result):
    if result:
        print(os.strerror(ctypes.get_errno()), file=sys.stderr)
        sys.exit(77)

NEW_NAMESPACE, NEW_USER, PRIVATE = 0x20000, 0x10000000, (1 << 18) | (1 << 14)
uid, gid = os.getuid(), os.getgid()
check(libc.unshare(NEW_NAMESPACE if uid == 0 else NEW_NAMESPACE | NEW_USER))
if uid:
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
check(libc.mount(b"none", b"/", None, PRIVATE, None))
check(libc.mount(b"none", folder.encode(), b"tmpfs", 0, b"size=8m"))

import contextlib, csv, io
from pathlib import Path
from muster import cli
from muster.algorithms import PPO
from muster.training import console
from muster.training.checkpoints import read_checkpoint
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

iterate, filler = PPO.iterate, os.path.join(folder, "filler")

def fill():
    sys.stdout.write("." * (-os.path.getsize(log) % 4096) if log else "")  # no room is left in the last page
    sys.stdout.flush()
    with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))

def train(name, moments, *words):
    run, calls = os.path.join(folder, name), []
    def hooked(self):
        calls.append(1)
        {"fill": fill, "empty": lambda: os.unlink(filler), None: lambda: None}[moments.get(len(calls))]()
        return iterate(self)
    PPO.iterate = hooked
    start = ["--resume", run] if not words else [*words, "--run-dir", run]
    out, err = io.StringIO() if log is None else open(log, "w"), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.run(["train", *start])
    if os.path.exists(filler):
        os.unlink(filler)
    with open(os.path.join(run, "metrics.csv"), newline="") as file:
        rows = [int(row["steps"]) for row in csv.DictReader(file)]
    path, charts = os.path.join(run, "checkpoint.safetensors"), EventAccumulator(run)
    charts.Reload()
    shown = [one.step for one in charts.Scalars("charts/SPS")] if charts.Tags()["scalars"] else []
    copies = os.path.join(run, "checkpoints")
    return {
        "status": status, "output": "" if log else out.getvalue(), "errors": err.getvalue(), "rows": rows,
        "checkpoint": read_checkpoint(Path(run))["steps"] if os.path.exists(path) else None,
        "charts": shown, "copies": sorted(os.listdir(copies)) if os.path.exists(copies) else [],
        "all": [64, 128, 192, 256, 320],
    }

sizes = ["--num-envs=2", "--num-steps=32", "--num-minibatches=1", "--update-epochs=1", "--backend=serial"]
words = ["CartPole-v1", *sizes, "--total-steps=320"]
found, log = {}, None
found["full for a while"] = train("a", {2: "fill", 5: "empty"}, *words, "--checkpoint-every=64")
found["full to the end"] = train("b", {2: "fill"}, *words)
found["full to the end, resumed"] = train("b", {})
found["full from the first checkpoint"] = train("c", {1: "fill"}, *words)
found["full from the first checkpoint, resumed"] = train("c", {})
console.PLAIN_EVERY_S = 0.0  # it says something after each iteration
log = os.path.join(folder, "log")
found["its output there, too"] = train("d", {2: "fill", 5: "empty"}, *words)
print(json.dumps(found))
"""
