"""Settings of the caller that workers have, too: NumPy's errors, torch's dtype, the recursion limit, filters."""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.util
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import muster
from muster.workers.around_imports import around_imports
from sample_envs import Counter

WAYS: list[Any] = [
    {"context": "forkserver"},
    pytest.param({"context": "spawn"}, marks=pytest.mark.slow),
    {"context": "fork"},
    pytest.param({"caller_steps": True}, marks=pytest.mark.slow),
    {"backend": "thread"},
    {"backend": "serial"},
]
logged: list[str] = []


class Sensor(Counter):
    """Fails, warns and counts in its constructor and in `look`, and keeps what came of it."""

    def __init__(self) -> None:
        super().__init__()
        self.built = self.look()

    def look(self) -> dict[str, Any]:
        try:
            np.array([1.0]) / 0.0
            divided = "went on"
        except FloatingPointError:
            divided = "raised"
        with warnings.catch_warnings(record=True) as caught:
            warnings.warn("noise of the sensor", stacklevel=1)
            warnings.warn("drift of the sensor", UserWarning, stacklevel=1)
        return {
            "divided": divided,
            "warned": [str(one.message) for one in caught],
            "recursion": sys.getrecursionlimit(),
            "errors": dict(np.geterr()),
        }


def note(error: str, flag: int) -> None:
    logged.append(error)


@pytest.fixture
def _settings() -> Iterator[None]:
    limit = sys.getrecursionlimit()
    with np.errstate(divide="raise", under="warn"), warnings.catch_warnings():
        warnings.filterwarnings("always")
        warnings.filterwarnings("ignore", "noise")
        sys.setrecursionlimit(limit + 3000)
        yield
        sys.setrecursionlimit(limit)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.usefixtures("_settings")
def test_an_env_finds_the_callers_settings(way: dict[str, Any]) -> None:
    here = Sensor().look()
    assert (here["divided"], here["warned"]) == ("raised", ["drift of the sensor"])
    with muster.make_vec(Sensor, 2, num_workers=None if way.get("backend") == "serial" else 1, **way) as envs:
        for built, now in zip(envs.get_attr("built"), envs.call("look"), strict=True):
            assert built == now == here


@pytest.mark.usefixtures("_settings")
def test_a_replacement_has_them_as_the_worker_had_before_it() -> None:
    envs = muster.make_vec(Sensor, 1, on_failure="restart")
    with envs, np.errstate(divide="ignore"):
        envs.reset(seed=0)
        for worker in envs._backend._workers.handles:
            worker.process.kill()
        envs.step(np.zeros(1, np.int64))
        assert envs.call("look")[0]["divided"] == "raised"


@pytest.mark.parametrize("mode", [pytest.param("call", marks=pytest.mark.slow), "log"])
@pytest.mark.usefixtures("_settings")
def test_a_function_for_errors_of_numpy_goes_along(mode: Any) -> None:
    before = np.seterrcall(note if mode == "call" else Log())
    try:
        with np.errstate(divide=mode), muster.make_vec(Sensor, 1) as envs:
            assert envs.call(lambda env, index: (env.look()["divided"], len(read_log())))[0] == ("went on", 2)
        np.seterrcall(Unsendable())
        with np.errstate(divide="log"), muster.make_vec(Counter, 1) as envs:
            assert envs.call(lambda env, index: np.geterr()["divide"]) == ("warn",)
    finally:
        np.seterrcall(before)
    assert logged == []


class Log:
    def write(self, text: str) -> None:
        logged.append(text)


class Unsendable(Log):
    def __reduce__(self) -> Any:
        raise TypeError("not this one")


def read_log() -> list[str]:
    return logged


CATEGORIES = """
class Drift(UserWarning):
    class Inner(UserWarning):
        pass
"""


