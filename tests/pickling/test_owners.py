"""Things that own threads or processes: what is said of fork is what a fork does, and what is built instead works."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import logging
import logging.handlers
import multiprocessing
import queue
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Listener
from multiprocessing.pool import ThreadPool
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import muster
from muster.errors import CannotTravel
from muster.interop.gymnasium import AsyncVectorEnv
from muster.recipes.recipe import check_forkable, make_recipes, pack


class Holder(gym.Env):
    """Uses what it is given to find out that 4 is the absolute value of -4."""

    observation_space = gym.spaces.Box(0, 9, (1,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, thing: Any = None) -> None:
        self.thing = thing

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.array([absolute(self.thing)], np.float64), {}

    def step(self, action: Any) -> Any:
        return *self.reset()[:1], 0.0, False, False, {}


def absolute(thing: Any) -> float:
    if isinstance(thing, threading.Thread):
        if thing.ident is None:
            thing.start()
        thing.join(5)
        return 4 - thing.is_alive()
    if isinstance(thing, logging.Handler):
        thing.handle(logging.makeLogRecord({"msg": "from a worker"}))
        return 4
    if hasattr(thing, "submit"):
        return float(thing.submit(abs, -4).result(5))
    if hasattr(thing, "apply_async"):
        return float(thing.apply_async(abs, (-4,)).get(5))
    return 4


def after(thing: Any, act: Callable[[Any], Any]) -> Any:
    act(thing)
    return thing


def used(executor: Any) -> Any:
    return after(executor, lambda one: one.submit(abs, -4).result())


def ended_thread() -> threading.Thread:
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    return thread


def pending_result() -> Any:
    pool = ThreadPool(1)
    result = pool.apply_async(wait_for_end)
    result.pool = pool  # for `close`
    return result


class Owner:
    """A user's object that owns a thread."""

    def __init__(self) -> None:
        self.thread = waiting_thread()


class Further:
    def __init__(self, inner: Any) -> None:
        self.parts = {"inner": [inner]}


ENDED: list[bool] = []


def wait_for_end() -> None:
    """Ends with the test. Not by an event, whose lock would be held meanwhile."""
    while not ENDED:
        time.sleep(0.01)


def waiting_thread() -> threading.Thread:
    thread = threading.Thread(target=wait_for_end, daemon=True)
    thread.start()
    return thread


def generator_with(thing: Any) -> Any:
    def generate(held: Any) -> Any:
        yield 1
        yield held

    made = generate(thing)
    next(made)
    return made


MAKERS: dict[str, tuple[str, Callable[[], Any]]] = {
    "Pool": ("breaks", lambda: multiprocessing.get_context("spawn").Pool(1)),
    "ThreadPool": ("breaks", lambda: ThreadPool(1)),
    "closed ThreadPool": ("safe", lambda: after(ThreadPool(1), ThreadPool.terminate)),
    "result of a pool that is not there": ("breaks", pending_result),
    "used ThreadPoolExecutor": ("breaks", lambda: used(concurrent.futures.ThreadPoolExecutor(1))),
    "used ProcessPoolExecutor": ("breaks", lambda: used(concurrent.futures.ProcessPoolExecutor(1))),
    "new ThreadPoolExecutor": ("safe", lambda: concurrent.futures.ThreadPoolExecutor(1)),
    "new ProcessPoolExecutor": ("risky", lambda: concurrent.futures.ProcessPoolExecutor(1)),
    "ended ThreadPoolExecutor": (
        "safe",
        lambda: after(used(concurrent.futures.ThreadPoolExecutor(1)), lambda one: one.shutdown()),
    ),
    "Future": ("risky", concurrent.futures.Future),
    "done Future": ("safe", lambda: after(concurrent.futures.Future(), lambda one: one.set_result(4))),
    "running Thread": ("risky", waiting_thread),
    "new Thread": ("safe", lambda: threading.Thread(target=int)),
    "new Timer": ("safe", lambda: threading.Timer(0, int)),
    "ended Thread": ("safe", ended_thread),
    "running Timer": ("breaks", lambda: after(threading.Timer(1000, int), lambda one: one.start())),
    "the caller's thread": ("safe", threading.current_thread),
    "QueueListener": (
        "breaks",
        lambda: after(logging.handlers.QueueListener(queue.Queue()), lambda one: one.start()),
    ),
    "StreamHandler": ("safe", lambda: logging.StreamHandler(sys.stderr)),
    "Manager": ("risky", lambda: multiprocessing.get_context("spawn").Manager()),
    "Listener": ("risky", lambda: Listener(("127.0.0.1", 0))),
    "Popen": ("risky", lambda: subprocess.Popen(["sleep", "1000"])),
    "ended Popen": ("safe", lambda: after(subprocess.Popen(["true"]), lambda one: one.wait())),
    "event loop": ("risky", asyncio.new_event_loop),
    "object with a thread": ("risky", Owner),
    "object deep in another": ("risky", lambda: Further(Owner())),
    "method of an object with a thread": ("risky", lambda: functools.partial(Owner().thread.join, 1)),
    "generator with a thread": ("risky", lambda: generator_with(waiting_thread())),
}
SAID = {"safe": "would be safe here", "risky": "may work here, at a risk", "breaks": "is no way out here"}


