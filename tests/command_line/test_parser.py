"""The options of the commands: their help, and what is said to words that make no sense, before anything starts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from command import muster
from muster.algorithms import PPOConfig


def test_help_lists_each_field_of_the_algorithm_with_its_help():
    shown = " ".join(muster("train", "--help").stdout.split())
    for field in dataclasses.fields(PPOConfig):
        assert f"--{field.name.replace('_', '-')}" in shown
        assert field.metadata["about"] in shown
    assert "`muster train ENV --help` shows those of that env's preset" in shown
    assert "env steps, rounded up to whole rollouts (default: 200_000)" in shown


def test_help_with_an_env_has_its_presets_values():
    shown = " ".join(muster("train", "LunarLander-v3", "--help").stdout.split())
    assert "those for LunarLander-v3, by the preset 'Box2D'." in shown
    assert "whole rollouts (default: 1_000_000)" in shown
    assert "each step (default: 0.995)" in shown
    assert "as far as they are known (default: True)" in shown


@pytest.mark.parametrize("command", ["", "train", "eval", "plot", "doctor", "bench"])
def test_help_keeps_to_the_terminals_width(command: str):
    for columns in (80, 120):
        result = muster(*command.split(), "--help", columns=columns)
        assert result.exit_code == 0
        assert result.stdout.startswith(f"usage: muster {command}")
        assert max(map(len, result.stdout.splitlines())) <= columns
        assert result.stdout.isascii()  # for streams of another encoding


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("trian", "muster: error: there is no command 'trian' (did you mean train?)"),
        ("train", "ENV must be named, such as CartPole-v1"),
        ("train A-v1 --num-step 3", "there is no option --num-step (did you mean --num-steps?)"),
        ("train A-v1 --algo dqn", "there is no option --algo: PPO trains a single agent, MAPPO several, and IPPO"),
        ("train A-v1 --self-play", "there is no option --self-play: a callback does it, see tasks/self-play"),
        ("train A-v1 --wandb", "there is no option --wandb; muster train --help lists them\n"),
        ("train A-v1 --num_steps x", "--num-steps must be a whole number of at least 1, got 'x'"),
        ("train A-v1 --num-steps", "--num-steps needs a value; muster train --help says which"),
        ("train A-v1 --kwargs", "--env-kwargs needs a value"),
        ("train A-v1 --anneal-lr=False", "--anneal-lr takes no value: write --anneal-lr, or --no-anneal-lr"),
        ("train A-v1 --anneal-lr False", "'False' is one word too many"),
        ("train A-v1 --no-trust", "there is no option --no-trust (did you mean --trust?)"),
        ("train --hidden-sizes 64 A-v1", "each entry a whole number of at least 1, got (64, 'A-v1')"),
        ("train A-v1 --env-kwargs {", "--env-kwargs must be a dict, in JSON such as '{\"size\": 5}', got '{'"),
        ("train A-v1 --eval-every 0", "--eval-every must be a whole number of at least 1 or None, got 0"),
        ("train A-v1 --keep 2", "--keep must be left out where no copies of the checkpoint are made, got 2"),
        ("train A-v1 --config absent.toml", "--config absent.toml cannot be read: No such file or directory"),
        ("doctor --json=3", "--json takes no value: write --json\n"),
        ("doctor --num-envs 2 --json", "--num-envs needs an ENV"),
        ("eval", "name the folder of a RUN"),
        ("eval . --episodes 0", "--episodes must be a whole number of at least 1, got 0"),
        ("plot", "name the folder of a RUN, or several"),
        ("bench", "name an ENV to measure"),
        ("bench A-v1 --num-workers 9", "--num-workers must be at most 8 for 8 envs, as a worker needs an env, got 9"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(words: str, said: str):
    result = muster(*words.split())
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith(" ".join(["muster", *words.split()[:1]]) if "trian" not in words else "muster: ")
    assert said in result.stderr


def test_the_folders_of_runs_may_stand_around_options(tmp_path: Path):
    result = muster("plot", str(tmp_path / "a"), "--output", "x.png", str(tmp_path / "b"))
    assert f"{tmp_path}/a holds no run" in result.stderr
    assert "too many" not in result.stderr
