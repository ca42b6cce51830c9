"""Programs that hand over what cannot travel, and their repair by the code that an error prints."""

from __future__ import annotations

import runpy
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

PRELUDE = """
import contextlib
import functools
import threading as threads  # what a remedy names has to be imported by the remedy
import types
import gymnasium
import numpy as np

class Env(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 100, (2,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, thing=None, size=2, lock=None):
        self.thing, self.size, self.lock = thing, size, lock

    def reset(self, *, seed=None, options=None):
        return np.array([self.size, use(self.thing)], np.float64), {}

    def step(self, action):
        return np.array([self.size, use(self.thing)], np.float64), 1.0, False, False, {}

    def take(self, number, lock=None):
        with lock or self.lock:
            return number + self.size

class Guarded(gymnasium.Wrapper):
    def __init__(self, env, lock):
        super().__init__(env)
        self.lock = lock

    def reset(self, **arguments):
        with self.lock:
            return super().reset(**arguments)

def use(thing):
    if isinstance(thing, dict):
        return use(thing["deep"][0])
    if hasattr(thing, "apply"):
        return thing.apply(abs, (-7,))
    if isinstance(thing, types.GeneratorType):
        return next(thing)
    with thing:
        return 5

def numbers():
    while True:
        yield 6

lock = threads.Lock()
"""


@dataclass(frozen=True)
class Program:
    """A program that hands over an object that cannot travel.

    given: makes the arguments.  call: hands them over, and sets `result` to what the envs gave.  expected: that.
    changed: the lines of `given` after their object was made an argument, where a remedy says so.
    """

    setup: str
    given: str
    call: str
    expected: object
    changed: str = ""

    def failing(self) -> str:
        """The program as the user wrote it: `result` is the error."""
        return self._text(self.given)

    def repaired(self, message: str) -> str:
        """The program with the code in `message` before the call."""
        code = [line for line in message.splitlines() if line.startswith(" " * 6)]
        assert code
        assert bool(self.changed) == ("Make " in message)
        return self._text(f"{self.changed or self.given}\n" + textwrap.dedent("\n".join(code)))

    def _text(self, given: str) -> str:
        call = textwrap.indent(self.call, "    ")
        return (
            f"{PRELUDE}\n{self.setup}\n{given}\nresult = None\ntry:\n{call}\nexcept Exception as error:\n"
            "    result = error\n"
        )


def run(path: Path, text: str):
    path.write_text(text)
    return runpy.run_path(str(path), run_name="__main__")["result"]


SB3 = "from muster.interop.sb3 import DummyVecEnv, SubprocVecEnv, make_vec_env"
SB3_USE = "\nresult = [envs.reset().tolist(), envs.step(np.zeros(2, int))[0].tolist()]\nenvs.close()"
GYM = "from muster.interop.gymnasium import AsyncVectorEnv, make_vec"
GYM_USE = "\nresult = [envs.reset()[0].tolist(), envs.step(np.zeros(2, int))[0].tolist()]\nenvs.close()"
MAKE_VEC = "from muster import make_vec"
TORCHRL = "from muster.interop.torchrl import ParallelEnv"
TORCHRL_USE = "\nresult = envs.reset()['observation'].tolist()\nenvs.close()"
REGISTER = """
gymnasium.registry.pop('Using-v0', None)
gymnasium.register('Using-v0', entry_point=Env, disable_env_checker=True, kwargs={})
"""


def twice(size: float, used: float) -> list[list[list[float]]]:
    """What two envs of this size give in a reset and in a step."""
    return [[[size, used]] * 2] * 2


