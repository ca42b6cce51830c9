"""The contracts of backends, for all backends that exist. Nowhere else are tests repeated for each backend.

Start methods differ in the start only; everything after the start is tested on one of them. Threads, and the calling
process where it steps a share, run the loop that serial and processes run: what that writes is tested on these two.
"""

from __future__ import annotations

from typing import Any

import pytest
from backend_contract import BackendContract, OrderContract, StartContract
from multi_agent_contract import MultiAgentBackendContract

import muster
from sample_envs import Awaited


class TestSerial(BackendContract, MultiAgentBackendContract):
    has_worker_processes = False
    steps_in_the_caller = True
    other_num_workers = None

    def make_vec(self, env: Any, num_envs: int | None = None, **options: Any) -> Any:
        return muster.make_vec(env, num_envs, backend="serial", **options)


class TestThread(OrderContract):
    has_worker_processes = False

    def make_vec(self, env: Any, num_envs: int | None = None, **options: Any) -> Any:
        return muster.make_vec(env, num_envs, **{"backend": "thread", "num_workers": 2, **options})


@pytest.mark.slow
class TestAllOnThread(BackendContract, MultiAgentBackendContract):
    has_worker_processes = False
    make_vec = TestThread.make_vec


class TestFork(BackendContract):
    other_num_workers = 1

    def make_vec(self, env: Any, num_envs: int | None = None, **options: Any) -> Any:
        return muster.make_vec(env, num_envs, **{"context": "fork", "num_workers": 2, **options})


@pytest.mark.slow
class TestConcurrentThreads(BackendContract):
    other_num_workers = 1

    def make_vec(self, env: Any, num_envs: int | None = None, **options: Any) -> Any:
        return muster.make_vec(env, num_envs, **{"context": "fork", "concurrent": True, "num_workers": 2, **options})


class TestCoroutines(BackendContract):
    other_num_workers = 1

    def make_vec(self, env: Any, num_envs: int | None = None, **options: Any) -> Any:
        wrappers = [*options.pop("wrappers", ()), Awaited]
        return muster.make_vec(
            env, num_envs, wrappers=wrappers, **{"context": "fork", "concurrent": True, "num_workers": 2, **options}
        )


class TestForkserver(StartContract, MultiAgentBackendContract):
    def make_vec(self, env: Any, num_envs: int | None = None, **options: Any) -> Any:
        return muster.make_vec(env, num_envs, **{"context": "forkserver", "num_workers": 2, **options})


class TestSpawn(StartContract):
    other_num_workers = 1

    def make_vec(self, env: Any, num_envs: int | None = None, **options: Any) -> Any:
        return muster.make_vec(env, num_envs, **{"context": "spawn", "num_workers": 2, **options})


class TestCallerSteps(OrderContract):
    steps_in_the_caller = True

    def make_vec(self, env: Any, num_envs: int | None = None, **options: Any) -> Any:
        options = {"context": "fork", "num_workers": 1, "caller_steps": True, **options}
        return muster.make_vec(env, num_envs, **options)


@pytest.mark.slow
class TestAllOnCallerSteps(BackendContract, MultiAgentBackendContract):
    steps_in_the_caller = True
    make_vec = TestCallerSteps.make_vec