def test_a_filter_for_a_category_holds_once_its_module_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "drifting.py").write_text(CATEGORIES)
    monkeypatch.syspath_prepend(tmp_path)
    drifting = importlib.import_module("drifting")
    with warnings.catch_warnings():
        warnings.filterwarnings("error")
        warnings.filterwarnings("ignore", category=drifting.Drift)
        warnings.filterwarnings("ignore", category=drifting.Drift.Inner)
        envs = muster.make_vec(Counter, 1)
    with envs:

        def warn(env: Any, index: int) -> Any:
            loaded_before = "drifting" in sys.modules
            module = importlib.import_module("drifting")
            warnings.warn("ignored", module.Drift, stacklevel=1)
            warnings.warn("ignored", module.Drift.Inner, stacklevel=1)
            assert type(module.__loader__).__name__ == type(module.__spec__.loader).__name__ == "SourceFileLoader"
            return loaded_before

        assert envs.call(warn) == (False,)


def test_a_filter_that_makes_errors_of_warnings_ends_no_import_of_box2d() -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error")
        envs = muster.make_vec(Counter, 1)
    with envs:

        def walk(env: Any, index: int) -> Any:
            gym.make("BipedalWalker-v3").close()
            with pytest.raises(UserWarning, match="still one"):
                warnings.warn("still one", UserWarning, stacklevel=1)

        envs.call(walk)


class MakesTensors(Counter):
    def __init__(self) -> None:
        super().__init__()
        self.dtype = str(importlib.import_module("torch").zeros(1).dtype)


@pytest.mark.slow
@pytest.mark.parametrize("way", [{"context": "forkserver"}, {"context": "fork"}, {"backend": "thread"}], ids=str)
def test_an_env_that_imports_torch_finds_the_callers_default_dtype(way: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with muster.make_vec(MakesTensors, 1, **way) as envs:
            assert envs.get_attr("dtype") == ("torch.float64",)
    finally:
        torch.set_default_dtype(before)


LIBRARY = """
import warnings
import numpy as np
import gymnasium as gym

warnings.warn("old", DeprecationWarning)
BIG = np.exp(np.array([1000.0]))
import torch

TABLE = str(torch.ones(1).dtype)


class Env(gym.Env):
    observation_space = gym.spaces.Box(-1, 1, (1,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def found(self):
        caught = []
        for act in (lambda: warnings.warn("new", DeprecationWarning), lambda: np.exp(np.array([1000.0]))):
            try:
                act()
            except (DeprecationWarning, FloatingPointError) as error:
                caught.append(type(error).__name__)
        return TABLE, caught
"""


@pytest.mark.filterwarnings("ignore:old", "ignore:overflow")
@pytest.mark.parametrize("by", ["class", "id", "function"])
@pytest.mark.parametrize("context", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow), "fork"])
def test_what_the_caller_has_imported_before_is_imported_as_it_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, context: str, by: str
) -> None:
    torch = pytest.importorskip("torch")
    (tmp_path / "old_library.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "old_library", raising=False)
    library = importlib.import_module("old_library")
    gym.register("OldLibrary-v0", "old_library:Env")
    ways = {
        "class": library.Env,
        "id": "OldLibrary-v0",
        "function": lambda: importlib.import_module("old_library").Env(),
    }
    before = torch.get_default_dtype()
    try:
        with warnings.catch_warnings(), np.errstate(over="raise"):
            warnings.filterwarnings("error", category=DeprecationWarning)
            torch.set_default_dtype(torch.float64)
            with muster.make_vec(ways[by], 1, context=context) as envs:
                assert envs.call("found") == (("torch.float32", ["DeprecationWarning", "FloatingPointError"]),)
                assert envs.call(lambda env, index: str(torch.ones(1).dtype)) == ("torch.float64",)
    finally:
        torch.set_default_dtype(before)
        del gym.registry["OldLibrary-v0"]


def test_the_loader_of_a_module_that_is_imported_as_before_can_be_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "copied_later.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    acted: list[int] = []

    @contextlib.contextmanager
    def act() -> Iterator[None]:
        acted.append(1)
        yield

    around_imports(["copied_later"], act)
    spec = importlib.util.find_spec("copied_later")
    assert spec is not None
    for one in (copy.copy(spec.loader), copy.deepcopy(spec.loader)):
        assert one.get_filename("copied_later") == str(tmp_path / "copied_later.py")
    spec.loader = copy.copy(spec.loader)
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    assert acted