slow = pytest.mark.slow
PROGRAMS = {
    "make_vec, values of one dict of several": Program(
        MAKE_VEC,
        "env_kwargs = [{'thing': {'deep': [numbers()]}}, {'thing': {'deep': [numbers()]}, 'lock': lock}]",
        f"envs = make_vec(Env, 2, num_workers=1, env_kwargs=env_kwargs){GYM_USE}",
        twice(2, 6),
    ),
    "make_vec, a tuple": Program(
        MAKE_VEC,
        "env_kwargs = {'thing': {'deep': (lock, 1)}}",
        f"envs = make_vec(Env, 2, env_kwargs=env_kwargs){GYM_USE}",
        twice(2, 5),
        changed="class Env(Env):\n    def __init__(self, lock):\n        super().__init__({'deep': (lock, 1)})\n"
        "env_kwargs = {}",
    ),
    "make_vec, a spec": Program(
        MAKE_VEC + REGISTER.format("{'thing': lock}"),
        "",
        f"envs = make_vec('Using-v0', 2){GYM_USE}",
        twice(2, 5),
    ),
    "make_vec, a factory": Program(
        MAKE_VEC,
        "def factory(size=3):\n    return Env(lock, size)",
        f"envs = make_vec(factory, 2){GYM_USE}",
        twice(3, 5),
        changed="def factory(size=3, *, lock):\n    return Env(lock, size)",
    ),
    "make_vec, a class": Program(
        MAKE_VEC,
        "class factory(Env):\n    def __init__(self):\n        super().__init__(lock, 3)",
        f"envs = make_vec(factory, 2){GYM_USE}",
        twice(3, 5),
        changed="class factory(Env):\n    def __init__(self, lock):\n        super().__init__(lock, 3)",
    ),
    "make_vec, a wrapper": Program(
        MAKE_VEC,
        "wrappers = [lambda env: Guarded(env, lock)]",
        f"envs = make_vec(Env, 2, env_kwargs={{'thing': contextlib.nullcontext()}}, wrappers=wrappers){GYM_USE}",
        twice(2, 5),
        changed="wrappers = [lambda env, lock: Guarded(env, lock)]",
    ),
    "sb3, a keyword of a partial": Program(
        SB3,
        "env_fns = [functools.partial(Env, thing=lock, size=4)] * 2",
        f"envs = SubprocVecEnv(env_fns){SB3_USE}",
        twice(4, 5),
    ),
    "sb3, a lambda": Program(
        SB3,
        "env_fns = [lambda: Env(lock, size=3)]",
        f"envs = SubprocVecEnv(env_fns * 2){SB3_USE}",
        twice(3, 5),
        changed="env_fns = [lambda lock: Env(lock, size=3)]",
    ),
    "make_vec_env, a value, and a wrapper's": Program(
        SB3,
        "env_kwargs = {'thing': numbers()}\nwrapper_kwargs = {'lock': lock}",
        "envs = make_vec_env(Env, 2, wrapper_class=Guarded, wrapper_kwargs=wrapper_kwargs, env_kwargs=env_kwargs, "
        f"vec_env_cls=SubprocVecEnv){SB3_USE}",
        twice(2, 6),
    ),
    "make_vec, call": Program(
        MAKE_VEC,
        "env_kwargs = {}\ntake = lambda envs: envs.call('take', 1, lock=lock)",
        "with make_vec(Env, 2, env_kwargs=env_kwargs) as envs:\n    result = take(envs)",
        (3, 3),
        changed="env_kwargs = {}\ntake = lambda envs: envs.call('take', 1)",
    ),
    "gymnasium, a lambda": Program(
        GYM,
        "env_fns = [lambda: Env(lock)]",
        f"envs = AsyncVectorEnv(env_fns * 2){GYM_USE}",
        twice(2, 5),
        changed="env_fns = [lambda lock: Env(lock)]",
    ),
    "gymnasium, make_vec": Program(
        GYM + REGISTER.format("{}"),
        "thing = numbers()",
        f"envs = make_vec('Using-v0', 2, vectorization_mode='async', thing=thing, lock=lock){GYM_USE}",
        twice(2, 6),
    ),
    "torchrl, a value": Program(
        TORCHRL,
        "create_env_kwargs = {'thing': lock}",
        f"envs = ParallelEnv(2, Env, create_env_kwargs=create_env_kwargs){TORCHRL_USE}",
        twice(2, 5)[0],
    ),
    "torchrl, a lambda": Program(
        TORCHRL,
        "create_env_fn = lambda: Env(lock)",
        f"envs = ParallelEnv(2, create_env_fn){TORCHRL_USE}",
        twice(2, 5)[0],
        changed="create_env_fn = lambda lock: Env(lock)",
    ),
    "MultiCollector": Program(
        "from muster import MultiCollector",
        "make_vec_options = {'env_kwargs': {'thing': lock}}",
        "collector = MultiCollector(Env, None, num_collectors=2, num_envs=2, frames_per_batch=4, "
        "make_vec_options=make_vec_options)\n"
        "result = collector.rollout()['observation'].tolist()\ncollector.shutdown()",
        twice(2, 5),
    ),
}
QUICK = {
    "make_vec, values of one dict of several",
    "make_vec, a wrapper",
    "make_vec, call",
    "sb3, a keyword of a partial",
    "make_vec_env, a value, and a wrapper's",
    "gymnasium, a lambda",
}
CASES = [pytest.param(one, id=name, marks=() if name in QUICK else slow) for name, one in PROGRAMS.items()]
