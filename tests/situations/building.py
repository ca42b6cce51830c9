"""Arguments of `make_vec`, and how envs are built from them."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
from agent_envs import Script
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

import muster
from situations.acting_envs import Alone, Big, Counter, Doing, NotRebuilt, Observing, fail
from situations.failing import file_reads
from situations.recording import raised, situation, situations, warned

EXISTING = Counter()
BOX = spaces.Box(-1, 1, (3,), np.float32)


def making(env: Any = Counter, num_envs: int | None = 2, **options: Any) -> Callable[[], Any]:
    """A call of `make_vec` that fails."""
    options = {"backend": "serial", **options}
    return functools.partial(muster.make_vec, env, num_envs, **options)


def remotely(env: Any = Counter, num_envs: int = 2, **options: Any) -> Callable[[], Any]:
    return making(env, num_envs, backend="process", num_workers=1, **options)


def observing(*observed: spaces.Space[Any]) -> list[Any]:
    return [functools.partial(Observing, space) for space in observed]


def acting(*actions: spaces.Space[Any]) -> list[Any]:
    return [functools.partial(Observing, BOX, space) for space in actions]


def refuse() -> None:
    raise ValueError("no licence")


class ConfiguredEnv(Counter):
    def __init__(self, size: int) -> None:
        super().__init__()


class Shapeless(Counter):
    def __init__(self) -> None:
        super().__init__()
        self.observation_space = None  # type: ignore[assignment]


class Unregistered(gym.Wrapper):  # type: ignore[type-arg]
    """Does not record its arguments."""


situations(
    "option",
    {
        name: making(**{"backend": "process", **options})
        for name, options in {
            "backend": {"backend": "remote"},
            "autoreset_mode": {"autoreset_mode": "sometimes"},
            "observation_mode": {"observation_mode": "any"},
            "context": {"context": "thread"},
            "memory_check": {"memory_check": "maybe"},
            "on_failure": {"on_failure": "ignore"},
            "start_timeout": {"start_timeout": 0},
            "step_timeout": {"step_timeout": "soon"},
            "max_restarts": {"max_restarts": -1},
            "threads_per_worker": {"threads_per_worker": 0},
            "copy": {"copy": 1},
            "groups": {"groups": ["a", "b"]},
            "groups of an env with one agent": {"backend": "serial", "groups": {"a": "b"}},
            "num_workers": {"num_workers": 0},
            "num_workers, more than envs": {"num_workers": 3},
            "num_workers of the serial backend": {"backend": "serial", "num_workers": 2},
            "num_workers beside one_env_per_process": {"one_env_per_process": True, "num_workers": 1},
            "step_timeout without processes": {"backend": "thread", "step_timeout": 1.0},
            "caller_steps and one_env_per_process": {"caller_steps": True, "one_env_per_process": True},
            "caller_steps and step_timeout": {"caller_steps": True, "step_timeout": 1.0},
            "caller_steps and on_failure": {"caller_steps": True, "on_failure": "restart"},
            "worker_env": {"worker_env": "A=1"},
            "worker_env, too short a list": {"num_workers": 2, "worker_env": [{"A": "1"}]},
            "worker_env, a value": {"worker_env": {"A": 0.5}},
            "worker_env, a name": {"worker_env": lambda index: {"A=B": "1"}},
            "worker_env without processes": {"backend": "thread", "worker_env": {"A": "1"}},
            "worker_init, neither a function nor a script": {"worker_init": 5},
            "worker_init, a function with an argument": {"worker_init": lambda index: None},
            "worker_init, a function that raises": {"worker_init": refuse},
        }.items()
    },
)

situations(
    "recipe",
    {
        "num_envs of 0": making(num_envs=0),
        "num_envs of no whole number": making(num_envs=1.5),  # type: ignore[arg-type]
        "num_envs beside a list": making([Counter, Counter], 3),
        "an empty list": making([], None),
        "a number": making(7),
        "a number in a list": making([Counter, 7], None),
        "a module": making(gym, 1),
        "an unknown id": making("NoSuchEnv-v0", 1),
        "an id without its library's name": making("simple_spread_v3", 1),
        "an unknown id of PettingZoo": making("pettingzoo/nothing_v0", 1),
        "a spec without entry point": making(EnvSpec("Nothing-v0"), 1),
        "a factory that needs arguments": making(ConfiguredEnv),
        "a factory with wrong arguments": making(Counter, env_kwargs={"lenght": 3}),
        "env_kwargs of the wrong number": making(env_kwargs=[{}]),
        "env_kwargs that is no dict": making(env_kwargs=3),
        "wrappers that is no list": making(wrappers=3),
        "a wrapper that cannot be called": making(wrappers=[Counter, 3]),
        "muster.lazy of a number": lambda: muster.lazy(3),  # type: ignore[arg-type]
        "an env that exists": making(EXISTING),
        "an env that exists in a factory": making(lambda: EXISTING),
        "an env that exists and has a wrapper without a record": making(Unregistered(gym.make("CartPole-v1"))),
        "a factory that returns nothing": making(lambda: None),
        "a factory that returns a class": making(lambda: Counter),
        "a wrapper that returns nothing": making(wrappers=[lambda env: None]),
        "a factory that returns no env": making(lambda: "env"),
        "a factory that returns an env twice": making(functools.lru_cache(lambda: Counter())),
        "an env without an observation space": making(Shapeless, 1),
        "groups that leave an agent out": making(Script, 1, groups={"a_0": "a"}),
    },
)


@situation("recipe: an env that exists, made anew from its spec")
def _() -> Iterator[Any]:
    env = gym.make("CartPole-v1")
    yield from warned(lambda: making(env, 1)().close())


situations(
    "envs that differ",
    {
        "in an observation's shape": making(observing(BOX, spaces.Box(-1, 1, (4,), np.float32)), None),
        "in an observation's bounds": making(observing(BOX, spaces.Box(-2, 2, (3,), np.float32)), None),
        "in an observation's keys": making(observing(spaces.Dict({"x": BOX}), spaces.Dict({"x": BOX, "y": BOX})), None),
        "in an observation's kind": making(observing(BOX, spaces.Discrete(3)), None),
        "in an action's bounds": making(acting(spaces.Box(-1, 1, (1,)), spaces.Box(-2, 2, (1,))), None),
        "in an action's number of choices": making(acting(spaces.Discrete(3), spaces.Discrete(4)), None),
        "in the number of agents": making([Script, Counter], None),
    },
)

situations(
    "building",
    {
        "an env that raises, in this process": making(Doing, env_kwargs={"build": fail}),
        "an env that raises, in a worker": remotely(Doing, env_kwargs={"build": fail}),
        "a lazy value that raises": making(env_kwargs={"length": muster.lazy(fail)}),
        "an env that must be alone, with another one": making(Alone),
        "an env that must be alone, in threads": making(Alone, backend="thread", num_workers=2),
    },
)


@situation("building: envs that will not fit into memory")
def _() -> Iterator[Any]:
    with file_reads(proc__meminfo="MemAvailable: 25000 kB\n"):
        yield raised(muster.make_vec, Big, 40, num_workers=2)
        yield from warned(lambda: muster.make_vec(Big, 4, num_workers=2, memory_check="warn").close())


def closure_over_a_lock() -> Any:
    lock = threading.Lock()

    def make_env() -> Any:
        with lock:
            return Counter()

    return make_env


class Server:
    def __init__(self) -> None:
        self.lock = threading.Lock()


situations(
    "cannot travel",
    {
        "a lock in env_kwargs": remotely(env_kwargs={"length": threading.Lock()}),
        "an object with a lock in env_kwargs of one env": remotely(env_kwargs=[{}, {"length": Server()}]),
        "a lock that a factory closes over": remotely(closure_over_a_lock()),
        "an object of a partial": remotely(functools.partial(Counter, length=Server())),
        "a wrapper's lock": remotely(wrappers=[functools.partial(lambda lock, env: env, threading.Lock())]),
        "a generator": remotely(env_kwargs={"length": (i for i in range(3))}),
        "an object that cannot be rebuilt in the worker": remotely(env_kwargs={"length": NotRebuilt()}),
    },
)


@situation("cannot travel: an open file arrives as something else")
def _() -> Iterator[Any]:
    with open(os.devnull) as file:
        yield from warned(lambda: remotely(Taking, 1, env_kwargs={"what": file})().close())


class Taking(Counter):
    def __init__(self, what: Any) -> None:
        super().__init__()
