"""`stats()`: what each worker's process holds, and what it has added since its envs were built."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
from typing import Any

import numpy as np
import pytest

import muster
from muster.pool.resources import Usage, descendants, private_bytes, usage_of
from processes import kill_worker
from sample_envs import Counter
from slow import slow

MIB = 1 << 20


class Hoarder(Counter):
    """Keeps 4 MiB, a pipe and a process from each action that is 1; has some of each from the start."""

    def __init__(self) -> None:
        super().__init__(length=100)
        self.kept: list[Any] = []
        self._keep(MIB)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if action == 1:
            self._keep(4 * MIB)
        return super().step(action)

    def _keep(self, size: int) -> None:
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE)  # not from the allocator, which reuses what others have freed
        np.frombuffer(memory, np.uint8)[:] = 1
        self.kept.append((memory, os.pipe(), subprocess.Popen(["sleep", "100"])))

    def close(self) -> None:
        for _, pipe, process in self.kept:
            process.kill()
            process.wait()
            for fd in pipe:
                os.close(fd)


def growth(worker: dict[str, Any]) -> tuple[int, int, int]:
    return round(worker["memory_growth_bytes"] / MIB), worker["handles_growth"], worker["children_growth"]


@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 2, "context": "forkserver"},
        {"num_workers": 1, "caller_steps": True},
    ],
)
def test_each_worker_shows_what_it_has_added(options: dict[str, Any]) -> None:
    with muster.make_vec([Hoarder] * 2, **options) as envs:
        envs.reset(seed=0)
        envs.step(np.array([0, 0]))
        assert envs.stats()["processes"] == 2
        before = envs.stats()["workers"]
        assert [growth(worker) for worker in before] == [(0, 0, 0)] * 2
        assert all(worker["handles"] == worker["fds"] > 0 and worker["children"] >= 1 for worker in before)
        for _ in range(3):
            envs.step(np.array([0, 1]))
        after = envs.stats()["workers"]
        assert [growth(worker) for worker in after] == [(0, 0, 0), (12, 6, 3)]
        assert after[1]["handles"] == before[1]["handles"] + 6
        assert after[1]["children"] == before[1]["children"] + 3
        assert after[1]["memory_bytes"] - before[1]["memory_bytes"] == pytest.approx(12 * MIB, abs=MIB)


@pytest.mark.parametrize("backend", ["serial", *slow("thread")])
def test_envs_in_the_callers_process_show_what_that_has_added(backend: Any) -> None:
    with muster.make_vec([Hoarder] * 2, backend=backend) as envs:
        envs.reset(seed=0)
        envs.step(np.array([1, 0]))
        stats = envs.stats()
        assert stats["processes"] == 1
        for worker in stats["workers"]:
            assert (worker["pid"], *growth(worker)) == (os.getpid(), 4, 2, 1)


def test_a_worker_that_replaces_another_is_measured_from_its_own_start() -> None:
    with muster.make_vec([Hoarder], on_failure="restart", num_workers=1) as envs:
        envs.reset(seed=0)
        envs.step(np.array([1]))
        (first,) = envs.stats()["workers"]
        assert growth(first) == (4, 2, 1)
        kill_worker(envs, 0)
        for _ in range(3):
            envs.step(np.array([0]))
        (second,) = envs.stats()["workers"]
        assert second["pid"] != first["pid"]
        assert growth(second) == (0, 0, 0)
        envs.step(np.array([1]))
        (second,) = envs.stats()["workers"]
        assert growth(second) == (4, 2, 1)


def test_a_worker_that_has_ended_holds_nothing_that_is_known() -> None:
    with muster.make_vec([Counter] * 2, num_workers=2) as envs:
        kill_worker(envs, 0)
        while (stats := envs.stats())["workers"][0]["pid"] is not None:
            pass
        assert stats["processes"] == 1
        keys = ("memory_bytes", "memory_growth_bytes", "handles", "handles_growth", "children", "children_growth")
        assert [stats["workers"][0][key] for key in keys] == [None] * 6


def test_the_processes_of_processes_are_found() -> None:
    before = descendants(os.getpid())
    with subprocess.Popen(["sh", "-c", "sleep 100 & wait"]) as shell:
        try:
            while not (of_shell := descendants(shell.pid)):
                pass
            assert len(of_shell) == 1
            assert len(descendants(os.getpid()) or ()) == len(before or ()) + 2
        finally:
            for pid in [*(descendants(shell.pid) or ()), shell.pid]:
                os.kill(pid, signal.SIGKILL)


def test_a_process_that_has_ended_has_no_usage() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert usage_of(ended.pid) == usage_of(None) == Usage()
    assert private_bytes(ended.pid) is None
