"""Several threads of the caller's: two on one vector env, and one that still steps when Python ends."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from test_interrupts import BACKENDS, Echoing

import muster
import programs
from muster.errors import ClosedError, PendingError, UsageError
from muster.interop.gymnasium import AsyncVectorEnv
from slow import slow

ACTIONS = np.zeros(4, np.int64)
FOLDER = os.path.dirname(os.path.dirname(__file__))  # that of envs.py
PROGRAM = """
import json, sys, threading
import muster, numpy as np
from envs import Scripted

if __name__ == "__main__":
    envs = muster.make_vec(Scripted, 4, **json.loads(sys.argv[1]))
    envs.reset()
    began = threading.Event()

    def steps():
        while True:
            envs.step(np.zeros(4, np.int64))
            began.set()

    threading.Thread(target=steps, daemon=True).start()
    began.wait()
"""


@pytest.mark.parametrize("backend", ["serial", "thread", *slow("process", "caller steps")])
def test_a_daemon_thread_that_steps_does_not_crash_the_interpreters_end(backend: str) -> None:
    for _ in range(2):
        ended = programs.run(
            "-c", PROGRAM, json.dumps(BACKENDS[backend]), fresh=True, env=os.environ | {"PYTHONPATH": FOLDER}
        )
        assert ended.returncode == 0, ended.stderr


def test_the_interpreters_end_does_not_wait_for_a_thread_that_hangs_in_an_env() -> None:
    program = """
import threading, time
import gymnasium as gym, muster

class Hung(gym.Env):
    observation_space = action_space = gym.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        return 0, {}
    def step(self, action):
        began.set()
        time.sleep(10_000)

began = threading.Event()
envs = muster.make_vec(Hung, 1, backend="serial")
envs.reset()
threading.Thread(target=envs.step, args=([0],), daemon=True).start()
began.wait()
"""
    ended = programs.run("-c", program, fresh=True, timeout=40.0)
    assert ended.returncode == 0, ended.stderr


@pytest.fixture
def eager_switches() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("eager_switches")
@pytest.mark.parametrize("backend", ["serial", "process"])
def test_two_threads_on_one_vector_env_get_right_rows_or_the_named_error(backend: str) -> None:
    wrong: list[Any] = []
    refused = 0

    def steps(envs: Any) -> None:
        nonlocal refused
        taken, deadline = 0, time.monotonic() + 60.0
        while taken < 150 or (not refused and time.monotonic() < deadline):
            taken += 1
            try:
                obs, _, _, _, infos = envs.step(ACTIONS)
            except (UsageError, PendingError):
                refused += 1
                continue
            said = [f"step {step:.0f}" for step in obs[:, 2]]
            if obs[:, 0].tolist() != [0, 1, 2, 3] or len(set(said)) > 1 or list(infos.get("step", ())) != said:
                wrong.append((obs, infos))

    with muster.make_vec(Echoing, 4, backend=backend, **({"num_workers": 2} if backend == "process" else {})) as envs:
        envs.reset()
        threads = [threading.Thread(target=steps, args=(envs,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert refused
        envs.step(ACTIONS)


class Stuck(Echoing):
    """Does not end its step."""

    def step(self, action: Any) -> Any:
        time.sleep(1000.0)


@pytest.mark.filterwarnings("ignore:.*Calling `close` while waiting for a pending call")
@pytest.mark.usefixtures("leaves_nothing")
def test_a_close_with_a_timeout_ends_a_step_of_another_thread() -> None:
    envs = AsyncVectorEnv([Stuck], context="fork")
    envs.reset()
    ended_by: list[BaseException] = []

    def steps() -> None:
        try:
            envs.step([0])
        except ClosedError as error:
            ended_by.append(error)

    thread = threading.Thread(target=steps, daemon=True)
    thread.start()
    while not envs.num_pending:
        time.sleep(0.001)
    with pytest.warns(RuntimeWarning, match="was killed before it closed env 0: it was in step of env 0"):
        envs.close(timeout=0.2)
    thread.join()
    assert len(ended_by) == 1
