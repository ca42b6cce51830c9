"""`muster.load_policy`: what a run has learnt, in every place where a policy can act."""

from __future__ import annotations

import io
import json
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from rich.console import Console

import muster
from muster.algorithms import PPO, PPOConfig
from muster.errors import ConfigError, SpecMismatch, UsageError
from muster.training import runs
from muster.training.checkpoints import read_checkpoint
from muster.training.plan import TrainingPlan, plan_of

NUMBERS = spaces.Box(np.float32([-np.inf, 0]), np.float32([np.inf, 1]), (2,))
ACTIONS = {
    "Discrete": spaces.Discrete(3, start=-1),
    "Box": spaces.Box(-2, 2, (2, 1), np.float64),
    "MultiDiscrete": spaces.MultiDiscrete([2, 3]),
    "MultiBinary": spaces.MultiBinary(3),
}
OBSERVATIONS = {
    "numbers": NUMBERS,
    "float64": spaces.Box(-1, 1, (3,), np.float64),
    "image": spaces.Box(0, 255, (3, 40, 40), np.uint8),
    "choice": spaces.Discrete(5, start=2),
    "choices": spaces.MultiDiscrete([3, 4]),
    "flags": spaces.MultiBinary((2, 2)),
}


class Sampled(gym.Env[Any, Any]):
    """Random observations; takes no action that is not in its space."""

    metadata = {"render_modes": ["ansi"]}  # noqa: RUF012  # as all envs have it

    def __init__(self, observations: str, actions: str, render_mode: str | None = None) -> None:
        self.observation_space, self.action_space = OBSERVATIONS[observations], ACTIONS[actions]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        assert self.action_space.contains(action), action
        return self.observation_space.sample(), 1.0, False, False, {}


for one in OBSERVATIONS:
    for other in ACTIONS:
        gym.register(f"Sampled-{one}-{other}-v0", Sampled, kwargs={"observations": one, "actions": other})


def trained(folder: Path, env: str, *, iterations: int = 1, **options: Any) -> Path:
    """The folder of a short run."""
    sizes: dict[str, Any] = {"num_envs": 2, "num_steps": 8, "num_minibatches": 2, "update_epochs": 1}
    config = PPOConfig(total_steps=16 * iterations, **{**sizes, **options})
    plan = TrainingPlan(env, config, "numbers", options={"backend": "serial"})
    runs.train(plan, Console(file=io.StringIO()), run_dir=folder)
    return folder


@pytest.fixture(scope="module")
def cart_pole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    return trained(folder, "CartPole-v1", iterations=8, normalize_observations=True, learning_rate=0.01)


@pytest.mark.parametrize(
    ("observations", "actions"),
    [
        ("numbers", "Discrete"),
        ("float64", "Box"),
        ("image", "MultiDiscrete"),
        ("choice", "MultiBinary"),
        ("choices", "Discrete"),
        ("flags", "Box"),
    ],
)
def test_it_acts_for_one_env_and_for_many(tmp_path: Path, observations: str, actions: str):
    policy = muster.load_policy(trained(tmp_path / "run", f"Sampled-{observations}-{actions}-v0"))
    assert policy.observation_space == OBSERVATIONS[observations]
    assert policy.action_space == ACTIONS[actions]
    with policy.make_vec(3, backend="serial") as envs:
        seen, _ = envs.reset(seed=0)
        acted = policy(seen)
        assert (acted.shape, acted.dtype) == (envs.action_space.shape, policy.action_space.dtype)
        envs.step(acted)
    env = gym.make(f"Sampled-{observations}-{actions}-v0")
    for obs, expected in zip(seen, acted, strict=True):
        env.reset()
        action = policy(obs)
        np.testing.assert_allclose(action, expected, rtol=1e-5)
        assert env.action_space.contains(action)
        env.step(action)
    tensors = policy(torch.from_numpy(seen))
    assert isinstance(tensors, torch.Tensor)
    np.testing.assert_array_equal(tensors, acted)


