"""The caller ends by a signal: its workers and what they started are gone, within a second on a machine at rest.

On a busy machine everything takes longer, so the bound here is wider. No wait or retry on the way takes a time between
one second and this bound.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import programs
from processes import is_alive, parent_of

HERE = Path(__file__).parent
BOUND_S = 20.0
CONTEXTS = ("forkserver", "fork", "spawn")

# Prints a line once its workers are in the state that the test asks for, then waits to be killed.
CALLER = """
import os, signal, sys, threading, time
import faulty_envs, muster
from envs import Scripted
import numpy as np

method, state, threaded = sys.argv[1:]

class Env(Scripted):
    def __init__(self, state):
        super().__init__()
        self.state = state
        if self.index == 0:
            faulty_envs.start_children(process_group=0)
            if state == "building":
                os.write(1, b"in env 0's constructor\\n")
                time.sleep(1000)

    def step(self, action):
        if self.state == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.state == "in C":
            faulty_envs.hang_in_c()
        elif self.state == "flooding":
            while True:
                os.write(2, b"noise that nobody reads" * 100)
        return super().step(action)

def start():
    global envs
    envs = muster.make_vec(Env, 2, num_workers=2, context=method, env_kwargs={"state": state})
    envs.reset()
    if state != "idle":
        envs.send(np.zeros(2, np.int64))

if threaded == "True":
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
else:
    start()
time.sleep(0.5)
print("ready", flush=True)
signal.pause()
"""


def run_caller(method: str, state: str, *, threaded: bool = False, by: Any = signal.SIGKILL) -> set[int]:
    """Starts a caller, ends it by the signal, and returns its processes that live on."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    caller = programs.start("-c", CALLER, method, state, str(threaded), env=environ)
    assert caller.stdout is not None
    assert caller.stderr is not None
    if not caller.stdout.readline():
        pytest.fail(caller.communicate()[1])
    # Two workers, env 0's three children and, except under fork, the launcher.
    expected, deadline = 5 + (method != "fork"), time.monotonic() + BOUND_S
    while len(before := family(caller.pid)) != expected:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    caller.send_signal(by)
    deadline = time.monotonic() + BOUND_S
    while (left := {pid for pid in before if is_alive(pid)}) and time.monotonic() < deadline:
        time.sleep(0.01)
    caller.stdout.close()
    caller.stderr.close()
    assert caller.wait(BOUND_S) == -by
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return left


def family(pid: int) -> set[int]:
    """All living descendants of `pid`, also those whose parent has ended."""
    from_parent: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and is_alive(int(entry.name)):
            from_parent.setdefault(parent_of(int(entry.name)), []).append(int(entry.name))
    found: set[int] = set()
    queue = [pid]
    while queue:
        children = from_parent.get(queue.pop(), [])
        found.update(children)
        queue += children
    return found


def some_slow(params: list[tuple[Any, ...]], fast: list[tuple[Any, ...]]) -> list[Any]:
    return [pytest.param(*param, marks=() if param in fast else pytest.mark.slow) for param in params]


STATES = ("building", "idle", "in C", "stopped", "flooding")
EVERY = some_slow(
    list(itertools.product(CONTEXTS, STATES)),
    [
        ("forkserver", "stopped"),
        ("fork", "flooding"),
        ("fork", "building"),
    ],
)
THREADED = some_slow(list(itertools.product(CONTEXTS, ("in C", "stopped"))), [("forkserver", "in C")])
SIGNALS = some_slow(
    list(itertools.product(("forkserver", "fork"), (signal.SIGTERM, signal.SIGSEGV, signal.SIGHUP))),
    [("fork", signal.SIGTERM)],
)


@pytest.mark.parametrize(("method", "state"), EVERY)
@pytest.mark.usefixtures("leaves_nothing")
def test_sigkill_takes_workers_and_their_children(method: str, state: str) -> None:
    assert not run_caller(method, state)


@pytest.mark.parametrize(("method", "by"), SIGNALS)
@pytest.mark.usefixtures("leaves_nothing")
def test_other_signals_do_the_same(method: str, by: signal.Signals) -> None:
    assert not run_caller(method, "in C", by=by)


@pytest.mark.parametrize(("method", "state"), THREADED)
@pytest.mark.usefixtures("leaves_nothing")
def test_workers_made_in_a_thread_outlive_it_but_not_the_caller(method: str, state: str) -> None:
    assert not run_caller(method, state, threaded=True)
