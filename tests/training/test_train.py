"""`muster.train`: the command in Python, with objects in the place of names."""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

import muster as package
from command import muster
from muster.algorithms import ActorCritic, PPOConfig, head_of, masked
from muster.errors import ConfigError, RecipeError, UsageError
from muster.training.checkpoints import read_checkpoint

SMALL: dict[str, Any] = {
    "total_steps": 32, "num_envs": 2, "num_steps": 8, "num_minibatches": 1, "update_epochs": 2, "backend": "serial",
}  # fmt: skip


class Walk(gym.Env[Any, Any]):
    """Episodes of 5 steps, with a part that counts them and a part that does not change."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012  # as all envs have it
    observation_space = spaces.Dict(at=spaces.Box(0, 9, (2,), np.float32), sort=spaces.Discrete(3))
    action_space = spaces.Discrete(2)

    def __init__(self, length: int = 5, render_mode: str | None = None) -> None:
        self.length, self.render_mode = length, render_mode

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.at = np.zeros(2, np.float32)
        return {"at": self.at, "sort": 1}, {}

    def step(self, action: Any) -> Any:
        self.at = self.at + 1
        return {"at": self.at, "sort": 1}, float(action), False, bool(self.at[0] >= self.length), {}

    def render(self) -> Any:
        return np.full((16, 16, 3), 20, np.uint8)


class Doubled(gym.RewardWrapper[Any, Any]):
    def reward(self, reward: Any) -> Any:
        return 2 * reward


class Own(nn.Module):
    """The smallest network of one's own."""

    def __init__(self, observation_space: Any, action_space: Any) -> None:
        super().__init__()
        self.head = head_of(action_space)
        self.actor, self.critic = nn.Linear(5, self.head.num_params), nn.Linear(5, 1)

    def forward(self, obs: Any, masks: Any = None, memory: Any = None) -> Any:
        seen = torch.cat([obs["at"], nn.functional.one_hot(obs["sort"], 3)], -1)
        return masked(self.actor(seen), masks), self.critic(seen).squeeze(-1)

    def decide(self, obs: Any, masks: Any, memory: Any) -> Any:
        return self.forward(obs, masks)[0], None


class OwnOfAgents(ActorCritic):
    def __init__(self, observation_space: Any, action_space: Any) -> None:
        super().__init__(observation_space, action_space, hidden_sizes=(3,))


class NoDecide(Own):
    decide = None  # type: ignore[assignment]


class NoForward(Own):
    forward = nn.Module.forward


class Wide(Own):
    def forward(self, obs: Any, masks: Any = None, memory: Any = None) -> Any:
        params, values = super().forward(obs, masks)
        return params, values.unsqueeze(-1)


