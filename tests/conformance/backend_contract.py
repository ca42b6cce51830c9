"""The contract of every backend. A subclass of `BackendContract` says how a vector env is made on its backend:

    class TestMine(BackendContract):
        def make_vec(self, env, num_envs=None, **options):
            return muster.make_vec(env, num_envs, backend="mine", **options)

All tests of the contract then run on that backend.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from backend_under_test import BackendUnderTest, MakeVec, same_run
from error_contract import ErrorContract
from gymnasium.vector import AutoresetMode
from info_contract import InfoContract
from step_contract import StepContract

import muster
from hanging import hang, released
from muster.errors import ClosedError, NotPendingError, PendingError, WaitTimeout, WorkerDied
from processes import kill_worker
from sample_envs import Counter, Everything
from slow import slow


def _pong() -> gym.Env[Any, Any]:
    import ale_py

    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    return gym.make("ALE/Pong-v5", max_episode_steps=200)


REPRODUCIBLE: dict[str, Callable[[], gym.Env[Any, Any]]] = {
    "CartPole": functools.partial(gym.make, "CartPole-v1"),
    "nested Dict": functools.partial(Everything, length=30),
    "HalfCheetah": functools.partial(gym.make, "HalfCheetah-v5", max_episode_steps=50),
    "Pong": _pong,
}
_SIMULATORS = {"HalfCheetah": "mujoco", "Pong": "ale_py"}  # take seconds to start


class Stuck(Counter):
    """An env whose steps do not end."""

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        hang()
        return super().step(action)


class StartContract(BackendUnderTest):
    """The part of `BackendContract` that depends on how workers start and end; for further ways to start them."""

    @pytest.mark.parametrize("name", ["nested Dict", *slow("CartPole", *_SIMULATORS)])
    def test_runs_are_bit_identical_whatever_steps_them(self, make: MakeVec, name: str) -> None:
        if not self.has_worker_processes:
            pytest.skip("steps envs in this process, as what it would be compared with does")
        bit_identical_run(make, name, 60, self.other_num_workers)

    @pytest.mark.slow
    @pytest.mark.parametrize("num_workers", [1, 2, 3])
    @pytest.mark.parametrize("name", REPRODUCIBLE)
    def test_long_runs_are_bit_identical(self, make: MakeVec, name: str, num_workers: int) -> None:
        if self.other_num_workers is None:
            pytest.skip("takes no number of workers")
        bit_identical_run(make, name, 1000, num_workers)

    def test_close_leaves_nothing_behind(self, make: MakeVec) -> None:
        gc.collect()  # what tests before have dropped
        fds_before, children_before = set(os.listdir("/proc/self/fd")), children()
        envs = make([Counter] * 3)
        envs.reset()
        pids = {worker["pid"] for worker in envs.stats()["workers"]} - {os.getpid()}
        assert bool(pids) == self.has_worker_processes
        envs.close()
        assert set(os.listdir("/proc/self/fd")) == fds_before
        assert not any(os.path.exists(f"/proc/{pid}") for pid in pids)
        assert children() == children_before

    def test_a_vector_env_that_lost_a_worker_says_that_it_is_closed(self, make: MakeVec) -> None:
        if not self.has_worker_processes:
            pytest.skip("has no worker processes")
        envs = make([Counter] * 2)
        envs.reset(seed=0)
        kill_worker(envs, 0)
        with pytest.raises(WorkerDied, match="SIGKILL") as caught:
            envs.step([0, 0])
        assert 0 in caught.value.env_indices
        assert envs.closed
        with pytest.raises(ClosedError):
            envs.step([0, 0])


class OrderContract(StartContract):
    """The part of `BackendContract` that is about who steps when."""

    def test_first_ready_envs_come_first(self, make: MakeVec) -> None:
        envs = make([functools.partial(Counter, step_s=0.3 if i == 3 else 0.0) for i in range(4)])
        envs.reset(seed=0)
        envs.send(np.zeros(4, int))
        seen: list[int] = []
        while len(seen) < 4:
            batch = envs.recv(min_envs=1)
            assert batch.obs[:, 0].tolist() == batch.env_ids.tolist()
            assert (len(batch.rewards), len(batch.terminated), len(batch.truncated)) == (len(batch.env_ids),) * 3
            seen += batch.env_ids.tolist()
        assert sorted(seen) == [0, 1, 2, 3]
        with pytest.raises(NotPendingError, match="0 envs are pending"):
            envs.recv(min_envs=1)

    def test_envs_can_be_sent_to_in_any_order(self, make: MakeVec) -> None:
        envs = make([Counter] * 4)
        envs.reset(seed=0)
        envs.send(np.array([1, 2]), [3, 0])
        with pytest.raises(PendingError, match="env 3 still owes"):
            envs.send(np.array([1]), [3])
        batch = envs.recv()
        assert batch.env_ids.tolist() == [0, 3]
        assert batch.obs.tolist() == [[0, 1, 1], [3, 1, 1]]
        assert envs.get_attr("actions") == ([2], [], [], [1])

    def test_a_timeout_leaves_the_step_pending(self, make: MakeVec) -> None:
        if self.steps_in_the_caller:
            pytest.skip("steps envs while it waits")
        envs = make([functools.partial(Counter, step_s=0.5)] * 2)
        envs.reset(seed=0)
        envs.step_async(np.zeros(2, int))
        with pytest.raises(WaitTimeout, match="stay pending"):
            envs.step_wait(timeout=0.05)
        with pytest.raises(PendingError):
            envs.step(np.zeros(2, int))
        obs, *_ = envs.step_wait()
        assert obs[:, 2].tolist() == [1, 1]

    def test_two_vector_envs_live_side_by_side(self, make: MakeVec) -> None:
        train, evaluate = make([Counter] * 2), make([Counter] * 2)
        train.reset(seed=0)
        evaluate.reset(seed=50)
        train.step(np.zeros(2, int))
        train.close()
        assert evaluate.step(np.zeros(2, int))[0].tolist() == [[50, 1, 1], [51, 1, 1]]

    def test_stats_tell_where_the_time_went(self, make: MakeVec) -> None:
        envs = make([functools.partial(Counter, step_s=0.001)] * 4, copy=False)
        envs.reset()
        for _ in range(20):
            envs.step(np.zeros(4, int))
        stats = envs.stats()
        assert stats["env_steps"] + sum(worker["resets"] for worker in stats["workers"]) == 84
        assert not envs.copy
        for worker in stats["workers"]:
            assert worker["stepping"] + worker["waiting"] + worker["copying"] == pytest.approx(1)
            assert worker["memory_bytes"] > 0
            assert worker["fds"] > 0

    def test_close_takes_gymnasiums_default_timeout(self, make: MakeVec) -> None:
        make([Counter] * 2).close(timeout=None)

    def test_close_ends_within_bounds_though_a_step_does_not(self, make: MakeVec) -> None:
        envs = make([Stuck] * 2)
        envs.reset(seed=0)
        envs.step_async(np.zeros(2, int))
        started = time.monotonic()
        verb, has_workers = (
            ("killed", True) if self.has_worker_processes else ("left behind", not self.steps_in_the_caller)
        )
        cut = pytest.warns(RuntimeWarning, match=f"was {verb} before it closed env 0: it was in step of env 0")
        with released(), cut if has_workers else contextlib.nullcontext():
            envs.close(timeout=0.2)
        assert time.monotonic() - started < 20
        assert envs.closed


class BackendContract(StepContract, InfoContract, ErrorContract, OrderContract):
    """The tests that every backend has to pass unchanged."""

    @pytest.mark.parametrize("mode", ["next_step", "same_step"])
    def test_every_kind_of_space_survives_the_trip(self, make: MakeVec, mode: str) -> None:
        envs = make([Everything] * 3, autoreset_mode=mode)
        reference = gym.vector.SyncVectorEnv([Everything] * 3, autoreset_mode=AutoresetMode[mode.upper()])
        assert envs.observation_space == reference.observation_space
        assert envs.single_action_space == reference.single_action_space
        same_run(envs, reference, 20)


def bit_identical_run(make: MakeVec, name: str, steps: int, num_workers: int | None) -> None:
    """Asserts that 6 envs on the backend give the rows that they give on the serial one."""
    if name in _SIMULATORS:
        pytest.importorskip(_SIMULATORS[name])
    recipes = [REPRODUCIBLE[name]] * 6
    envs = make(recipes, **({} if num_workers is None else {"num_workers": num_workers}))
    with muster.make_vec(recipes, backend="serial") as reference:
        same_run(envs, reference, steps)


def children() -> str:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text()
