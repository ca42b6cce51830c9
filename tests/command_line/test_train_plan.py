"""The words of `muster train`: where values come from, which envs it takes, and what it says to what makes no sense."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from command import muster
from local_nodes import LocalNodes
from muster.algorithms import PPOConfig
from muster.command_line.train_plan import training_order
from muster.training import runs
from muster.training.checkpoints import read_checkpoint
from muster.training.plan import plan_of
from muster.training.presets import preset_named

ENV = """
import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv

def make_env(length=30):
    return gym.wrappers.TimeLimit(CartPoleEnv(), length)

class Doubled(gym.RewardWrapper):
    def reward(self, reward):
        return 2 * reward

class OldReset(CartPoleEnv):
    def reset(self, **arguments):
        return super().reset()[0]

def exits():
    raise SystemExit(3)

existing = CartPoleEnv()

def tripled(env):
    return gym.wrappers.TransformReward(env, lambda reward: 3 * reward)
"""
SHORT = ("--total-steps", "16", "--num-envs", "2", "--num-steps", "8", "--num-minibatches", "1", "--backend", "serial")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder, with a module of its own in it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_env", raising=False)
    (tmp_path / "own_env.py").write_text(ENV)
    return tmp_path


def test_options_win_over_the_file_and_this_over_the_preset(folder: Path):
    (folder / "run.toml").write_text(
        'num-envs = 4\nlearning_rate = 1e-4\ntotal_steps = "10k"\nhidden_sizes = [8, 9]\nanneal_lr = false\n'
        'num_workers = 1\nwrapper = ["own_env:Doubled"]\n[env_kwargs]\nlength = 7\n'
    )
    words = ("own_env.py:make_env", "--config", "run.toml", "--learning-rate", "3e-4", "--seed=5")
    plan = training_order(words).plan
    preset = PPOConfig(**preset_named(plan.preset).config)
    changed = {"num_envs": 4, "total_steps": 10_000, "hidden_sizes": (8, 9), "anneal_lr": False}
    assert plan.config == dataclasses.replace(preset, **changed, learning_rate=3e-4, seed=5)
    assert plan.env == f"{folder}/own_env.py:make_env"
    assert (plan.env_kwargs, plan.wrappers, plan.options) == ({"length": 7}, ("own_env:Doubled",), {"num_workers": 1})
    more = ("--wrapper", "own_env:tripled", "--env-kwargs", '{"length": 8}', "--num-workers", "2", "--anneal-lr")
    plan = training_order((*words, *more)).plan
    assert (plan.env_kwargs, plan.wrappers, plan.options) == ({"length": 8}, ("own_env:tripled",), {"num_workers": 2})
    assert plan.config.anneal_lr is True


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--num-collectors 2 --num-workers 2", "--num-workers must be left out with collectors, got 2"),
        ("--num-collectors 2 --caller-steps", "--caller-steps must be left out with collectors, got True"),
        ("--num-collectors 2 --backend serial", "--backend must be left out with collectors, got 'serial'"),
        (
            "--num-collectors 2 --step-timeout 3",
            "--step-timeout must be left out with collectors, which have collect_timeout, got 3.0",
        ),
        ("--num-collectors 2 --nodes 3", "--nodes must be left out where no cluster is named, got 3"),
        ("--cluster ray", "--cluster must be left out without num_collectors, got 'ray'"),
        ("--resume r --num-collectors 2", "--num-collectors must be None, which the run in r has settled, got 2"),
    ],
)
def test_options_that_do_not_go_with_collectors_are_refused_by_name(folder: Path, run: Path, words: str, said: str):
    shutil.copytree(run, folder / "r")
    result = muster("train", *(() if "--resume" in words else ("CartPole-v1",)), *words.split())
    assert result.exit_code == 2
    assert said in result.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["own_env.py", "r"]


def test_a_run_by_collectors_goes_on_by_them(folder: Path):
    words = ("--num-collectors", "2", "--context", "fork", "--run-dir", "r", *SHORT[:-2])
    result = muster("train", "own_env:make_env", *words, "--wrapper", "own_env:Doubled", "--kwargs", '{"length": 4}')
    assert result.exit_code == 0, result.output
    assert "2 envs on 2 collectors, 1 thread of torch, preset" in result.stdout
    assert plan_of(folder / "r").collectors == {"num_collectors": 2}
    result = muster("train", "--resume", "r", "--trust", "--total-steps", "32")
    assert result.exit_code == 0, result.output
    assert "32 steps, from step 16, seed 0, 2 envs on 2 collectors" in result.stdout
    assert "mean return  8.0 over" in result.stdout  # of 4 steps, doubled
    assert muster("eval", "r", "--episodes", "2", "--trust").exit_code == 0


@pytest.mark.slow
def test_collectors_at_home_and_on_two_nodes_leave_the_same_weights(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runs, "RayCluster", lambda nodes, runtime_env: LocalNodes(nodes))
    left = []
    for run, words in (("a", ()), ("b", ()), ("c", ("--cluster", "ray", "--nodes", "2"))):
        size = ("--total-steps", "6000", "--run-dir", run)
        assert muster("train", "CartPole-v1", "--num-collectors", "4", *size, *words).exit_code == 0
        left.append(read_checkpoint(folder / run)["policy"])
    for name, weights in left[0].items():
        assert torch.equal(weights, left[1][name])
        assert torch.equal(weights, left[2][name])


def test_a_run_on_a_cluster_goes_on_here_where_there_is_no_ray(folder: Path, monkeypatch: pytest.MonkeyPatch):
    words = ("--num-envs", "2", "--num-steps", "16", "--num-minibatches", "1", "--run-dir", "r")
    assert muster("train", "CartPole-v1", "--total-steps", "32", "--num-collectors", "1", *words).exit_code == 0
    config = json.loads((folder / "r/config.json").read_text())
    config["collectors"] |= {"cluster": "ray", "nodes": 2, "working_dir": "."}
    (folder / "r/config.json").write_text(json.dumps(config))
    monkeypatch.setitem(sys.modules, "ray", None)
    on = ("train", "--resume", "r", "--total-steps", "64", "--trust")
    refused = muster(*on)
    assert refused.exit_code == 1
    assert "--cluster none goes on here" in refused.output
    assert "needs Ray. Install it with: pip install 'muster-rl[ray]'" in refused.output
    assert muster(*on, "--cluster", "none").exit_code == 0
    assert "cluster" not in json.loads((folder / "r/config.json").read_text())["collectors"]


def test_the_file_may_name_the_env(folder: Path):
    (folder / "run.toml").write_text('env = "CartPole-v1"\nkwargs = {sutton_barto_reward = true}\n')
    plan = training_order(("--config", "run.toml", "--num-workers", "auto")).plan
    assert (plan.env, plan.env_kwargs, plan.options) == (
        "CartPole-v1",
        {"sutton_barto_reward": True},
        {"num_workers": "auto"},
    )


def test_options_may_stand_before_the_env():
    plan = training_order(("--num-steps", "1k", "--no-anneal-lr", "--target-kl", "0.1", "CartPole-v1")).plan
    assert (plan.env, plan.config.num_steps, plan.config.target_kl) == ("CartPole-v1", 1000, 0.1)
    assert training_order(("CartPole-v1", "--num_steps", "9", "--target-kl=None")).plan.config.target_kl is None


def test_the_first_line_says_what_differs_from_the_preset(folder: Path):
    result = muster("train", "CartPole-v1", *SHORT, "--gamma", "0.9", "--run-dir", "r")
    assert result.exit_code == 0, result.output
    expected = "preset 'classic control', but num_envs=2 num_steps=8 num_minibatches=1 gamma=0.9\n"
    assert result.stdout.splitlines(keepends=True)[0].endswith(expected)


@pytest.mark.parametrize(
    "env",
    [
        pytest.param("own_env:make_env", marks=pytest.mark.slow),
        pytest.param("own_env.py:make_env", marks=pytest.mark.slow),
        "{folder}/own_env.py:make_env",
    ],
)
def test_a_run_of_ones_own_env_is_evaluated_and_goes_on_from_anywhere(
    folder: Path, monkeypatch: pytest.MonkeyPatch, env: str
):
    env = env.format(folder=folder)
    own = ("--wrapper", "own_env:Doubled", "--wrapper", "own_env.py:tripled", "--kwargs", '{"length": 3}')
    in_worker = ("--backend", "process", "--num-workers", "1", "--context", "fork")
    result = muster("train", env, *own, *SHORT[:-2], *in_worker, "--run-dir", "r")
    assert result.exit_code == 0, result.output
    plan = plan_of(folder / "r")
    assert plan.options == {"num_workers": 1, "context": "fork"}
    if ".py" in env:
        (folder / "elsewhere").mkdir()
        monkeypatch.chdir(folder / "elsewhere")
    refused = muster("eval", f"{folder}/r")
    assert refused.exit_code == 2
    assert f"{folder}/r names code, or what lies outside of it: " in refused.stderr
    assert "or --trust on a command line" in refused.stderr
    assert refused.stderr == muster("train", "--resume", f"{folder}/r").stderr.replace("muster train", "muster eval")
    result = muster("eval", f"{folder}/r", "--episodes", "2", "--trust")
    assert re.search(r"mean return +│ 18\.0, deviation 0\.0", result.stdout), result.output
    again = ("--seed", "0", "--env-kwargs", '{"length": 3}', "--num-workers", "2", "--learning-rate", "1e-3")
    result = muster("train", "--resume", f"{folder}/r", *again, "--total-steps", "48", "--trust")
    assert result.exit_code == 0, result.output
    assert json.loads((folder / "r" / "config.json").read_text())["make_vec"] == {"num_workers": 2, "context": "fork"}


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (
            "CartPole-v1 --num-minibatches 3k",
            2,
            "--num-minibatches must be at most 512, for each to have 2",
        ),
        ("CartPole-v1 --backend serial --num-workers 2", 2, "--num-workers must be left out with the serial backend"),
        ("CartPole-v1 --caller-steps --step-timeout 3", 2, "--step-timeout must be left out with caller steps: the"),
        ("CartPole-v1 --num-envs 1e18", 1, "there is not enough memory; choose smaller numbers (MemoryError"),
        ("own_env.py:existing", 2, "Every env is built where it runs; hand over a factory instead:\n"),
        ("CartPole-v1 --wrapper own", 2, "'own' must be module:name or file.py:name of something"),
        ("Pendulum-v0", 1, "is deprecated. Please use `Pendulum-v1` instead."),
    ],
)
def test_what_no_env_can_be_made_of_is_said(folder: Path, words: str, status: int, said: str):
    result = muster("train", *words.split())
    assert (result.exit_code, result.stdout) == (status, "")
    assert result.stderr.startswith("muster train: error: ")
    assert said in result.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("num_stesp = 3", "num_stesp is no option of the env or of a run (did you mean num_steps?)"),
        ("run_dir = 'r'", "run_dir is no option of the env or of a run"),
        ("num_steps = 1.5", "num_steps must be a whole number of at least 1, got 1.5"),
        ('num_steps = "ten"', "num_steps must be a whole number of at least 1, got 'ten'"),
        ("anneal-lr = 1", "anneal-lr must be True or False, got 1"),
        ("env_kwargs = 3", "env_kwargs must be a dict"),
        ("num_steps = [", "cannot be read: Invalid value (at end of document)"),
    ],
)
def test_a_mistake_in_the_file_names_it_and_the_key(folder: Path, text: str, said: str):
    (folder / "run.toml").write_text(text)
    result = muster("train", "CartPole-v1", "--config", "run.toml")
    assert result.exit_code == 2
    assert re.fullmatch(rf"muster train: error: (--config )?run.toml:? {re.escape(said)}.*\n", result.stderr)


def test_a_run_that_goes_on_keeps_what_it_has_settled(folder: Path):
    assert muster("train", "own_env:make_env", *SHORT, "--run-dir", "r").exit_code == 0
    for words, settled in (
        (("--seed", "3", "--gamma", "0.5"), "--seed must be 0, which the run in r has settled, got 3"),
        (("CartPole-v1",), "ENV must be 'own_env:make_env', which the run in r has settled, got 'CartPole-v1'"),
        (("--kwargs", '{"length": 4}'), "--env-kwargs must be {}, which the run in r has settled, got {'length': 4}"),
        (
            ("--wrapper", "own_env:Doubled"),
            "--wrapper must be (), which the run in r has settled, got ('own_env:Doubled',)",
        ),
        (("--run-dir", "other"), "--run-dir must be left out with resume: r goes on in its own folder, got 'other'"),
    ):
        result = muster("train", "--resume", "r", *words)
        assert result.exit_code == 2
        assert settled in result.stderr
    config = json.loads((folder / "r" / "config.json").read_text())
    older = {name: value for name, value in config.items() if name not in ("collectors", "run")}
    (folder / "r" / "config.json").write_text(json.dumps(older))
    again = ("own_env:make_env", *SHORT, "--run-dir", "r", "--total-steps", "32")
    assert "--trust" in muster("train", "--resume", "r", *again[1:]).stderr
    result = muster("train", "--resume", "r", *again)  # which names the env
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"env": 3}, "r/config.json is not as this version of muster train writes it: look at 'env'."),
        ({"wrappers": [3]}, "look at 'wrappers'."),
        ({"make_vec": {"num_envs": 3}}, "look at 'make_vec.num_envs'."),
        (
            {"make_vec": {"num_workers": "x"}},
            "num_workers must be a whole number of at least 1, 'auto' or None, got 'x'",
        ),
        ({"run": {"keep": "x"}}, "r/config.json: keep must be a whole number of at least 1 or None, got 'x'"),
        ({"run": [1]}, "look at 'run'."),
        ({"run": {"worker_init": "a:b"}}, "look at 'run.worker_init'."),
        ({"worker_env": {"A": "b"}, "callback": "a:b"}, "look at 'worker_env', 'callback'."),
        ({"spaces": 3, "with": []}, "look at 'with', 'spaces'."),
        ({"algorithm": ["PPO"]}, "look at 'algorithm'."),
        ({"collectors": {"num_envs": 3}}, "look at 'collectors.num_envs'."),
        ({"collectors": {"num_collectors": 2, "nodes": 2}}, "r/config.json: nodes must be left out where no cluster"),
        ({"gamma": 5}, "r/config.json: gamma must be a number from 0 to 1, got 5"),
        ({"hidden_sizes": [5]}, "r/checkpoint.safetensors is not that of the run in config.json: RuntimeError: Error"),
    ],
)
def test_a_run_folder_that_was_edited_is_refused_in_one_line(
    folder: Path, run: Path, change: dict[str, Any], said: str
):
    shutil.copytree(run, folder / "r")
    config = json.loads((folder / "r" / "config.json").read_text())
    (folder / "r" / "config.json").write_text(json.dumps(config | change))
    result = muster("train", "--resume", "r", "--total-steps", "99")
    assert result.exit_code == (1 if "checkpoint.safetensors" in said else 2)
    assert said in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of CartPole-v1, to be copied."""
    path = tmp_path_factory.mktemp("run") / "r"
    assert muster("train", "CartPole-v1", *SHORT, "--run-dir", str(path)).exit_code == 0
    return path
