"""One env per process, on a real library that refuses a second instance."""

from __future__ import annotations

import os
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest

import muster
from muster.errors import EnvError
from one_instance import DeclaredSimulator, Simulator, compile_library
from sample_envs import Counter
from slow import slow


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(compile_library(tmp_path_factory.mktemp("simulator")))


@pytest.fixture
def in_child():
    """Runs a function in a forked child of its own, since the library is used up in a process that has loaded it."""

    def run(function) -> str:
        read, write = os.pipe()
        pid = os.fork()
        if not pid:
            try:
                told = function() or "fine"
            except BaseException as error:
                told = f"{type(error).__name__}: {error}"
            os.write(write, str(told).encode())
            os._exit(0)
        os.close(write)
        os.waitpid(pid, 0)
        with os.fdopen(read) as pipe:
            return pipe.read()

    return run


def positions(envs: muster.VectorEnv) -> list[list[float]]:
    envs.reset(seed=0)
    return [envs.step(np.array([0, 1, 2, 1][: envs.num_envs]))[0][:, 0].tolist() for _ in range(2)]


def pids(envs: muster.VectorEnv) -> set[int]:
    return {worker["pid"] for worker in envs.stats()["workers"]}


@pytest.mark.parametrize("context", ["forkserver", *slow("spawn")])
def test_it_works_after_the_caller_initialised_the_library_itself(library, context, in_child):
    def run():
        own = Simulator(library)
        own.reset()
        kwargs = {"library": library}
        with muster.make_vec(Simulator, 2, env_kwargs=kwargs, one_env_per_process=True, context=context) as envs:
            return positions(envs)

    assert in_child(run) == "[[0.0, 1.0], [0.0, 2.0]]"


def test_a_forked_worker_inherits_the_callers_instance_and_says_so(library, in_child):
    def run():
        Simulator(library)
        muster.make_vec(Simulator, 2, env_kwargs={"library": library}, one_env_per_process=True, context="fork")

    assert "the simulator runs already in this process" in in_child(run)


@pytest.mark.parametrize("context", ["fork", *slow("forkserver", "spawn")])
def test_a_class_that_declares_it_gets_a_process_for_each_env(library, context):
    with muster.make_vec(DeclaredSimulator, 4, env_kwargs={"library": library}, context=context) as envs:
        assert positions(envs) == [[0, 1, 2, 1], [0, 2, 4, 2]]
        assert len(pids(envs)) == 4


def test_the_declaration_is_seen_through_wrappers(library):
    with muster.make_vec(
        DeclaredSimulator,
        3,
        env_kwargs={"library": library},
        wrappers=[lambda env: gym.wrappers.TimeLimit(env, 5)],
    ) as envs:
        assert len(pids(envs)) == 3


def test_a_declaration_that_contradicts_a_number_of_workers_is_an_error(library, in_child):
    def run():
        muster.make_vec(DeclaredSimulator, 4, env_kwargs={"library": library}, num_workers=2)

    said = in_child(run)
    assert said.startswith("OneEnvPerProcess: DeclaredSimulator declares")
    assert "own: one_env_per_process=True without num_workers." in said


@pytest.mark.parametrize("backend", ["serial", "thread"])
def test_a_second_env_of_a_process_is_refused_before_it_is_built(library, in_child, backend):
    def run():
        muster.make_vec(DeclaredSimulator, 2, backend=backend, env_kwargs={"library": library})

    assert in_child(run).startswith("OneEnvPerProcess: DeclaredSimulator declares")


def test_serial_takes_a_single_one(library, in_child):
    def run():
        with muster.make_vec(DeclaredSimulator, 1, backend="serial", env_kwargs={"library": library}) as envs:
            return positions(envs)

    assert in_child(run) == "[[0.0], [0.0]]"


def test_the_caller_loads_nothing(library):
    with muster.make_vec(Simulator, 2, env_kwargs={"library": library}, one_env_per_process=True):
        assert library not in Path("/proc/self/maps").read_text()


def test_an_env_alone_in_its_process_says_nothing_of_processes():
    with muster.make_vec(Counter, 2, env_kwargs={"length": "none"}) as envs, pytest.raises(EnvError) as raised:
        envs.reset()
        envs.step(np.array([0, 0]))
    assert "process" not in str(raised.value)
