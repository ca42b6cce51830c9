"""Handing over what cannot be sent, end to end: locks, files, databases, and difficult objects."""

from __future__ import annotations

import ctypes
import multiprocessing
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import gymnasium as gym
import numpy as np
import psutil
import pytest

import muster
from muster.errors import CannotTravel

LIMIT_S = 5.0


class Holder(gym.Env):
    """Keeps what it is given."""

    observation_space = gym.spaces.Box(0, 1e9, (1,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, thing=None):
        self.thing = thing
        self.box = [thing]  # for get_attr, which calls what can be called

    def reset(self, *, seed=None, options=None):
        return np.array([seed or 0], np.float64), {}

    def step(self, action):
        return np.array([int(action)], np.float64), 0.0, False, False, {}

    def take(self, thing):
        return type(thing).__name__


def children() -> set[int]:
    """Those of this process, but for launchers, which other tests use, too."""
    found = psutil.Process().children(recursive=True)
    return {child.pid for child in found if child.name() != "muster-launcher"}


@pytest.fixture(autouse=True)
def _no_process_left() -> Iterator[None]:
    before = children()
    yield
    assert children() <= before


class HangsInGetstate:
    def __getstate__(self):
        time.sleep(600)


class ForgetsItsArguments:
    def __init__(self, one, two):
        self.both = one, two

    def __reduce__(self):
        return ForgetsItsArguments, (1,)


def test_files_databases_and_locks_are_built_where_the_envs_run(tmp_path: Path):
    def open_log():
        return (tmp_path / f"{muster.get_worker_info().env_index}.log").open("w")

    things = {
        "log": muster.lazy(open_log),
        "lock": muster.lazy(threading.Lock),
        "database": muster.lazy(sqlite3.connect, tmp_path / "levels.db"),
    }
    with muster.make_vec(Holder, 3, num_workers=2, env_kwargs={"thing": things}) as envs:
        envs.reset()
    assert sorted(path.name for path in tmp_path.glob("*.log")) == ["0.log", "1.log", "2.log"]


def test_fork_inherits_what_is_safe_to_inherit():
    numbers = (i for i in range(3))
    with muster.make_vec(Holder, 2, num_workers=2, env_kwargs={"thing": numbers}, context="fork") as envs:
        envs.reset()
    assert next(numbers) == 0


@pytest.fixture(scope="module")
def running():
    with muster.make_vec(Holder, 2, num_workers=2) as envs:
        yield envs


@pytest.mark.parametrize(("make", "words"), [(threading.Lock, "_thread.lock"), (HangsInGetstate, "hangs")])
def test_what_envs_that_run_are_sent_is_named_in_time_and_they_run_on(make, words, running):
    thing = make()
    sends = {
        "args[0]": lambda: running.call("take", thing),
        "values[1]": lambda: running.set_attr("thing", [None, thing]),
        'options["x"]': lambda: running.reset(options={"x": thing}),
    }
    # One that hangs takes 3 s to be told from one that is slow.
    for path, send in list(sends.items())[: 1 if words == "hangs" else 3]:
        started = time.monotonic()
        with pytest.raises(CannotTravel) as raised:
            send()
        assert time.monotonic() - started < LIMIT_S
        said = str(raised.value)
        assert path in said
        assert words in said
        assert "fork" not in said.partition("\n")[2]
    running.reset(seed=0)
    assert running.step(np.array([1, 0]))[0].tolist() == [[1.0], [0.0]]


def test_what_would_arrive_as_something_else_is_not_sent_to_envs_that_run(running):
    ours, theirs = multiprocessing.Pipe()
    for thing in (ours, ctypes.CDLL(None)):
        with pytest.raises(CannotTravel, match=r"args\[0\].* would be sent, which means"):
            running.call("take", thing)
    ours.close()
    theirs.close()


def test_what_cannot_be_rebuilt_by_envs_that_run_is_told_and_they_run_on(running):
    thing = ForgetsItsArguments(1, 2)
    for send in (
        lambda: running.call("take", thing),
        lambda: running.set_attr("thing", thing),
        lambda: running.reset(options={"x": thing}),
    ):
        with pytest.raises(CannotTravel, match="cannot be rebuilt there: TypeError: .*'two'"):
            send()
    running.reset(seed=0)
    assert running.get_attr("thing") == (None, None)


@pytest.mark.parametrize(("backend", "options"), [("serial", {}), ("thread", {}), ("process", {"context": "fork"})])
def test_arguments_of_a_spec_arrive_as_they_are(backend, options):
    lock = threading.Lock()
    box = [1, lock]
    spec = gym.envs.registration.EnvSpec("Holder-v0", entry_point=Holder, kwargs={"thing": box})
    with muster.make_vec(spec, 2, backend=backend, **options) as envs:
        if backend == "process":
            assert envs.call("take", 3) == ("int", "int")
        else:
            assert all(kept[0] is box for kept in envs.get_attr("box"))