def close(thing: Any) -> None:
    thing = getattr(thing, "pool", thing)
    if isinstance(thing, threading.Timer):
        thing.cancel()
    for name in ("terminate", "shutdown", "close", "stop"):
        if hasattr(thing, name):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                getattr(thing, name)()
            break
    if isinstance(thing, subprocess.Popen):
        thing.wait()


@pytest.fixture
def made(request: pytest.FixtureRequest) -> Any:
    name = request.param
    by_fork, make = MAKERS[name]
    before = threading.enumerate()
    thing = make()
    yield by_fork, thing
    ENDED.append(True)
    close(thing)
    for thread in threading.enumerate():
        if thread not in before:
            thread.join(5)
    ENDED.clear()


def recipes_with(thing: Any) -> Any:
    return make_recipes(Holder, 2, {"thing": thing})


@pytest.mark.parametrize("made", MAKERS, indirect=True)
def test_what_is_said_of_a_fork_is_what_a_fork_does(made: Any) -> None:
    by_fork, thing = made
    with pytest.raises(CannotTravel) as raised:
        pack(recipes_with(thing), start_method="forkserver")
    (said,) = [line for line in str(raised.value).splitlines() if line.startswith('  context="fork"')]
    assert said.startswith(f'  context="fork" {SAID[by_fork]}: ')
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if by_fork == "breaks":
            with pytest.raises(CannotTravel, match=r'^env_kwargs\["thing"\] cannot be inherited by a worker'):
                check_forkable(recipes_with(thing))
        else:
            check_forkable(recipes_with(thing))
    risks = [str(one.message) for one in caught if "allowed here, but at a risk" in str(one.message)]
    assert len(risks) == (by_fork == "risky")


SAFE_TO_USE = ["new ThreadPoolExecutor", "new Thread", "new Timer", "ended Thread", "StreamHandler"]


def test_what_is_called_safe_works_in_forked_workers(capfd: Any) -> None:
    things = [{"thing": MAKERS[name][1]()} for name in SAFE_TO_USE]
    with muster.make_vec(Holder, len(things), num_workers=2, env_kwargs=things, context="fork") as envs:
        assert envs.reset()[0][:, 0].tolist() == [4.0] * len(things)
    assert capfd.readouterr().err == "from a worker\n"


@pytest.mark.parametrize("context", ["forkserver", "fork"])
def test_what_is_built_instead_works(context: str) -> None:
    names = ["Pool", "ThreadPool", "used ThreadPoolExecutor", "used ProcessPoolExecutor"]
    things = [MAKERS[name][1]() for name in names]
    env_kwargs = [{"thing": thing} for thing in things]
    try:
        with pytest.raises(CannotTravel) as raised:
            muster.make_vec(Holder, len(names), num_workers=1, env_kwargs=env_kwargs, context=context)
    finally:
        for thing in things:
            close(thing)
    code = "\n".join(line.strip() for line in str(raised.value).splitlines() if line.startswith(" " * 6))
    exec(code, {"env_kwargs": env_kwargs})
    assert all(type(one["thing"]) is type(muster.lazy(int)) for one in env_kwargs)
    with muster.make_vec(Holder, len(names), num_workers=1, env_kwargs=env_kwargs, context=context) as envs:
        assert envs.reset()[0][:, 0].tolist() == [4.0] * len(names)


def test_no_drop_in_calls_a_thread_pool_safe_by_fork_or_forks_it() -> None:
    pool = ThreadPool(1)
    try:
        with pytest.raises(CannotTravel) as raised:
            AsyncVectorEnv([functools.partial(Holder, pool)] * 2)
        assert "is no way out here: workers would inherit the object, but not its threads" in str(raised.value)
        assert "muster.lazy(multiprocessing.pool.ThreadPool)" in str(raised.value)
        with pytest.raises(CannotTravel, match="cannot be inherited by a worker"):
            AsyncVectorEnv([functools.partial(Holder, pool)] * 2, context="fork")
    finally:
        pool.terminate()
