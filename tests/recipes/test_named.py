"""What ``module:name`` and ``file.py:name`` stand for."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest

import muster
from muster.errors import RecipeError
from muster.recipes.named import absolute_name, callable_named, env_named, parse_name
from slow import slow

ENV = """
import gymnasium as gym

class Own(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (2,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, size=1):
        self.size = size

    def reset(self, *, seed=None, options=None):
        return self.observation_space.sample(), {"size": self.size, "file": __file__}

    def step(self, action):
        return self.observation_space.sample(), 1.0, False, False, {}

def make_env(size=1):
    return Own(size)

class Doubled(gym.RewardWrapper):
    def reward(self, reward):
        return 2 * reward

gym.register("InFile-v0", Own)
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes a module of this name; it is forgotten after the test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    written: list[str] = []

    def write(name: str, code: str = ENV) -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(code)
        written.append(path.stem)
        return path

    yield write
    gym.registry.pop("InFile-v0", None)
    for name in written:
        if name != "json":
            sys.modules.pop(name, None)


@pytest.mark.parametrize("context", ["forkserver", *slow("spawn", "fork")])
def test_a_files_factory_and_wrapper_travel_to_workers_of_each_start_method(write: Callable[..., Path], context: str):
    path = write(f"far/travels_by_{context}.py")
    env, wrapper = env_named(f"{path}:make_env"), callable_named(f"{path}:Doubled")
    with muster.make_vec(env, 2, context=context, env_kwargs={"size": 5}, wrappers=[wrapper]) as envs:
        _, infos = envs.reset(seed=0)
        assert infos["size"].tolist() == [5, 5]
        assert set(infos["file"]) == {str(path)}
        assert envs.step(envs.action_space.sample())[1].tolist() == [2.0, 2.0]


@pytest.mark.parametrize("name", ["named_by_vec:make_env", "named_by_vec:Own", "far/named_by_vec.py:make_env"])
def test_make_vec_and_collectors_understand_names(
    write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, name: str
):
    path = write("far/named_by_vec.py")
    monkeypatch.chdir(path.parent.parent)
    monkeypatch.syspath_prepend(str(path.parent))
    with muster.make_vec(name, 2, num_workers=1, env_kwargs={"size": 5}) as envs:
        assert envs.reset(seed=0)[1]["size"].tolist() == [5, 5]
    with muster.Collector(name, num_envs=1, frames_per_batch=4, make_vec_options={"backend": "serial"}) as collector:
        assert collector.rollout().shape == (1, 4)


def test_in_make_vec_the_name_of_an_id_is_an_id_first(write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch):
    path = write("far/both.py", ENV + '\ngym.register("Both", lambda: Own(7))\ndef Both():\n    return Own(8)\n')
    monkeypatch.syspath_prepend(str(path.parent))
    try:
        for _ in range(2):  # before it is registered, and afterwards
            with muster.make_vec("both:Both", 1, backend="serial") as envs:
                assert envs.reset(seed=0)[1]["size"].tolist() == [7]
    finally:
        gym.registry.pop("Both", None)


def test_a_class_of_the_script_has_a_name_for_make_vec(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys.modules["__main__"], "own_env", lambda: gym.make("CartPole-v1"), raising=False)
    with muster.make_vec("__main__:own_env", 1, backend="serial") as envs:
        envs.reset(seed=0)


@pytest.mark.parametrize(
    ("name", "error", "said"),
    [
        ("json:nothing", RecipeError, "module json has no 'nothing'. It has: "),
        ("no_such_module:make", ModuleNotFoundError, "No module named 'no_such_module' for 'no_such_module:make'"),
        ("nowhere/env.py:make", RecipeError, "there is no file"),
        ("string:digits", RecipeError, "must be something that builds an env; it is text"),
    ],
)
def test_make_vec_says_what_a_name_does_not_lead_to(name: str, error: type[Exception], said: str):
    with pytest.raises(error, match=re.escape(said)):
        muster.make_vec(name, 1)


def test_ids_stay_as_they_are():
    for name in ("CartPole-v1", "ALE/Pong-v5", "my_module:Id-v0", "pettingzoo/sisl/multiwalker_v9"):
        assert parse_name(name) is None
        assert env_named(name) == absolute_name(name) == name


def test_a_relative_file_has_an_absolute_name(write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch):
    path = write("here.py")
    monkeypatch.chdir(path.parent)
    assert absolute_name("here.py:make_env") == absolute_name("./here.py:make_env") == f"{path.resolve()}:make_env"


def test_what_imports_it_runs(write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch):
    path = write("far/imported.py")
    named = parse_name(f"{path}:make_env")
    assert named is not None
    assert named.import_code().splitlines()[-1] == "from imported import make_env"
    names: dict[str, Any] = {}
    exec(named.import_code("other"), names)
    assert names["other"].__code__.co_filename == str(path)
    monkeypatch.chdir(path.parent)
    assert named.import_code() == "from imported import make_env"


@pytest.mark.parametrize(
    ("name", "code", "said"),
    [
        ("absent.py:make_env", None, "there is no file"),
        ("given.py", ENV, "must also say what in the file builds the env, such as"),
        ("given.py:make_evn", ENV, "module given has no 'make_evn'. It has: Own, make_env, Doubled"),
        ("my-env.py:make_env", ENV, "cannot be imported as a module: its name must be letters, digits and _"),
        ("json.py:make_env", ENV, "has the name of another module"),
        ("raises.py:make_env", "\n1 / 0", "ZeroDivisionError: division by zero ("),
        ("raises.py:make_env", "\n\nboom", "raises.py, line 3)"),
        ("exits.py:make_env", "import sys; sys.exit(2)", "SystemExit: 2"),
        ("torn.py:make_env", "def f(:", "SyntaxError: invalid syntax (torn.py, line 1)"),
    ],
)
def test_what_a_file_lacks_is_said(write: Callable[..., Path], tmp_path: Path, name: str, code: str | None, said: str):
    if code is not None:
        write(name.partition(":")[0], code)
    with pytest.raises(RecipeError) as caught:
        env_named(f"{tmp_path}/{name}")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_two_files_of_one_name_are_told_apart(write: Callable[..., Path]):
    one, other = write("one/same.py"), write("other/same.py")
    env_named(f"{one}:make_env")
    with pytest.raises(RecipeError, match=r"other/same.py has the name of another module, .*one/same.py"):
        env_named(f"{other}:make_env")


@pytest.mark.parametrize("name", ["CartPole-v1", "half", "string:digits"])
def test_a_wrapper_must_be_callable(name: str):
    with pytest.raises(RecipeError, match=r"something that can be called"):
        callable_named(name)


@pytest.mark.parametrize("call", ["make_vec", "train"])
def test_what_is_imported_for_its_env_starts_nothing(write: Callable[..., Path], call: str):
    if call == "train":
        pytest.importorskip("tensordict")
    file = write("starts.py", f'import muster\nmuster.{call}("CartPole-v1")\n')
    with pytest.raises(RecipeError, match=rf"starts\.py calls muster\.{call} as it is imported, .* under `if __name__"):
        env_named(f"{file}:make_env")
