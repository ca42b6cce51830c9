"""Limits of processes, threads, files and sizes: errors say what failed and where the limits are, in no env's name."""

from __future__ import annotations

import os
import re
import resource
import signal
from typing import Any

import pytest

import muster
import programs
from envs import Scripted
from muster.errors import EnvError, LimitReached, WorkerDied
from processes import parent_of
from slow import slow

# Root may start more processes than RLIMIT_NPROC allows. The program gets the real uid of another user, and loses the
# rights that lift this limit; it keeps those to read the files of this project.
LIMITED = """
import ctypes, os, resource, sys
import muster

def become(uid):
    libc = ctypes.CDLL(None, use_errno=True)
    header, words = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
    for right in (21, 24):  # CAP_SYS_ADMIN, CAP_SYS_RESOURCE
        assert libc.prctl(24, right, 0, 0, 0) == 0
    os.setresuid(uid, 0, 0)
    assert libc.capget(header, words) == 0
    words[0] &= ~(1 << 21 | 1 << 24)
    words[1] &= ~(1 << 21 | 1 << 24)
    assert libc.capset(header, words) == 0

def limit(name, number):
    if name == "NPROC":
        become(60_000 + os.getpid() % 5_000)
    resource.setrlimit(getattr(resource, "RLIMIT_" + name), (number, number))

def make(context, count):
    if context == "thread":
        return muster.make_vec("CartPole-v1", count, num_workers=count, backend="thread")
    return muster.make_vec("CartPole-v1", count, num_workers=count, context=context)

def say(attempt):
    try:
        attempt()
    except Exception as error:
        print(type(error).__name__, error)
    else:
        print("worked")

name, number, context = sys.argv[1], int(sys.argv[2]), sys.argv[3]
"""
NO_MORE = r"Resource temporarily unavailable\. .*`ulimit -a` and pids\.max .* Allow more, or ask for fewer workers"
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")


def said(program: str, *arguments: Any, **options: Any) -> str:
    """What a program says that runs under a limit; it leaves no process behind that would keep its output open."""
    return str(programs.run("-c", LIMITED + program, *map(str, arguments), check=True, **options).stdout)


@needs_root
@pytest.mark.parametrize("context", ["forkserver", "fork", "thread", *slow("spawn")])
def test_a_limit_of_a_users_processes_is_told(context: str) -> None:
    out = said("limit(name, number); say(lambda: make(context, 12))", "NPROC", 9, context)
    assert re.match(rf"LimitReached .*worker \d+ .*, of 12, could not start: {NO_MORE}", out), out


@needs_root
def test_a_worker_that_can_start_no_thread_blames_no_env() -> None:
    out = said("limit(name, number); say(lambda: make(context, 1))", "NPROC", 2, "fork")
    assert re.search(rf"WorkerDied .*\nLikely cause: it could start no thread: {NO_MORE}", out), out


@needs_root
def test_a_limit_that_a_replacement_meets_is_named() -> None:
    program = """
envs = muster.make_vec("CartPole-v1", 2, num_workers=2, context=context, on_failure="restart")
envs.reset()
limit(name, number)
os.kill(envs.stats()["workers"][1]["pid"], 9)
say(lambda: envs.step([0, 0]))
"""
    out = said(program, "NPROC", 1, "fork")
    assert re.match(rf"LimitReached .*worker 1 .*, of 2, could not start: {NO_MORE}", out), out


@pytest.mark.parametrize("context", ["forkserver", *slow("spawn")])
def test_a_worker_that_its_launcher_cannot_start_ends_no_other(context: str) -> None:
    with muster.make_vec("CartPole-v1", 1, num_workers=1, context=context) as envs:
        envs.reset()
        launcher = parent_of(envs.stats()["workers"][0]["pid"])
        soft, hard = resource.prlimit(launcher, resource.RLIMIT_NOFILE)
        resource.prlimit(launcher, resource.RLIMIT_NOFILE, (10, hard))
        try:
            with pytest.raises(LimitReached, match=r"worker 0 .*, of 2, could not start: Too many open files"):
                muster.make_vec("CartPole-v1", 2, num_workers=2, context=context)
        finally:
            resource.prlimit(launcher, resource.RLIMIT_NOFILE, (soft, hard))
        assert len(envs.step([0])[0]) == 1


@pytest.mark.parametrize("context", ["forkserver", *slow("fork", "spawn")])
def test_a_limit_of_the_size_of_files_is_named(context: str) -> None:
    out = said("limit(name, number); say(lambda: make(context, 2))", "FSIZE", 1000, context)
    assert re.match(r"LimitReached .*: File too large\. .*`ulimit -a`", out), out


def test_objects_and_errors_of_all_envs_arrive_where_the_size_of_files_is_limited() -> None:
    program = """
import gymnasium as gym

class Speaker(gym.Env):
    observation_space = gym.spaces.Discrete(2)
    action_space = gym.spaces.Text(10**6)
    def reset(self, *, seed=None, options=None):
        return 0, {}
    def step(self, action):
        if action == "raise":
            raise ValueError("as asked")
        return 0, 0.0, False, False, {"text": "x" * 10**6 if action == "long" else action}

limit(name, number)
with muster.make_vec(Speaker, 2, num_workers=2, context=context) as envs:
    envs.reset()
    for actions in (["a", "b"], ["a", "raise"], ["a", "long"], ["a", "x" * 10**6]):
        say(lambda: print(envs.step(actions)[4]["text"]))
"""
    out = said(program, "FSIZE", 1 << 18, "forkserver")
    assert re.fullmatch(
        r"\['a' 'b'\]\nworked\n"
        r"EnvError env 1 \(worker 1, step 1\): ValueError: as asked\n(.|\n)*"
        r"EnvError env 1 (.|\n)*File too large(.|\n)*"
        r"\nLimitReached .*the action of env 1 could not be sent: File too large.*\n"
        r"More: docs/problems/many-processes.md\n",
        out,
    ), out


@needs_root
@pytest.mark.slow
@pytest.mark.parametrize(("name", "number"), [("NPROC", 9), ("FSIZE", 1000), ("NOFILE", 30)])
def test_collectors_name_limits_too(name: str, number: int) -> None:
    pytest.importorskip("tensordict")
    options = 'None, frames_per_batch=64, num_collectors=8, num_envs=8, context="fork"'
    program = f'limit(name, number); say(lambda: muster.MultiCollector("CartPole-v1", {options}))'
    out = said(program, name, number, "", imports=programs.TORCH)
    assert re.match(r"LimitReached .*`ulimit -a`", out), out


class Greedy(Scripted):
    """Opens more files than its process may, or writes a file beyond a limit whose signal it does not ignore."""

    def step(self, action: Any) -> Any:
        if action:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))
            os.write(os.memfd_create("big"), b"x" * 100)
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
        held = []
        while True:
            held.append(open(os.devnull))  # noqa: SIM115


@pytest.mark.parametrize(
    ("action", "error", "words"),
    [
        (
            0,
            EnvError,
            r"env 0 .*OSError: .*\n(.*\n)*Too many open files\. .*`ulimit -a`",
        ),
        (1, WorkerDied, r"SIGXFSZ(.|\n)*Likely cause: a file has grown beyond the limit"),
    ],
)
def test_what_an_env_does_beyond_a_limit_names_the_limit(action: int, error: Any, words: str) -> None:
    with muster.make_vec(Greedy, 1, num_workers=1) as envs:
        envs.reset()
        with pytest.raises(error, match=words):
            envs.step([action])
