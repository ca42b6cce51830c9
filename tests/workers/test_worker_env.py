"""The environment of workers: what code of an env finds there, in Python and in C, from its first import on."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

import muster
import programs
from envs import Scripted
from muster.errors import ConfigError
from muster.pool.resources import usable_cores
from processes import kill_worker
from slow import slow

_NUMBER, _GONE = "MUSTER_TEST_NUMBER", "MUSTER_TEST_GONE"
# Observes the variable as it was when this module was imported.
_PROBE = f"""
import ctypes, os
import gymnasium, numpy

getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p


def both(name):
    in_c = getenv(name.encode())
    return os.environ.get(name), None if in_c is None else in_c.decode()


AT_IMPORT = both("{_NUMBER}"), both("{_GONE}")


class Env(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-9, 99, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self):
        self.found = AT_IMPORT, (both("{_NUMBER}"), both("{_GONE}"))

    def look(self):
        return self.found

    def reset(self, *, seed=None, options=None):
        return numpy.float32([AT_IMPORT[0][0] or -1]), {{}}

    def step(self, action):
        return numpy.float32([AT_IMPORT[0][0] or -1]), 0.0, False, False, {{}}
"""


def build(module: str) -> Any:
    """An env of a module that only its own process imports."""
    return import_module(module).Env()


def build_where(variable: str, env: Callable[[], Any]) -> Any:
    """An env that can be built only where the variable is set."""
    return os.environ[variable] and env()


@pytest.fixture
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    (tmp_path / "environment_probe.py").write_text(_PROBE)
    monkeypatch.syspath_prepend(tmp_path)
    # An env that this process built, as caller_steps does, has imported it here: a forked worker would find it.
    monkeypatch.delitem(sys.modules, "environment_probe", raising=False)
    monkeypatch.setenv(_GONE, "the caller's")
    monkeypatch.delenv(_NUMBER, raising=False)
    return functools.partial(build, "environment_probe")


LIST = [{_NUMBER: "10", _GONE: None}, {_NUMBER: 11, _GONE: None}]
FUNCTION = lambda i: {_NUMBER: np.int64(10 + i), _GONE: None}  # noqa: E731


@pytest.mark.parametrize(
    ("context", "worker_env"),
    [
        *(("forkserver", LIST), ("fork", FUNCTION)),
        *(pytest.param(context, LIST, marks=pytest.mark.slow) for context in ("spawn", "fork")),
    ],
)
def test_an_envs_module_finds_its_workers_variables_when_it_is_imported(
    context: str, worker_env: Any, probe: Any
) -> None:
    with muster.make_vec(probe, 3, num_workers=2, context=context, worker_env=worker_env) as envs:
        found = envs.call("look")
    for at_import, at_build in found:
        assert at_import == at_build
    first, second = ((("10", "10"), (None, None)), (("11", "11"), (None, None)))
    assert [at_import for at_import, _ in found] == [first, first, second]
    assert _NUMBER not in os.environ
    assert os.environ[_GONE] == "the caller's"


def test_a_spawned_worker_has_its_variables_before_python_starts() -> None:
    environ = {**os.environ, "PYTHONHASHSEED": "7"}
    said = programs.run("-c", "print(hash('muster'))", env=environ, fresh=True, check=True)
    options: dict[str, Any] = {"context": "spawn", "worker_env": {"PYTHONHASHSEED": "7"}}
    with muster.make_vec("CartPole-v1", 1, num_workers=1, **options) as envs:
        assert envs.call(lambda env, index: hash("muster")) == (int(said.stdout),)


def test_the_trial_of_num_workers_auto_has_the_first_workers_variables(capfd: Any, probe: Any) -> None:
    needs = functools.partial(build_where, _NUMBER, probe)
    with muster.make_vec(needs, 5, num_workers="auto", worker_env=lambda i: {_NUMBER: 10 + i}) as envs:
        assert len(envs.stats()["workers"]) == min(5, usable_cores())
    assert "side by side are what each is alone" in capfd.readouterr().err


@pytest.mark.parametrize("context", ["forkserver", *slow("fork")])
def test_a_worker_that_replaces_another_has_the_same_variables(context: str, probe: Any) -> None:
    options: dict[str, Any] = {"context": context, "worker_env": lambda i: {_NUMBER: 10 + i}}
    with muster.make_vec(probe, 2, num_workers=2, on_failure="restart", **options) as envs:
        envs.reset()
        kill_worker(envs, 1)
        envs.step([0, 0])
        assert [found[0][0] for found, _ in envs.call("look")] == ["10", "11"]


def _surroundings(env: Any, index: int) -> Any:
    """What this process has of the four that `make_vec` hands to its workers."""
    umask = os.umask(0o77)
    os.umask(umask)
    return os.getcwd(), os.environ.get(_NUMBER), os.environ.get(_GONE), list(sys.path), umask


@pytest.fixture
def umask() -> Iterator[Callable[[int], int]]:
    before = os.umask(0o22)
    yield os.umask
    os.umask(before)


@pytest.mark.parametrize("context", ["forkserver", "fork", *slow("spawn")])
def test_a_replacement_starts_in_the_surroundings_of_make_vec(
    context: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, umask: Callable[[int], int]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(_NUMBER, "as it was")
    monkeypatch.delenv(_GONE, raising=False)
    umask(0o27)
    with muster.make_vec("CartPole-v1", 2, num_workers=2, context=context, on_failure="restart") as envs:
        envs.reset()
        found = envs.call(_surroundings)
        assert found[0][:3] == (str(tmp_path), "as it was", None)
        assert found[0][4] == 0o27
        monkeypatch.chdir("/")
        monkeypatch.setenv(_NUMBER, "another")
        monkeypatch.setenv(_GONE, "new")
        monkeypatch.syspath_prepend("/elsewhere")
        umask(0o77)
        kill_worker(envs, 1)
        envs.step([0, 0])
        assert envs.call(_surroundings) == found


@pytest.mark.parametrize("context", ["forkserver", *slow("fork", "spawn")])
def test_a_replacement_starts_though_the_folder_of_make_vec_is_gone(
    context: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "short").mkdir()
    monkeypatch.chdir(tmp_path / "short")
    with muster.make_vec("CartPole-v1", 2, num_workers=2, context=context, on_failure="restart") as envs:
        envs.reset()
        monkeypatch.chdir("/")
        (tmp_path / "short").rmdir()
        kill_worker(envs, 1)
        assert envs.step([0, 0])[3].tolist() == [False, True]


def test_thread_limits_give_way_and_the_callers_own_share_has_the_callers_environment(
    probe: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    worker_env = {_NUMBER: 10, "OMP_NUM_THREADS": 3, "MKL_NUM_THREADS": None}
    with muster.make_vec(probe, 2, num_workers=1, caller_steps=True, worker_env=worker_env) as envs:
        obs, _ = envs.reset()
        here = envs.call(lambda env, index: [os.environ.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")])
    assert obs.tolist() == [[10.0], [-1.0]]
    assert here[0] == ["3", None]
    assert here[1] == [None, os.environ.get("MKL_NUM_THREADS")]


# ---- the other front ends; each observes the number of its process


def _gymnasium(env: Any, worker_env: Any) -> Any:
    from muster.interop.gymnasium import AsyncVectorEnv

    envs = AsyncVectorEnv([env, env], num_workers=2, worker_env=worker_env)
    return envs, envs.reset()[0]


def _sb3(env: Any, worker_env: Any) -> Any:
    sb3 = pytest.importorskip("muster.interop.sb3", exc_type=ImportError)
    envs = sb3.SubprocVecEnv([env, env], num_workers=2, worker_env=worker_env)
    return envs, envs.reset()


def _torchrl(env: Any, worker_env: Any) -> Any:
    torchrl = pytest.importorskip("muster.interop.torchrl", exc_type=ImportError)
    envs = torchrl.ParallelEnv(2, env, num_processes=1, worker_env=worker_env)
    return envs, envs.reset()["observation"].numpy()


# TorchRL's in one process, since under variables each of them imports PyTorch.
@pytest.mark.parametrize(
    ("make", "second"),
    [(_gymnasium, 11), (_sb3, 11), (_torchrl, 10)],
)
def test_drop_ins_take_variables_too(make: Any, second: float, probe: Any) -> None:
    envs, obs = make(probe, lambda i: {_NUMBER: 10 + i})
    envs.close()
    assert obs.tolist() == [[10], [second]]


@pytest.mark.parametrize("num_collectors", [None, *slow(2)])
def test_collectors_take_variables_too(num_collectors: int | None, probe: Any) -> None:
    pytest.importorskip("tensordict")
    options: dict[str, Any] = {"worker_env": lambda i: {_NUMBER: 10 + i}}
    settings: dict[str, Any] = {"frames_per_batch": 4, "num_envs": 2}
    if num_collectors is None:
        collector: Any = muster.Collector(probe, None, make_vec_options={**options, "num_workers": 2}, **settings)
    else:
        collector = muster.MultiCollector(
            probe, None, make_vec_options=options, num_collectors=num_collectors, **settings
        )
    batch = next(iter(collector))
    collector.shutdown()
    assert batch["observation"].flatten().tolist() == [10, 10, 11, 11]


def test_a_custom_worker_of_gymnasium_has_no_worker_env() -> None:
    from muster.interop.gymnasium import AsyncVectorEnv

    make = functools.partial(gymnasium.make, "CartPole-v1")
    with pytest.raises(TypeError, match="which has no worker_env"):
        AsyncVectorEnv([make], worker=print, worker_env={"A": "1"})


@pytest.mark.parametrize(
    ("worker_env", "said"),
    [
        (3, "got int 3"),
        ([{}], "a list of 1 dicts, but the number of workers is 2; give one dict per worker"),
        ([{}, None], r"worker_env\[1\] must be a dict of environment variables, got NoneType None"),
        (lambda i: "A=1", r"worker_env\(0\) must be a dict of environment variables, got str 'A=1'"),
        ({"A": 0.5}, r"worker_env\['A'\] must be a str .*, an int, or None, which unsets it, got float 0.5"),
        ({"A": True}, r"worker_env\['A'\] must be .* got bool True"),
        ([{}, {"A": b"1"}], r"worker_env\[1\]\['A'\] must be .* got bytes b'1'"),
        ({"A": "\0"}, r"worker_env\['A'\] must be"),
        ({1: "A"}, "the name of an environment variable must be a str .* got int 1"),
        ({"A=B": "1"}, "the name of an environment variable must be .* got str 'A=B'"),
    ],
)
def test_what_is_no_environment_is_refused_by_name(worker_env: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        muster.make_vec("CartPole-v1", 2, num_workers=2, worker_env=worker_env)


@pytest.mark.parametrize("backend", ["serial", *slow("thread")])
def test_backends_without_processes_refuse_variables(backend: str) -> None:
    with pytest.raises(ConfigError, match="worker_env must be left out with"):
        muster.make_vec("CartPole-v1", 2, backend=backend, worker_env={})


class WithTorch(Scripted):
    def __init__(self) -> None:
        super().__init__()
        self._torch = import_module("torch")

    def threads(self) -> int:
        return int(self._torch.get_num_threads())


@pytest.mark.parametrize(("chosen", "threads"), [("4,1", 4), pytest.param(None, 2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("context", ["forkserver", *slow("fork", "spawn")])
def test_torch_keeps_to_the_users_own_number_of_threads(
    monkeypatch: pytest.MonkeyPatch, context: str, chosen: str | None, threads: int
) -> None:
    pytest.importorskip("torch")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if chosen is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", chosen)
    with muster.make_vec(WithTorch, 1, context=context, threads_per_worker=2) as envs:
        assert envs.call("threads") == (threads,)