def test_it_acts_as_the_trained_ppo_does_and_makes_no_env(cart_pole: Path, monkeypatch: pytest.MonkeyPatch):
    with muster.make_vec("CartPole-v1", 2, backend="serial", autoreset_mode="same_step") as envs:
        ppo = PPO(envs, plan_of(cart_pole).config)
        ppo.load_state_dict(read_checkpoint(cart_pole))
    monkeypatch.setattr(gym, "make", None)
    policy = muster.load_policy(str(cart_pole))
    obs = torch.randn(200, 4) * 3
    assert torch.equal(policy(obs), ppo.act(obs))
    assert len(policy(obs).unique()) == 2
    drawing = muster.load_policy(cart_pole, sample=True)
    draws = []
    for act in (drawing, drawing, lambda seen: ppo.act(seen, sample=True)):
        torch.manual_seed(0)
        draws.append(act(obs))
    assert torch.equal(draws[0], draws[1])
    assert torch.equal(draws[0], draws[2])
    assert not torch.equal(draws[0], drawing(obs))
    assert repr(policy) == f"<policy of {str(cart_pole)!r}: CartPole-v1, PPO after 128 steps>"


def test_its_network_acts_as_it_does_alone(cart_pole: Path):
    policy = muster.load_policy(cart_pole)
    obs = np.random.default_rng(0).normal(0, 2, (200, 4)).astype(np.float32)
    any_count = ({0: torch.export.Dim.DYNAMIC},)
    exported = torch.export.export(policy.network, (torch.zeros(2, 4),), dynamic_shapes=any_count).module()
    np.testing.assert_array_equal(exported(torch.from_numpy(obs)), policy(obs))


@pytest.mark.parametrize("context", ["auto", pytest.param("spawn", marks=pytest.mark.slow)])
def test_collectors_act_by_it(cart_pole: Path, context: str):
    policy = muster.load_policy(cart_pole)
    sizes: dict[str, Any] = {"num_envs": 2, "frames_per_batch": 16, "seed": 0}
    with muster.Collector("CartPole-v1", policy, **sizes) as collector:
        batch = collector.rollout()
    with muster.MultiCollector("CartPole-v1", policy, num_collectors=1, context=context, **sizes) as several:
        batches = [batch, next(iter(several))]
    for batch in batches:
        assert torch.equal(batch["action"], policy(batch["observation"].flatten(0, 1)).view(batch["action"].shape))
    again = pickle.loads(pickle.dumps(policy))
    obs = np.ones((3, 4), np.float32)
    np.testing.assert_array_equal(again(obs), policy(obs))


