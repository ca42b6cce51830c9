"""SIGTERM and Ctrl-C at any moment: what is saved is one iteration's state, and the run goes on from it."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

import muster
import programs
from muster.algorithms import PPO
from muster.training.checkpoints import read_checkpoint
from muster.training.plan import plan_of
from slow import slow

MUSTER = ("-c", "from muster.cli import main; main()")
SIZE = ("--num-envs", "2", "--total-steps", "1000000", "--num-workers", "1", "--num-steps", "32")


def start(*arguments: str) -> programs.Program:
    return programs.start(*MUSTER, *arguments, imports=programs.TORCH)


def ended(process: subprocess.Popen[str], code: int) -> str:
    """What the process has printed once it has ended with this exit code."""
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (code, ""), output
    return output


def wait_for_rows(process: subprocess.Popen[str], folder: Path) -> None:
    metrics = folder / "metrics.csv"
    while not metrics.exists() or metrics.read_text().count("\n") < 3:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)


def steps_saved(folder: Path) -> int:
    return int(read_checkpoint(folder)["steps"])


def run(*words: str) -> subprocess.CompletedProcess[str]:
    done: subprocess.CompletedProcess[str] = programs.run(*words, imports=programs.TORCH, timeout=300)
    return done


def states_of(folder: Path, last_step: int) -> dict[int, dict[str, Any]]:
    """The state after each iteration of the same run, never interrupted, by its steps."""
    config = plan_of(folder).config
    options: dict[str, Any] = {"backend": "serial", "autoreset_mode": "same_step", "replayable": True}
    with muster.make_vec("CartPole-v1", config.num_envs, **options) as envs:
        ppo = PPO(envs, config)
        states = {0: ppo.state_dict()}
        while ppo.steps < last_step:
            ppo.iterate()
            states[ppo.steps] = ppo.state_dict()
    return states


def assert_whole(folder: Path, states: dict[int, dict[str, Any]]) -> None:
    saved = read_checkpoint(folder)
    for one, other in zip(tree_leaves(saved), tree_leaves(states[saved["steps"]]), strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    with (folder / "metrics.csv").open(newline="") as file:
        steps = [int(row["steps"]) for row in csv.DictReader(file)]
    assert steps == sorted(states)[1 : len(steps) + 1]
    assert (steps or [0])[-1] == saved["steps"]


@pytest.mark.slow
def test_it_ends_the_training_wherever_it_comes_and_never_the_saving(tmp_path: Path):
    done = run("-c", MOMENTS, str(tmp_path))
    assert done.returncode == 0, done.stderr
    exits = json.loads(done.stdout.splitlines()[-1])
    assert exits == {"update": 143, "collect": 143, "write": 143, "workers": 143, "save": 130, "eval": 143, "thread": 0}
    assert done.stdout.count("Stopped by SIGTERM.") == 4
    assert done.stderr.count("muster eval: stopped by SIGTERM") == 1
    assert done.stdout.count("Stopped by Ctrl-C.") == 1
    folders = [tmp_path / name for name in exits if name != "eval"]
    states = states_of(folders[0], 256)
    assert [steps_saved(folder) for folder in folders] == [128, 64, 192, 64, 128, 256]
    for folder in folders:
        assert_whole(folder, states)


# Sends signals from within a method at its n-th call; prints the exit code of each run.
MOMENTS = """
import json, os, signal, sys, threading, torch
from muster import cli
from muster.algorithms import PPO
from muster.algorithms.actor_critic import Explorer
from muster.training.run_folder import RunFolder
from muster.training.run_policy import RunPolicy

def terminate(*_):
    os.kill(os.getpid(), signal.SIGTERM)

def terminate_twice(*_):
    terminate()
    terminate()

def terminate_workers_first(ppo):
    for worker in ppo.envs.stats()["workers"]:
        os.kill(worker["pid"], signal.SIGTERM)
    threading.Timer(0.2, terminate).start()

def interrupt_and_terminate_the_saving(*_):
    RunFolder.save_checkpoint = lambda *arguments: (terminate(), save(*arguments))
    os.kill(os.getpid(), signal.SIGINT)

def run(name):
    sys.argv = ["muster", "train", "CartPole-v1", "--num-envs", "2", "--num-steps", "32", "--num-minibatches", "1",
                "--update-epochs", "20", "--num-workers", "1", "--total-steps", "256",
                "--run-dir", os.path.join(folder, name)]
    if name == "eval":
        sys.argv = ["muster", "eval", os.path.join(folder, "save"), "--episodes", "1000000"]
    try:
        cli.main()
    except SystemExit as end:
        exits[name] = end.code

