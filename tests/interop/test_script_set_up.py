"""What a script sets up in other modules: workers of drop-ins have it, as those of the originals do."""

from __future__ import annotations

import importlib
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

for package in ("stable_baselines3", "torchrl"):
    pytest.importorskip(package)

from muster.interop.gymnasium import AsyncVectorEnv, SyncVectorEnv  # noqa: E402
from muster.interop.gymnasium import make_vec as gymnasiums_make_vec  # noqa: E402
from muster.interop.sb3 import DummyVecEnv, SubprocVecEnv  # noqa: E402
from muster.interop.torchrl import ParallelEnv  # noqa: E402
from muster.pool.set_up import NO_INIT, choose_init_of_drop_in  # noqa: E402

LIBRARY = """
import gymnasium, numpy

REGISTRY = {}

class Arm(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-9, 99, (1,), numpy.float32)
    action_space = gymnasium.spaces.Discrete(2)
    def __init__(self, render_mode=None):
        self.gain = REGISTRY["arm"]
    def reset(self, *, seed=None, options=None):
        return numpy.float32([self.gain]), {}
    def step(self, action):
        return numpy.float32([self.gain]), 0.0, False, False, {}

def prepare():
    REGISTRY["arm"] = REGISTRY.get("arm", 0) + 6

def register(name, gain):
    REGISTRY[name] = gain
"""
SCRIPT = """
import robotlib
robotlib.REGISTRY["arm"] = 5
if __name__ == "__main__":
    robotlib.REGISTRY["arm"] = 7
"""
Start = Callable[..., None]


@pytest.fixture
def robotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """A library whose env needs an entry in a registry; and a script, this process's own, that makes the entry."""
    (tmp_path / "robotlib.py").write_text(LIBRARY)
    (tmp_path / "train.py").write_text(SCRIPT)
    monkeypatch.syspath_prepend(tmp_path)
    script = types.ModuleType("__main__")
    script.__file__ = str(tmp_path / "train.py")
    monkeypatch.setitem(sys.modules, "__main__", script)
    yield importlib.import_module("robotlib")
    del sys.modules["robotlib"]


def set_script(code: str) -> None:
    Path(str(sys.modules["__main__"].__file__)).write_text(f"{code}\n")


def sb3(robotlib: types.ModuleType, **options: Any) -> Any:
    envs = SubprocVecEnv([robotlib.Arm] * 2, **options)
    try:
        return envs.reset().ravel().tolist()
    finally:
        envs.close()


def gymnasiums(robotlib: types.ModuleType, **options: Any) -> Any:
    envs = AsyncVectorEnv([robotlib.Arm] * 2, **options)
    try:
        return envs.reset()[0].ravel().tolist()
    finally:
        envs.close()


def gymnasiums_by_id(robotlib: types.ModuleType, **options: Any) -> Any:
    envs = gymnasiums_make_vec("robotlib:Arm-v0", 2, "async", vector_kwargs=options)
    try:
        return envs.reset()[0].ravel().tolist()
    finally:
        envs.close()


def torchrls(robotlib: types.ModuleType, **options: Any) -> Any:
    envs = ParallelEnv(2, robotlib.Arm, **options)
    try:
        return envs.reset()["observation"].ravel().tolist()
    finally:
        envs.close()


DROP_INS = [
    *(sb3, gymnasiums, gymnasiums_by_id),
    pytest.param(torchrls, marks=pytest.mark.slow),  # it imports torch
]


@pytest.fixture(autouse=True)
def _registered(robotlib: types.ModuleType) -> Iterator[None]:
    import gymnasium

    gymnasium.register("Arm-v0", "robotlib:Arm")
    yield
    del gymnasium.registry["Arm-v0"]


@pytest.mark.parametrize("start", DROP_INS, ids=lambda start: start.__name__)
def test_workers_run_the_script_where_it_assigns_into_a_module(start: Start, robotlib: types.ModuleType) -> None:
    assert start(robotlib) == [5.0, 5.0]


@pytest.mark.parametrize("start", DROP_INS[2:], ids=lambda start: start.__name__)
def test_a_function_takes_the_place_of_the_script(start: Start, robotlib: types.ModuleType) -> None:
    assert start(robotlib, worker_init=robotlib.prepare) == [6.0, 6.0]


CALL = "import robotlib\nrobotlib.register('arm', 5)\nif __name__ == '__main__': pass"


@pytest.mark.parametrize(
    ("start", "options"), [(sb3, {}), pytest.param(gymnasiums, {"context": "spawn"}, marks=pytest.mark.slow)]
)
def test_a_call_counts_where_the_original_runs_the_script(
    start: Start, options: dict[str, Any], robotlib: types.ModuleType
) -> None:
    set_script(CALL)
    assert start(robotlib, **options) == [5.0, 5.0]


@pytest.mark.filterwarnings("ignore:.*ERROR")  # Gymnasium's own lines
def test_a_call_is_not_made_again_where_the_original_forks(robotlib: types.ModuleType) -> None:
    set_script(CALL.replace("register", "enlist"))
    with pytest.raises(KeyError, match="arm") as raised:
        gymnasiums(robotlib)
    said = "train.py:2 sets up `robotlib.enlist('arm', 5)`, which workers do not run. If the env needs that, pass "
    assert any(said in note and "worker_init" in note for note in raised.value.__notes__)


def test_a_registration_is_there_where_the_original_forks(robotlib: types.ModuleType) -> None:
    set_script(CALL)
    assert gymnasiums(robotlib) == [5.0, 5.0]


def test_logging_alone_runs_no_script_and_a_call_without_a_guard_gets_no_warning(robotlib: types.ModuleType) -> None:
    for script in ("import logging\nlogging.basicConfig()\nif __name__ == '__main__': pass", CALL.partition("\nif")[0]):
        set_script(script)
        assert choose_init_of_drop_in(None, starts_fresh=True, original_forks=False) is NO_INIT


def test_a_fork_has_what_the_caller_has(robotlib: types.ModuleType) -> None:
    robotlib.REGISTRY["arm"] = 9
    assert gymnasiums(robotlib, context="fork") == [9.0, 9.0]


@pytest.mark.parametrize("kind", [DummyVecEnv, SyncVectorEnv], ids=lambda kind: kind.__name__)
def test_in_this_process_a_function_is_called_once(kind: Any, robotlib: types.ModuleType) -> None:
    envs = kind([robotlib.Arm] * 2, worker_init=robotlib.prepare)
    assert [env.unwrapped.gain for env in envs.envs] == [6, 6]
    envs.close()
    robotlib.REGISTRY["arm"] = 1
    envs = kind([robotlib.Arm] * 2, worker_init="script")
    assert [env.unwrapped.gain for env in envs.envs] == [1, 1]
    envs.close()


def test_a_script_without_a_guard_is_warned_of(robotlib: types.ModuleType) -> None:
    set_script(SCRIPT.partition("if __name__")[0])
    effect = r'^train.py:3: `robotlib.REGISTRY\["arm"\] = 5` has no effect in workers'
    with pytest.warns(UserWarning, match=effect), pytest.raises(KeyError, match="arm") as caught:
        sb3(robotlib)
    assert any("pass a function that does it as worker_init" in note for note in caught.value.__notes__)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert gymnasiums(robotlib, worker_init=robotlib.prepare) == [6.0, 6.0]
