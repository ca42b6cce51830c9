"""Habits of callers that other libraries do not expect: ignored signals, many vector envs, many resets."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import muster
from envs import Scripted
from processes import is_alive, kill_worker
from slow import slow

CONTEXTS = ("forkserver", "fork", "spawn")
ACTIONS = np.zeros(2, np.int64)
pytestmark = pytest.mark.usefixtures("leaves_nothing")


def make(**options: Any) -> Any:
    return muster.make_vec(Scripted, 2, num_workers=2, **options)


@pytest.fixture
def _ignores_sigchld() -> Iterator[None]:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGCHLD, before)


@pytest.mark.parametrize("context", ["forkserver", "fork", *slow("spawn")])
@pytest.mark.usefixtures("_ignores_sigchld")
def test_a_caller_that_ignores_sigchld(context: str) -> None:
    with make(context=context, on_failure="restart") as envs:
        envs.reset()
        kill_worker(envs, 1)
        _, _, _, truncated, infos = envs.step(ACTIONS)
        assert truncated.tolist() == [False, True]
        assert "worker 1 (env 1) died" in infos["restarted"][1]


@pytest.mark.slow
def test_deaths_in_one_vector_env_are_not_seen_in_another() -> None:
    several = [make(context=context, on_failure="restart") for context in (*CONTEXTS, "fork")]
    for envs in several:
        envs.reset()
        envs.send(ACTIONS)
    kill_worker(several[1], 0)
    for envs in reversed(several):
        envs.recv()
    several[1].close()
    kill_worker(several[2], 1)
    assert [envs.step(ACTIONS)[3].tolist() for envs in (several[0], several[2], several[3])] == [
        [False, False],
        [False, True],
        [False, False],
    ]
    for envs in several:
        envs.close()


@pytest.mark.parametrize("options", [{}, {"backend": "thread"}, *slow({"context": "fork"})], ids=str)
@pytest.mark.parametrize("pending", ["step", *slow("call")])
def test_garbage_collection_while_something_is_pending(options: Any, pending: str) -> None:
    envs = make(**options)
    envs.reset()
    pids = [worker["pid"] for worker in envs.stats()["workers"]]
    if pending == "step":
        envs.send(ACTIONS)
    else:
        envs.call_async("reset")
    box = [envs]
    del envs
    thread = threading.Thread(target=box.clear)  # another thread drops the last reference
    thread.start()
    thread.join()
    gc.collect()
    assert not any(is_alive(pid) for pid in pids if pid != os.getpid())


@pytest.mark.parametrize("on_failure", ["restart", *slow("raise")])
def test_many_resets_and_calls_hold_no_more_fds(on_failure: str) -> None:
    def fds() -> list[int]:
        return [len(os.listdir("/proc/self/fd")), *[worker["fds"] for worker in envs.stats()["workers"]]]

    with make(on_failure=on_failure) as envs:
        envs.reset()
        before = fds()
        for _ in range(500):
            envs.reset(options={"some": "thing"})
            envs.get_attr("index")
        assert fds() == before


def test_many_restarts_hold_no_more_fds() -> None:
    with make(on_failure="restart", max_restarts=100, context="fork") as envs:
        envs.reset()
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(6):
            kill_worker(envs, 0)
            assert envs.step(ACTIONS)[3].tolist() == [True, False]
            envs.step(ACTIONS)
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_signals_handler_in_c_stays_and_calls_that_in_python(tmp_path: Path) -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: came.append(number))
    try:
        with (tmp_path / "stack").open("w+") as stack:
            faulthandler.register(signal.SIGUSR1, file=stack, chain=True)
            with muster.make_vec("CartPole-v1", 2, num_workers=1, context="fork") as envs:
                envs.reset()
                os.kill(os.getpid(), signal.SIGUSR1)
            faulthandler.unregister(signal.SIGUSR1)
            assert "most recent call first" in Path(stack.name).read_text()
        assert came == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)
