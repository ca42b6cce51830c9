"""A caller in a terminal: whether or not workers use the terminal, they are never stopped for it."""

from __future__ import annotations

import os
import pty
import sys
import time

import pytest

from slow import slow

CALLER = """
import subprocess, sys, termios
import gymnasium, numpy as np, muster

class Talking(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        print("said by the env", flush=True)
        try:
            with open("/dev/tty") as terminal:
                answer = terminal.readline()
        except OSError:
            answer = "none to be had"
        # It makes sure of the terminal, if there is one, by stopping its own process group.
        shell = subprocess.run(["bash", "-i", "-c", "exit 7"], stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return np.zeros(1, np.float32), 0.0, False, False, {"answer": answer, "shell": shell.returncode}

settings = termios.tcgetattr(0)
settings[3] |= termios.TOSTOP  # stops whoever writes without being in the foreground
termios.tcsetattr(0, termios.TCSANOW, settings)
with muster.make_vec(Talking, 2, num_workers=2, context=sys.argv[1]) as envs:
    envs.reset()
    infos = envs.step(np.zeros(2, np.int64))[4]
    print(*infos["answer"], *infos["shell"])
print("done")
"""


@pytest.mark.filterwarnings("ignore")  # pty.fork warns of the threads that other tests have left
@pytest.mark.parametrize("context", ["forkserver", *slow("fork", "spawn")])
def test_an_env_that_uses_the_terminal_is_not_stopped(context: str) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", CALLER, context])
    shown = b""
    deadline = time.monotonic() + 60
    try:
        while b"done" not in shown and time.monotonic() < deadline:
            shown += os.read(terminal, 1000)
    except OSError:  # the terminal's last process has ended
        pass
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)
    assert shown.count(b"said by the env") == 2
    assert b"none to be had none to be had 7 7" in shown
    assert b"done" in shown
