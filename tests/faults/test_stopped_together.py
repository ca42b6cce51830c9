"""The caller and its workers are stopped together, as a suspended machine and `docker pause` do, and go on later.

That only the worker is stopped is a timeout: see test_matrix.py and tests/conformance/pool_contract.py.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

import programs
from processes import descendants

LIMIT_S = 1.5

# Prints "goes on" once the activity has ended, which lasts until the file "end" is there.
PROGRAM = """
import os, sys, time
import gymnasium as gym
import muster

folder, activity, limit_s = sys.argv[1], sys.argv[2], float(sys.argv[3])

def wait():
    open(os.path.join(folder, "begun"), "w").close()
    while not os.path.exists(os.path.join(folder, "end")):
        time.sleep(0.01)

class Env(gym.Env):
    observation_space = gym.spaces.Discrete(2)
    action_space = gym.spaces.Discrete(2)

    def __init__(self):
        if activity == "start":
            wait()

    def reset(self, *, seed=None, options=None):
        return 0, {}

    def step(self, action):
        if action or activity == "collect":
            wait()
        if action and activity == "policy":  # still steps when the caller begins to wait
            time.sleep(0.3)
        return 0, 0.0, False, False, {}

    def slow(self):
        wait()

if activity == "collect":
    options = {"frames_per_batch": 4, "num_collectors": 2, "num_envs": 2, "collect_timeout": limit_s}
    collector = muster.MultiCollector(Env, None, **options)
    next(iter(collector))
    collector.shutdown()
    print("goes on")
    sys.exit()

limits = {"start_timeout" if activity == "start" else "step_timeout": limit_s}
with muster.make_vec(Env, 2, num_workers=2, **limits) as envs:
    envs.reset()
    if activity == "step":
        envs.step([0, 1])
    elif activity == "policy":
        envs.step_async([0, 1])
        before = now = time.monotonic()
        while now - before < 1.0:  # until it has been stopped
            time.sleep(0.01)
            before, now = now, time.monotonic()
        envs.step_wait()
    elif activity == "recv":
        envs.send([0, 1])
        envs.recv(min_envs=1)
        envs.recv()
    else:
        envs.call("slow")
    print("goes on")
"""


@pytest.mark.parametrize(
    ("activity", "limit_s"),
    [
        ("policy", LIMIT_S),
        ("call", LIMIT_S),
        *(
            pytest.param(*one, marks=pytest.mark.slow)
            for one in (("step", LIMIT_S), ("recv", LIMIT_S), ("start", 6.0), ("collect", 3.0))
        ),
    ],
)
def test_the_time_for_which_all_were_stopped_is_not_counted(activity: str, limit_s: float, tmp_path: Path) -> None:
    imports = programs.TORCH if activity == "collect" else ()
    with programs.start("-c", PROGRAM, tmp_path, activity, str(limit_s), imports=imports) as program:
        while not (tmp_path / "begun").exists():
            assert program.poll() is None
            time.sleep(0.005)
        time.sleep(0.2)  # by then the caller waits, or the policy acts
        everyone = [*descendants(program.pid).values(), program.pid]
        for pid in everyone:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(limit_s + 0.5)
        for pid in reversed(everyone):  # the caller looks before the workers go on
            os.kill(pid, signal.SIGCONT)
        (tmp_path / "end").touch()
        out, err = program.communicate(timeout=60.0)
    assert out == "goes on\n", err
