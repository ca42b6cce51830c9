"""Things that own threads or processes are not sent, and what is built instead works."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import logging.handlers
import multiprocessing
import queue
import subprocess
import sys
import threading
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
from muster.recipes.recipe import make_recipes, pack


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


MAKERS: dict[str, Callable[[], Any]] = {
    "Pool": lambda: multiprocessing.get_context("spawn").Pool(1),
    "ThreadPool": lambda: ThreadPool(1),
    "used ThreadPoolExecutor": lambda: used(concurrent.futures.ThreadPoolExecutor(1)),
    "used ProcessPoolExecutor": lambda: used(concurrent.futures.ProcessPoolExecutor(1)),
    "Timer": lambda: threading.Timer(1000, int),
    "Future": concurrent.futures.Future,
    "QueueListener": lambda: after(logging.handlers.QueueListener(queue.Queue()), lambda one: one.start()),
    "StreamHandler": lambda: logging.StreamHandler(sys.stderr),
    "Manager": lambda: multiprocessing.get_context("spawn").Manager(),
    "Listener": lambda: Listener(("127.0.0.1", 0)),
    "Popen": lambda: subprocess.Popen(["sleep", "1000"]),
    "event loop": asyncio.new_event_loop,
}


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


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_what_owns_threads_or_processes_is_not_sent(make: Callable[[], Any]) -> None:
    thing = make()
    try:
        with pytest.raises(CannotTravel, match=r'^env_kwargs\["thing"\] cannot be sent to a worker'):
            pack(make_recipes(Holder, 2, {"thing": thing}), start_method="forkserver")
    finally:
        close(thing)


def test_what_is_built_instead_works() -> None:
    names = ["Pool", "ThreadPool", "used ThreadPoolExecutor", "used ProcessPoolExecutor"]
    things = [MAKERS[name]() for name in names]
    env_kwargs = [{"thing": thing} for thing in things]
    try:
        with pytest.raises(CannotTravel) as raised:
            muster.make_vec(Holder, len(names), num_workers=1, env_kwargs=env_kwargs)
    finally:
        for thing in things:
            close(thing)
    code = "\n".join(line.strip() for line in str(raised.value).splitlines() if line.startswith(" " * 6))
    exec(code, {"env_kwargs": env_kwargs})
    assert all(type(one["thing"]) is type(muster.lazy(int)) for one in env_kwargs)
    with muster.make_vec(Holder, len(names), num_workers=1, env_kwargs=env_kwargs) as envs:
        assert envs.reset()[0][:, 0].tolist() == [4.0] * len(names)
