"""A launcher that is stopped, and forks of the caller while another of its threads starts workers."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

import muster
from envs import Scripted
from muster.errors import WorkerDied
from muster.pickling.functools_pickling import _ByValue
from muster.pool.launcher_client import LauncherClient
from muster.recipes.recipe import _live_envs
from slow import slow


@contextmanager
def stopped_launcher(envs: muster.VectorEnv) -> Iterator[int]:
    """Stops the launcher of the envs; gives the pid of the first worker."""
    pid = envs.stats()["workers"][0]["pid"]
    launcher = psutil.Process(pid).parent()
    launcher.suspend()
    try:
        yield pid
    finally:
        if launcher.is_running():
            launcher.resume()


@pytest.mark.parametrize("after_s", [0.3, *slow(0.0, 0.05, 1.2)])
def test_a_start_by_a_stopped_launcher_can_be_interrupted(after_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(8):  # more than the socket takes
        monkeypatch.setenv(f"BIG_{i}", "x" * 100_000)
    with muster.make_vec("CartPole-v1", 1, context="spawn") as envs:
        with stopped_launcher(envs), pytest.raises(KeyboardInterrupt):
            threading.Timer(after_s, os.kill, (os.getpid(), signal.SIGINT)).start()
            muster.make_vec("CartPole-v1", 1, context="spawn")
        envs.reset()
        with muster.make_vec("CartPole-v1", 1, context="spawn") as others:
            others.reset()


@pytest.mark.parametrize("on_failure", ["raise", *slow("restart")])
def test_the_end_of_a_worker_is_seen_while_the_launcher_is_stopped(on_failure: str) -> None:
    with muster.make_vec("CartPole-v1", 1, context="spawn", on_failure=on_failure, step_timeout=10) as envs:
        envs.reset()
        with stopped_launcher(envs) as pid:
            os.kill(pid, signal.SIGKILL)
            if on_failure == "raise":
                with pytest.raises(WorkerDied, match=r"launcher process was lost or stopped"):
                    envs.step([0])
            else:
                envs.step_async([0])
                threading.Timer(0.5, psutil.Process(pid).parent().resume).start()
                assert "launcher process was lost or stopped" in envs.step_wait()[4]["restarted"][0]


@pytest.mark.slow
def test_a_close_does_not_wait_for_a_stopped_launcher() -> None:
    envs = muster.make_vec("CartPole-v1", 3, num_workers=3, context="spawn", close_timeout=3)
    with stopped_launcher(envs):
        envs.close()  # warns where a worker has not closed in time


@pytest.mark.parametrize("lock", [LauncherClient._lock, *slow(_live_envs._lock, _ByValue._lock)])
@pytest.mark.parametrize("context", ["forkserver", *slow("spawn", "fork")])
@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_child_starts_workers_although_a_thread_held_a_lock_at_the_fork(lock: threading.Lock, context: str) -> None:
    held, goes_on = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            goes_on.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if not child:
        signal.alarm(30)
        try:
            muster.make_vec("CartPole-v1", 1, backend="serial").close()
            with muster.make_vec(lambda: Scripted(), 2, num_workers=2, context=context) as envs:
                envs.reset()
            os._exit(0)
        finally:
            os._exit(1)
    goes_on.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