exits, folder, save = {}, sys.argv[1], RunFolder.save_checkpoint
for name, owner, method, nth, act in (
    ("update", torch.optim.Adam, "step", 45, terminate_twice),
    ("collect", Explorer, "forward", 40, terminate),
    ("write", RunFolder, "append_metrics", 3, terminate),
    ("workers", PPO, "collect_rollout", 2, terminate_workers_first),
    ("save", torch.optim.Adam, "step", 45, interrupt_and_terminate_the_saving),
    ("eval", RunPolicy, "__call__", 50, terminate),
):
    original, calls = getattr(owner, method), []
    def hooked(self, *arguments, **options):
        calls.append(1)
        if len(calls) == nth:
            act(self)
        return original(self, *arguments, **options)
    setattr(owner, method, hooked)
    run(name)
    setattr(owner, method, original)
    RunFolder.save_checkpoint = save
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
thread = threading.Thread(target=run, args=("thread",))
thread.start()
thread.join()
print(json.dumps(exits))
"""


@pytest.mark.parametrize("how", [*slow(signal.SIGHUP, signal.SIGQUIT), "a terminal that closes"])
def test_a_hangup_and_a_quit_end_it_as_sigterm_does(tmp_path: Path, how: signal.Signals | str):
    folder = tmp_path / "run"
    if isinstance(how, signal.Signals):
        started = start("train", "CartPole-v1", *SIZE, "--run-dir", str(folder))
        wait_for_rows(started, folder)
        started.send_signal(how)
        assert f"Stopped by {how.name}." in ended(started, 128 + how)
    else:
        ours, theirs = os.openpty()
        words = ("train", "CartPole-v1", *SIZE, "--run-dir", str(folder))
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
        started = programs.start("-c", ON_A_TERMINAL, *words, imports=programs.TORCH, **streams)
        os.close(theirs)
        drain(ours, folder)
        os.close(ours)
        assert started.wait(60) == 128 + signal.SIGHUP
    assert_whole(folder, states_of(folder, steps_saved(folder)))


ON_A_TERMINAL = """
import fcntl, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from muster.cli import main
main()
"""


def drain(terminal: int, folder: Path) -> None:
    """Reads what the terminal shows until the run has rows."""
    metrics = folder / "metrics.csv"
    while not metrics.exists() or metrics.read_text().count("\n") < 3:
        os.read(terminal, 65536)


@pytest.mark.slow
def test_a_run_that_was_killed_at_its_very_beginning_is_begun_again_or_goes_on(tmp_path: Path):
    done = run("-c", KILLED_EARLY, str(tmp_path))
    assert done.returncode == 0, done.stderr
    killed, again = map(json.loads, done.stdout.splitlines()[-2:])
    assert killed == dict.fromkeys(again, -signal.SIGKILL)
    assert set(again.values()) == {0}
    states = states_of(tmp_path / "begin-RunFolder.save_checkpoint", 128)
    for name in again:
        assert_whole(tmp_path / name, states)
        assert steps_saved(tmp_path / name) == 128


# Kills runs as they call a method for the first time, then goes on with each; prints both exit codes of each.
KILLED_EARLY = """
import json, os, signal, sys
from muster import cli
from muster.algorithms import PPO
from muster.training.run_folder import RunFolder

def train(*words):
    pid = os.fork()
    if pid == 0:
        sys.stdout = open(os.devnull, "w")
        os._exit(cli.run(["train", *words]))
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def kill(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)

sizes = ["--num-envs=2", "--num-steps=32", "--num-minibatches=1", "--update-epochs=1", "--backend=serial"]
words = ["CartPole-v1", *sizes, "--total-steps=128"]
killed, again = {}, {}
for owner, method, how in (
    (RunFolder, "write_config", "begin"),  # nothing says yet what to go on with
    (RunFolder, "save_checkpoint", "begin"),
    (PPO, "iterate", "resume"),
    (RunFolder, "save_checkpoint", "resume"),
):
    name = f"{how}-{owner.__name__}.{method}"
    run = os.path.join(sys.argv[1], name)
    original = getattr(owner, method)
    setattr(owner, method, kill)
    killed[name] = train(*words, "--run-dir", run)
    setattr(owner, method, original)
    again[name] = train(*(["--resume", run] if how == "resume" else [*words, "--run-dir", run]))
print(json.dumps(killed))
print(json.dumps(again))
"""
