"""The thread backend: what it does that no other does. What all have to do is `BackendContract`'s."""

from __future__ import annotations

import gc
import os
import signal
import sys
import textwrap
import threading
import time

import gymnasium as gym
import numpy as np
import pytest

import muster
import programs
from hanging import hang, released, worker_threads
from muster.errors import EnvError, OneEnvPerProcess, WaitTimeout, WorkerTimeout
from slow import slow


class Meeting(gym.Env):
    """Its step returns only once as many envs are in step at the same time as the barrier asks for."""

    observation_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, barrier=None, step=None):
        self.barrier = barrier
        self.in_step = step

    def reset(self, *, seed=None, options=None):
        return np.zeros(2, np.float32), {}

    def step(self, action):
        if self.barrier is not None:
            self.barrier.wait(10)
        if self.in_step is not None:
            self.in_step()
        return np.zeros(2, np.float32), 0.0, False, False, {"thread": threading.current_thread().name}

    def slow(self, event):
        return event.wait(10)


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


def test_callers_generators_are_left_alone():
    np.random.seed(5)  # noqa: NPY002
    expected = np.random.RandomState(5).rand()
    with muster.make_vec("CartPole-v1", 4, backend="thread", num_workers=2) as envs:
        envs.reset(seed=1)
        envs.step(np.zeros(4, int))
    assert np.random.rand() == expected  # noqa: NPY002


def test_worker_info_tells_envs_apart():
    seen = {}

    def make(**kwargs):
        info = muster.get_worker_info()
        seen[info.env_index] = (info.worker_index, threading.current_thread().name)
        return Meeting()

    muster.make_vec(make, 4, backend="thread", num_workers=2).close()
    assert seen == {
        0: (0, "muster-worker-0"),
        1: (0, "muster-worker-0"),
        2: (1, "muster-worker-1"),
        3: (1, "muster-worker-1"),
    }
    assert muster.get_worker_info() is None


def test_idle_threads_sleep():
    with muster.make_vec(Meeting, 4, backend="thread", num_workers=4) as envs:
        envs.reset()
        before = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - before < 0.1


@pytest.mark.parametrize("ending", [SystemExit, KeyboardInterrupt, ValueError])
def test_what_a_step_raises_names_the_env_and_the_others_go_on(ending):
    def fail():
        if threading.current_thread().name == "muster-worker-1":
            raise ending("no")

    with muster.make_vec(Meeting, 2, backend="thread", num_workers=2, env_kwargs={"step": fail}) as envs:
        envs.reset()
        with pytest.raises(KeyboardInterrupt if ending is KeyboardInterrupt else EnvError) as raised:
            envs.step(np.zeros(2, int))
        if ending is not KeyboardInterrupt:
            assert raised.value.env_index == 1
            assert raised.value.__cause__.args == ("no",)
            assert raised.value.batch.env_ids.tolist() == [0]
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


def test_a_constructor_that_hangs_ends_in_a_timeout():
    closed = []

    class Closes(Meeting):
        def __init__(self):
            super().__init__()
            if muster.get_worker_info().env_index == 1:
                hang()

        def close(self):
            closed.append(self)

    with pytest.raises(WorkerTimeout, match=r"worker 1 \(env 1\) did not answer within start_timeout=0.3 s"):
        muster.make_vec(Closes, 2, backend="thread", num_workers=2, start_timeout=0.3)
    assert len(closed) == 1


def test_an_answer_to_an_interrupted_call_is_not_taken_for_another():
    class Slow(Meeting):
        @property
        def speed(self):
            return 1.0

        @speed.setter
        def speed(self, value):
            if threading.current_thread().name == "muster-worker-1":
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.3)

    with muster.make_vec(Slow, 2, backend="thread", num_workers=2) as envs:
        with pytest.raises(KeyboardInterrupt):
            envs.set_attr("speed", 2.0)
        assert envs.get_attr("speed") == (1.0, 1.0)


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


def test_a_call_can_be_waited_for_again():
    event = threading.Event()
    with muster.make_vec(Meeting, 2, backend="thread", num_workers=2) as envs:
        envs.call_async("slow", event)
        with pytest.raises(WaitTimeout, match="workers 0, 1 have not answered"):
            envs.call_wait(timeout=0.05)
        event.set()
        assert envs.call_wait() == (True, True)


def test_an_env_that_must_be_alone_is_refused_before_a_second_is_built():
    built = []

    class Alone(Meeting):
        metadata = {"one_per_process": True}  # noqa: RUF012

        def __init__(self):
            super().__init__()
            built.append(self)

    with pytest.raises(OneEnvPerProcess, match=r'Alone declares .*backend="process"'):
        muster.make_vec(Alone, 2, backend="thread", num_workers=2)
    assert len(built) == 1
    muster.make_vec(Alone, 1, backend="thread").close()
