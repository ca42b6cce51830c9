"""The contracts of backends, for all backends that exist.

Start methods differ in the start only; everything after the start is tested on one of them.
"""

from __future__ import annotations

from typing import Any

from backend_contract import BackendContract, StartContract
from multi_agent_contract import MultiAgentBackendContract

import muster


class TestSerial(BackendContract, MultiAgentBackendContract):
    has_worker_processes = False
    steps_in_the_caller = True
    other_num_workers = None

    def make_vec(self, env: Any, num_envs: int | None = None, **options: Any) -> Any:
        return muster.make_vec(env, num_envs, backend="serial", **options)


class TestThread(BackendContract, MultiAgentBackendContract):
    has_worker_processes = False

    def make_vec(self, env: Any, num_envs: int | None = None, **options: Any) -> Any:
        return muster.make_vec(env, num_envs, **{"backend": "thread", "num_workers": 2, **options})


class TestFork(BackendContract):
    other_num_workers = 1

    def make_vec(self, env: Any, num_envs: int | None = None, **options: Any) -> Any:
        return muster.make_vec(env, num_envs, **{"context": "fork", "num_workers": 2, **options})


class TestForkserver(StartContract, MultiAgentBackendContract):
    def make_vec(self, env: Any, num_envs: int | None = None, **options: Any) -> Any:
        return muster.make_vec(env, num_envs, **{"context": "forkserver", "num_workers": 2, **options})


class TestSpawn(StartContract):
    other_num_workers = 1

    def make_vec(self, env: Any, num_envs: int | None = None, **options: Any) -> Any:
        return muster.make_vec(env, num_envs, **{"context": "spawn", "num_workers": 2, **options})


class TestCallerSteps(BackendContract, MultiAgentBackendContract):
    steps_in_the_caller = True

    def make_vec(self, env: Any, num_envs: int | None = None, **options: Any) -> Any:
        options = {"context": "fork", "num_workers": 1, "caller_steps": True, **options}
        return muster.make_vec(env, num_envs, **options)
