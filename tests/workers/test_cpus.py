"""Workers that share cores with their caller: they keep their affinity, and one that is stopped holds up no other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest

import muster
from muster.errors import WaitTimeout
from sample_envs import Counter
from slow import slow


class Seated(Counter):
    def allowed(self) -> set[int]:
        return os.sched_getaffinity(0)


@pytest.fixture
def two_workers() -> Any:
    envs = muster.make_vec(Seated, 4, num_workers=2)
    envs.reset(seed=0)
    yield envs
    envs.close()


def test_workers_keep_the_affinity_that_they_were_given(two_workers: Any) -> None:
    for _ in range(500):
        two_workers.step(np.ones(4, np.int64))
    assert two_workers.call("allowed") == (os.sched_getaffinity(0),) * 4


def test_workers_confined_to_one_core_step_all_the_same(two_workers: Any) -> None:
    core = min(os.sched_getaffinity(0))
    for _ in range(50):  # seats are taken
        two_workers.step(np.ones(4, np.int64))
    for worker in two_workers.stats()["workers"]:
        os.sched_setaffinity(worker["pid"], {core})
    for _ in range(200):
        two_workers.step(np.ones(4, np.int64))
    assert two_workers.call("allowed") == ({core},) * 4


@pytest.mark.parametrize("stopped", [0, *slow(1)])
def test_a_stopped_worker_keeps_no_answer_of_another_from_the_caller(two_workers: Any, stopped: int) -> None:
    for _ in range(50):  # seats are taken
        two_workers.step(np.ones(4, np.int64))
    pid = two_workers.stats()["workers"][stopped]["pid"]
    os.kill(pid, signal.SIGSTOP)
    others = np.array([2, 3] if stopped == 0 else [0, 1])
    for _ in range(100):
        two_workers.send(np.ones(2, np.int64), env_ids=others)
        assert two_workers.recv(min_envs=2, timeout=5).env_ids.tolist() == others.tolist()
    os.kill(pid, signal.SIGCONT)


def test_a_timeout_holds_while_another_process_wants_the_callers_core(two_workers: Any) -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    another = subprocess.Popen([sys.executable, "-c", "import signal; signal.alarm(15)\nwhile True: pass"])
    workers = [worker["pid"] for worker in two_workers.stats()["workers"]]
    try:
        for _ in range(30):
            time.sleep(0.0002)  # at a policy's pace
            two_workers.step(np.ones(4, np.int64))
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)
        two_workers.step_async(np.ones(4, np.int64))
        start = time.monotonic()
        with pytest.raises(WaitTimeout):
            two_workers.step_wait(timeout=0.1)
        assert time.monotonic() - start < 3
    finally:
        another.kill()
        another.wait()
        for pid in workers:
            os.kill(pid, signal.SIGCONT)
        os.sched_setaffinity(0, allowed)


def test_answers_are_right_at_whatever_pace_the_caller_steps(two_workers: Any) -> None:
    with muster.make_vec(Seated, 4, backend="serial") as serial:
        serial.reset(seed=0)
        for think_s in (0.0, 0.0003, 0.003) * 3:
            for _ in range(30):
                until = time.perf_counter() + think_s
                while time.perf_counter() < until:
                    pass
                one, another = (envs.step(np.ones(4, np.int64))[0] for envs in (two_workers, serial))
                assert one.tolist() == another.tolist()


def test_of_very_many_workers_on_a_core_none_stays_awake_for_long() -> None:
    allowed, num_workers = os.sched_getaffinity(0), 21
    os.sched_setaffinity(0, {min(allowed)})
    try:
        with muster.make_vec(Counter, num_workers, num_workers=num_workers) as envs:
            envs.reset()
            pids = [worker["pid"] for worker in envs.stats()["workers"]]
            before = sum(map(_yields, pids))
            for _ in range(3):
                envs.step(np.ones(num_workers, np.int64))
                time.sleep(0.03)
            yields = sum(map(_yields, pids)) - before
    finally:
        os.sched_setaffinity(0, allowed)
    assert yields < 3 * 40 * num_workers


def _yields(pid: int) -> int:
    """How often a process has given up its core, or lost it, without sleeping."""
    with open(f"/proc/{pid}/status", encoding="ascii") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("nonvoluntary_ctxt_switches"))
