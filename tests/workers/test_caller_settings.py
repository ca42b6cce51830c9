"""Settings of the caller that workers have, too: NumPy's errors, torch's dtype, the recursion limit."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import muster
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
    """Fails and counts in its constructor and in `look`, and keeps what came of it."""

    def __init__(self) -> None:
        super().__init__()
        self.built = self.look()

    def look(self) -> dict[str, Any]:
        try:
            np.array([1.0]) / 0.0
            divided = "went on"
        except FloatingPointError:
            divided = "raised"
        return {
            "divided": divided,
            "recursion": sys.getrecursionlimit(),
            "errors": dict(np.geterr()),
        }


def note(error: str, flag: int) -> None:
    logged.append(error)


@pytest.fixture
def _settings() -> Iterator[None]:
    limit = sys.getrecursionlimit()
    with np.errstate(divide="raise", under="warn"):
        sys.setrecursionlimit(limit + 3000)
        yield
        sys.setrecursionlimit(limit)


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.usefixtures("_settings")
def test_an_env_finds_the_callers_settings(way: dict[str, Any]) -> None:
    here = Sensor().look()
    assert here["divided"] == "raised"
    with muster.make_vec(Sensor, 2, num_workers=None if way.get("backend") == "serial" else 1, **way) as envs:
        for built, now in zip(envs.get_attr("built"), envs.call("look"), strict=True):
            assert built == now == here


@pytest.mark.usefixtures("_settings")
def test_a_replacement_has_them_as_the_worker_had_before_it() -> None:
    envs = muster.make_vec(Sensor, 1, on_failure="restart")
    with envs, np.errstate(divide="ignore"):
        envs.reset(seed=0)
        for worker in envs._backend.pool._places:
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
