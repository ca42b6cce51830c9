"""The thread backend: what it does that no other does. What all have to do is `BackendContract`'s."""

from __future__ import annotations

import gc
import os
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

import muster
import programs
from envs import Scripted
from hanging import released, worker_threads
from muster.errors import EnvError
from slow import slow


class Meeting(Scripted):
    """Its step returns only once as many envs are in step at the same time as the barrier asks for."""

    def __init__(self, barrier=None, step=None):
        super().__init__()
        self.barrier = barrier
        self.in_step = step

    def step(self, action):
        if self.barrier is not None:
            self.barrier.wait(10)
        if self.in_step is not None:
            self.in_step()
        return *super().step(action)[:4], {"thread": threading.current_thread().name}


@pytest.fixture(autouse=True)
def _no_thread_left():
    with released():
        yield
        gc.collect()
    assert worker_threads() == []


def test_envs_of_different_workers_are_stepped_at_the_same_time():
    barrier = threading.Barrier(3)
    with muster.make_vec(Meeting, 3, backend="thread", num_workers=3, env_kwargs={"barrier": barrier}) as envs:
        envs.reset()
        infos = envs.step(np.zeros(3, int))[-1]
    assert len(set(infos["thread"])) == 3


def test_arguments_are_shared_as_they_are():
    lock = threading.Lock()
    with muster.make_vec(Meeting, 4, backend="thread", num_workers=2, env_kwargs={"barrier": lock}) as envs:
        assert all(one is lock for one in envs.get_attr("barrier"))


def test_idle_threads_sleep():
    with muster.make_vec(Meeting, 4, backend="thread", num_workers=4) as envs:
        envs.reset()
        before = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - before < 0.1


def test_a_ctrl_c_that_a_step_raises_is_the_callers_and_the_others_go_on():
    def fail():
        if threading.current_thread().name == "muster-worker-1":
            raise KeyboardInterrupt

    with muster.make_vec(Meeting, 2, backend="thread", num_workers=2, env_kwargs={"step": fail}) as envs:
        envs.reset()
        with pytest.raises(KeyboardInterrupt):
            envs.step(np.zeros(2, int))
        assert len(worker_threads()) == 2


def test_an_error_while_building_leaves_nothing():
    closed = []

    class Closes(Meeting):
        def close(self):
            closed.append(self)

    def make():
        if muster.get_worker_info().env_index == 3:
            raise FileNotFoundError("level.xml")
        return Closes()

    with pytest.raises(EnvError, match=r"env 3 .*level\.xml"):
        muster.make_vec(make, 4, backend="thread", num_workers=2)
    assert len(closed) == 3


def output_after_a_send(step: str, then: str) -> str:
    """What a program prints that goes on with `then` while its `envs` are in a step. step: the code of that."""
    begin = f"""
        import faulthandler, select, sys, time
        import numpy as np
        import muster
        sys.path.insert(0, {os.path.dirname(__file__)!r})
        from muster.pool import closing, limits
        from test_thread import Meeting
        limits.BUSY_S = closing.ABANDONED_S = 1.0
        envs = muster.make_vec(Meeting, 4, backend="thread", num_workers=2, env_kwargs={{"step": lambda: {step}}})
        envs.reset()
        envs.send(np.zeros(4, int))
        time.sleep(0.2)
    """
    script = textwrap.dedent(begin) + textwrap.dedent(then)
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return str(programs.run("-c", script, env=environ, check=True).stdout)


@pytest.mark.parametrize("then", ["", "envs.close()"])
@pytest.mark.parametrize("step", ["time.sleep(60)", "exec('while True: pass')", *slow("select.poll().poll(60_000)")])
def test_the_interpreter_ends_although_a_step_does_not(step, then):
    began = time.monotonic()
    assert output_after_a_send(step, f"{then}\nprint('done')") == "done\n"
    assert time.monotonic() - began < 30
