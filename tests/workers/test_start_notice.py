"""A start that takes longer than a second says on a terminal what it is doing."""

from __future__ import annotations

import os

import pytest

import programs

# Makes a vector env, or collectors, whose envs take this long to build.
_PROGRAM = """
import sys, time
import muster
from gymnasium.envs.classic_control import CartPoleEnv

seconds, front_end = float(sys.argv[1]), sys.argv[2]

class Slow(CartPoleEnv):
    def __init__(self):
        time.sleep(seconds)
        super().__init__()

if front_end == "quick":
    start = time.monotonic()
    muster.make_vec(Slow, 1, num_workers=1, context="fork").close()
    if time.monotonic() - start > 0.9:
        print("the machine was not quick", file=sys.stderr)
elif front_end == "make_vec":
    muster.make_vec(Slow, 3, num_workers=3).close()
elif front_end == "caller_steps":
    muster.make_vec(Slow, 3, num_workers=1, caller_steps=True).close()
elif front_end == "gymnasium":
    from muster.interop.gymnasium import AsyncVectorEnv
    AsyncVectorEnv([Slow], num_workers=1).close()
else:
    options = {"num_envs": 3, "num_collectors": 2, "frames_per_batch": 8, "context": "fork"}  # which has torch loaded
    muster.MultiCollector(Slow, None, **options).shutdown()
"""


def said(front_end: str, seconds: float, *, on_terminal: bool = True) -> str:
    """What the program writes to stderr."""
    terminal, its_end = os.openpty() if on_terminal else os.pipe()
    imports = programs.TORCH if front_end == "collectors" else ()
    process = programs.start("-c", _PROGRAM, str(seconds), front_end, imports=imports, stderr=its_end)
    os.close(its_end)
    shown = b""
    try:
        while part := os.read(terminal, 1000):
            shown += part
    except OSError:  # so ends a terminal that nobody has open
        pass
    os.close(terminal)
    assert process.wait() == 0
    return shown.decode()


@pytest.mark.parametrize(
    ("front_end", "line"),
    [
        ("make_vec", "muster: starting 3 envs in 3 processes\r\n"),
        pytest.param(
            "caller_steps", "muster: starting 3 envs in 1 process and in this one\r\n", marks=pytest.mark.slow
        ),
        pytest.param("gymnasium", "muster: starting 1 env in 1 process\r\n", marks=pytest.mark.slow),
        ("collectors", "muster: starting 3 envs in 2 collector processes\r\n"),
    ],
)
def test_a_slow_start_says_once_on_a_terminal_what_it_is_doing(front_end: str, line: str) -> None:
    if front_end == "collectors":
        pytest.importorskip("tensordict")
    assert said(front_end, 1.2) == line


def test_a_start_without_a_terminal_says_nothing() -> None:
    assert said("make_vec", 1.2, on_terminal=False) == ""


def test_a_quick_start_says_nothing() -> None:
    shown = said("quick", 0.0)
    assert shown == "" or "was not quick" in shown