@pytest.mark.parametrize(
    ("obs", "message"),
    [
        (np.zeros(3, np.float32), "expected observations of shape [4], or a batch [B, 4], got [3]."),
        (np.zeros((2, 2, 4), np.float32), "got [2, 2, 4]."),
        (np.zeros((2, 4), np.complex64), "expected observations of dtype float32, got complex64."),
        ("left", "got <U4."),
        ({"obs": 1}, "got a dict. If the run's envs are wrapped,"),
        ([[1.0, 2.0], [1.0]], "expected an array of float32, and NumPy cannot make one"),
        (torch.zeros(4, dtype=torch.bfloat16), "NumPy cannot make one"),
    ],
    ids=str,
)
def test_other_observations_are_refused_in_one_line(cart_pole: Path, obs: Any, message: str):
    with pytest.raises(SpecMismatch) as caught:
        muster.load_policy(cart_pole)(obs)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_observations_that_numpy_understands_are_taken(cart_pole: Path):
    policy = muster.load_policy(cart_pole)
    obs = np.linspace(-1, 1, 4)
    obs.setflags(write=False)
    action = policy(obs)
    assert policy([float(x) for x in obs]) == action
    assert policy(obs[::-1][::-1]) == action
    assert policy(obs[None]).tolist() == [action]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"spaces": {}}, "says nothing of spaces"),
        ({"spaces": {"observations": {}, "actions": {"kind": "Sequence"}}}, "describes no space"),
        (None, "it holds a list, not a dict"),
    ],
)
def test_folders_of_something_else_are_refused_in_one_line(cart_pole: Path, tmp_path: Path, changes: Any, message: str):
    folder = Path(shutil.copytree(cart_pole, tmp_path / "run"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps([] if changes is None else config | changes))
    with pytest.raises(UsageError) as caught:
        muster.load_policy(folder)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_envs_are_made_with_what_the_preset_adds_and_the_caller(tmp_path: Path):
    policy = muster.load_policy(trained(tmp_path / "run", "Sampled-numbers-Box-v0"))

    def timed(env: Any) -> Any:
        return gym.wrappers.TimeLimit(env, 2)

    with policy.make_vec(2, backend="serial", wrappers=[timed], env_kwargs={"render_mode": "ansi"}) as envs:
        obs, _ = envs.reset()
        for _ in range(2):
            obs, _, _, truncated, infos = envs.step(policy(obs))
        assert truncated.all()
        assert "final_obs" in infos


MODULE = """
import gymnasium as gym, pathlib
pathlib.Path(__file__).with_name("imported").touch()
gym.register("Local-v0", lambda **kwargs: gym.make("CartPole-v1", **kwargs))
def make_env():
    return gym.make("CartPole-v1")
"""


def foreign(cart_pole: Path, tmp_path: Path, **changes: Any) -> Path:
    """A run whose config names code, in a folder of its own."""
    folder = Path(shutil.copytree(cart_pole, tmp_path / "run"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


@pytest.mark.parametrize(
    "changes",
    [
        {"env": "local_game_{n}:Local-v0"},
        {"env": "local_game_{n}:make_env"},
        {"env": "/tmp/local_game_{n}.py:make_env"},
        {"env": "gymnasium.py:Id-v0"},  # a file, not the library
        {"env": "gymnasium./../local_game_{n}.py:x:Id-v0"},
        {"env": "minigrid:/../local_game_{n}.py:x:Id-v0"},
        {"env": "minigrid./local_game_{n}:Id-v0"},
        {"env": "minigrid:local_game_{n}:Id-v0"},
        {"env": "gymnasium:make"},  # a known library's, but it would be called
        {"env": "CartPole-v1", "wrappers": ["local_game_{n}:wrap"]},
    ],
    ids=str,
)
def test_code_that_the_folder_names_needs_trust(cart_pole: Path, tmp_path: Path, changes: dict[str, Any]):
    policy = muster.load_policy(foreign(cart_pole, tmp_path, **changes))
    assert policy(np.zeros(4, np.float32)) in (0, 1)
    named = changes.get("wrappers", [changes["env"]])[0]
    with pytest.raises(ConfigError) as caught:
        policy.make_vec()
    assert f"names code, or what lies outside of it: {named}. " in str(caught.value)
    assert "say trust=True in Python, or --trust on a command line" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_trusted_is_imported_and_nothing_else(cart_pole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "local_game.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    folder = foreign(cart_pole, tmp_path, env="local_game:Local-v0")
    with pytest.raises(ConfigError, match="trust=True"):
        muster.load_policy(folder).make_vec(1)
    policy = muster.load_policy(folder, trust=True)
    assert not (tmp_path / "imported").exists()
    with policy.make_vec(1, backend="serial") as envs:
        envs.step(policy(envs.reset(seed=0)[0]))
    assert (tmp_path / "imported").exists()


@pytest.mark.parametrize(
    "env", ["CartPole-v1", "gymnasium:CartPole-v1", "minigrid:MiniGrid-Empty-5x5-v0", "ALE/Pong-v5"]
)
def test_known_ids_need_no_trust(cart_pole: Path, tmp_path: Path, env: str):
    folder = foreign(cart_pole, tmp_path, env=env)
    plan_of(folder).require_trust(folder)


@pytest.mark.slow
def test_loading_needs_torch_alone_and_importing_muster_not_even_that(cart_pole: Path):
    code = f"""
import sys, muster
assert "torch" not in sys.modules and "load_policy" in dir(muster)
muster.load_policy({str(cart_pole)!r})
assert not {{"rich", "matplotlib", "tensorboard"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
