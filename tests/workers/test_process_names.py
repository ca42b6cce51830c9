"""The names under which ps and top show Muster's processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import muster
from envs import Scripted
from processes import kill_worker, parent_of
from slow import slow


class Named(Scripted):
    """Notes the name that its process has while it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.name = comm(os.getpid())


def comm(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


@pytest.mark.parametrize("context", ["forkserver", "fork", *slow("spawn")])
def test_workers_and_their_launcher_bear_names(context: str) -> None:
    own = comm(os.getpid())
    with muster.make_vec(Named, 3, num_workers=2, context=context, on_failure="restart") as envs:
        assert envs.get_attr("name") == ("muster-w0", "muster-w0", "muster-w1")
        envs.reset()
        kill_worker(envs, 1)
        envs.step([0, 0, 0])
        assert envs.get_attr("name")[2] == "muster-w1"
        pids = [worker["pid"] for worker in envs.stats()["workers"]]
        assert [comm(pid) for pid in pids] == ["muster-w0", "muster-w1"]
        assert {comm(parent_of(pid)) for pid in pids} == {own if context == "fork" else "muster-launcher"}
    assert comm(os.getpid()) == own


def test_collectors_bear_names_of_their_own() -> None:
    pytest.importorskip("tensordict")
    collector = muster.MultiCollector(Named, None, num_collectors=2, frames_per_batch=4, context="fork")
    pids = [worker["pid"] for worker in collector.stats()["collectors"]["workers"]]
    names = [comm(pid) for pid in pids]
    collector.shutdown()
    assert names == ["muster-c0", "muster-c1"]