def weights_in(run: Path) -> list[torch.Tensor]:
    state = read_checkpoint(run)
    learners = state["teams"].values() if "teams" in state else [state]
    return [one for learner in learners for one in learner["policy"].values()]


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture of each run would take most of the time."""
    monkeypatch.setattr("muster.training.runs.learning_curve", lambda *paths, **options: None)


HERE = str(Path(__file__).resolve())
MPE = "pettingzoo/mpe/simple_spread_v3"


@pytest.mark.parametrize(
    ("env", "words", "options"),
    [
        (
            "CartPole-v1",
            ["CartPole-v1", "--eval-every=16", "--eval-episodes=1"],
            {"eval_every": 16, "eval_episodes": 1},
        ),
        (
            Walk,
            [f"{HERE}:Walk", "--kwargs", '{"length": 3}', f"--wrapper={HERE}:Doubled", f"--policy={HERE}:Own"],
            {"env_kwargs": {"length": 3}, "wrappers": [Doubled], "policy": Own},
        ),
        (MPE, [MPE, f"--policy={HERE}:OwnOfAgents", "--critic=own"], {"policy": OwnOfAgents, "critic": "own"}),
    ],
    ids=["an id", "objects", "agents"],
)
def test_python_and_the_command_leave_equal_weights_and_metrics(tmp_path: Path, env: Any, words: Any, options: Any):
    if env == MPE:
        pytest.importorskip("mpe2")
    sizes = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    result = muster("train", *words, *sizes, "--seed=3", "--run-dir", str(tmp_path / "a"))
    assert result.exit_code == 0, result.output
    run = package.train(env, SMALL, seed=3, run_dir=tmp_path / "b", **options)
    pairs = list(zip(weights_in(tmp_path / "a"), weights_in(run.path), strict=True))
    assert pairs
    assert all(torch.equal(one, other) for one, other in pairs)
    timed = ("seconds", "steps_per_second", "share_envs", "share_acting", "share_learning")
    by_command, by_call = (
        {name: column for name, column in one.metrics.items() if name not in timed}
        for one in (type(run)(tmp_path / "a"), run)
    )
    np.testing.assert_equal(by_call, by_command)
    assert by_call["steps"].tolist() == [16, 32]
    assert run.policy.steps == 32


def test_a_run_shows_what_it_has_come_to(tmp_path: Path):
    run = package.train(Walk, SMALL, run_dir=tmp_path / "r")
    assert run.plot()._repr_png_().startswith(b"\x89PNG")
    assert run.film(max_steps=3).stat().st_size > 0
    with run.policy.make_vec(2, backend="serial") as envs:
        obs, _ = envs.reset(seed=0)
        assert envs.action_space.contains(run.policy(obs))


def test_a_callback_that_returns_false_ends_a_run_that_is_saved(tmp_path: Path):
    seen: list[dict[str, float]] = []
    run = package.train(Walk, SMALL, run_dir=tmp_path / "r", callback=lambda metrics: seen.append(metrics) or False)
    assert [metrics["steps"] for metrics in seen] == [16]
    assert seen[0].keys() == run.metrics.keys()
    assert run.policy.steps == 16
    assert package.train(Walk, resume=run.path, callback=seen.append).metrics["steps"].tolist() == [16, 32]
    assert [metrics["steps"] for metrics in seen] == [16, 32]


def interrupts(metrics: dict[str, float]) -> None:
    signal.raise_signal(signal.SIGINT)


def raises(metrics: dict[str, float]) -> None:
    raise RuntimeError("no more")


@pytest.mark.parametrize(("callback", "error"), [(raises, RuntimeError), (interrupts, KeyboardInterrupt)])
def test_what_a_callback_raises_leaves_a_run_that_is_saved(tmp_path: Path, callback: Any, error: type):
    with pytest.raises(error) as caught:
        package.train(Walk, SMALL, run_dir=tmp_path / "r", callback=callback)
    if callback is raises:
        assert caught.traceback[-1].name == "raises"
    assert package.load_policy(tmp_path / "r").steps == 16


@pytest.mark.parametrize(
    ("policy", "sentence"),
    [
        (NoDecide, "It has no decide(obs, masks, memory), which returns the parameters [B, P] of the actions, "),
        (NoForward, "It has no forward(obs, masks=None, memory=None), which returns the parameters [B, P] and the "),
        (Wide, "forward returned the shapes [[2, 2], [2, 1]] for 2 observations, expected [[2, 2], [2]]. "),
        (lambda *spaces: 3, "It has no parameters: it is no torch.nn.Module. "),
    ],
)
def test_a_network_without_a_piece_is_one_sentence_at_the_start(tmp_path: Path, policy: Any, sentence: str):
    with pytest.raises(UsageError, match="is no network that can be trained here") as caught:
        package.train(Walk, SMALL, policy=policy, run_dir=tmp_path / "r")
    assert sentence in str(caught.value)
    assert not (tmp_path / "r").exists()


def test_objects_that_no_name_finds_are_handed_over_again(tmp_path: Path):
    network, env = Own(Walk.observation_space, Walk.action_space), functools.partial(Walk, 4)
    network.lock = threading.Lock()  # type: ignore[assignment]  # which cannot be copied
    before = torch.get_rng_state()
    run = package.train(env, SMALL, policy=network, wrappers=[lambda env: env, lambda env: Doubled(env)],
                        run_dir=tmp_path / "r")  # fmt: skip
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(network.actor.weight, weights_in(run.path)[0])
    obs = {"at": np.ones(2, np.float32), "sort": 1}
    assert run.policy(obs) == package.load_policy(run.path, policy=network)(obs)
    for call in (
        functools.partial(package.load_policy, run.path, trust=True),
        functools.partial(package.train, resume=run.path, total_steps=64),
        functools.partial(package.train, env, resume=run.path, total_steps=64),
    ):
        with pytest.raises(UsageError, match="Hand it over again: "):
            call()
    twice = [lambda env: env, Doubled]  # whatever their names
    again = package.train(lambda: Walk(4), resume=run.path, policy=network, wrappers=twice, total_steps=48)
    assert again.policy.steps == 48
    with pytest.raises(ConfigError, match=r"env must be '.*', which the run in .* has settled, got 'CartPole-v1'"):
        package.train("CartPole-v1", resume=run.path)


def test_a_network_that_is_handed_over_again_goes_on(tmp_path: Path):
    network = Own(Walk.observation_space, Walk.action_space)
    run = package.train(Walk, SMALL, policy=network, run_dir=tmp_path / "r")
    reached = network.actor.weight.detach().clone()
    fresh, first = Own(Walk.observation_space, Walk.action_space), list[float]()
    again = package.train(Walk, resume=run.path, policy=fresh, total_steps=48, learning_rate=1e-30,
                          callback=lambda metrics: first.append(metrics["steps"]))  # fmt: skip
    assert first == [48]
    torch.testing.assert_close(fresh.actor.weight.detach(), reached)
    assert again.policy.steps == 48


def test_a_policy_that_has_moved_is_handed_over_by_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_net.py").write_text("from muster.algorithms import ActorCritic as Network\n")
    words = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    result = muster("train", "CartPole-v1", *words, "--run-dir=run", "--policy=own_net.py:Network")
    assert result.exit_code == 0, result.output
    (tmp_path / "own_net.py").rename(tmp_path / "moved_net.py")
    said = r"there is no file .*own_net\.py\. .* muster\.load_policy\(run, policy=\.\.\.\)"
    with pytest.raises(RecipeError, match=said):
        package.load_policy("run", trust=True)
    with pytest.raises(RecipeError, match=said):
        package.train(resume="run", total_steps=64, trust=True)
    with pytest.raises(ConfigError, match="or hand the policy over by policy="):
        package.load_policy("run")
    assert package.load_policy("run", policy=ActorCritic)(np.zeros(4, np.float32)) in (0, 1)
    assert package.train(resume="run", policy=ActorCritic, total_steps=64).metrics["steps"][-1] == 64
    result = muster("train", "--resume=run", "--policy=moved_net.py:Network", "--total-steps=96")
    assert result.exit_code == 2  # that one is where its name leads
    for name in ("own_envs", "other_envs"):  # also in the working directory alone
        (tmp_path / f"{name}.py").write_text(
            "import gymnasium\n\n\ndef make():\n    return gymnasium.make('CartPole-v1')\n"
        )
    assert muster("train", "own_envs:make", *words, "--run-dir=own").exit_code == 0
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one != str(tmp_path)])
    monkeypatch.delitem(sys.modules, "own_envs")
    result = muster("train", "other_envs:make", "--resume=own", "--total-steps=96")
    assert (result.exit_code, "has settled" in result.stderr) == (2, True), result.output
    assert package.load_policy("run", trust=True).steps == 64


def test_several_seeds_are_several_runs(tmp_path: Path):
    runs = package.train(Walk, {**SMALL, "total_steps": 16}, seeds=2, policy=Own, run_dir=tmp_path)
    assert [run.path.name for run in runs] == ["seed0", "seed1"]
    with pytest.raises(ConfigError, match="policy must be with seeds a function"):
        package.train(Walk, SMALL, seeds=2, policy=Own(Walk.observation_space, Walk.action_space))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"env": 3}, "env must be a name, or something that can be called, got 3"),
        ({}, "env must be named, such as CartPole-v1, unless resume names a run to go on with, got None"),
        (
            {"env": Walk, "config": 3},
            "config must be a dict of options, a PPOConfig, or the path of a TOML file, got 3",
        ),
        ({"env": Walk, "total_step": 3}, "total_step is no option of the env or of a run (did you mean total_steps?)"),
        ({"env": Walk, "total_steps": "8"}, "total_steps must be a whole number of at least 1, got '8'"),
        ({"env": Walk, "close_timeout": -1}, "close_timeout must be a number above 0 or None, got -1"),
        ({"env": Walk, "wrappers": 3}, "wrappers[0] must be a name, or something that can be called, got 3"),
        ({"env": Walk, "num_envs": 0}, "num_envs must be a whole number of at least 1, got 0"),
        (
            {"env": Walk, "critic": "own", "backend": "serial"},
            "critic must be left out, as it is for envs with agents, and ",
        ),
        ({"env": Walk, "env_kwargs": {"length": object}}, "env_kwargs must be values that JSON has, "),
        (
            {"env": Walk, "log": [print]},
            "log must be names, such as csv and module:function; a function itself is callback=",
        ),
    ],
)
def test_values_that_make_no_sense_are_named(tmp_path: Path, options: Any, message: str):
    with pytest.raises(ConfigError) as caught:
        package.train(**options, run_dir=tmp_path / "r")
    assert str(caught.value).startswith(message)


def test_a_config_may_be_options_or_a_file(tmp_path: Path):
    (tmp_path / "run.toml").write_text('num-envs = 2\nnum-steps = 4\nnum_minibatches = 1\nbackend = "serial"\n')
    run = package.train(Walk, tmp_path / "run.toml", total_steps=8, run_dir=tmp_path / "a")
    assert run.policy.plan.config.ent_coef == 0.01  # of the preset
    config = PPOConfig(total_steps=8, num_envs=2, num_steps=4, num_minibatches=1)
    assert package.train(Walk, config, backend="serial", run_dir=tmp_path / "b").policy.plan.config == config


@pytest.mark.parametrize("output", ["logs", "quiet"])
def test_what_workers_print_goes_into_the_runs_folder(tmp_path: Path, output: str, capfd: pytest.CaptureFixture[str]):
    def make() -> gym.Env[Any, Any]:
        if os.getpid() != here:
            print("an env is made")
        return gym.make("CartPole-v1")

    here = os.getpid()  # which may make one, too, for the film
    options = {**SMALL, "backend": "process", "num_workers": 1, "eval_every": 16, "eval_episodes": 1}
    package.train(make, run_dir=tmp_path / "run", worker_output=output, **options)
    log = tmp_path / "run" / "logs" / "worker-0.log"
    assert log.exists() == (output == "logs")
    assert "an env is made" not in capfd.readouterr().out
    assert "worker_output" not in (tmp_path / "run" / "config.json").read_text()
    with pytest.raises(ConfigError, match="worker_output must be left out with collectors"):
        package.train(make, run_dir=tmp_path / "other", worker_output=output, num_collectors=1, total_steps=1)
