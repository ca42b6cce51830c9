"""Programs that hand over what cannot travel, and their repair by the code that an error prints."""

from __future__ import annotations

import ast
import re
import runpy
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

PRELUDE = """
import functools
import itertools
import multiprocessing
import sqlite3
import threading
import types
import gymnasium
import numpy as np
import zmq

COUNT = itertools.count()

class Env(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 100, (2,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, thing, size=2, others=None, other=None):
        self.thing, self.size = thing, size
        self.given = None
        if others is not None:
            assert type(others["locks"][0]) is type(threading.Lock())

    def reset(self, *, seed=None, options=None):
        return np.array([self.size, use(self.thing)], np.float64), {}

    def step(self, action):
        return np.array([self.size, use(self.thing)], np.float64), 1.0, False, False, {}

    def guarded(self):
        with self.given["lock"]:
            return self.size

    def take(self, number, lock):
        with lock:
            return number + self.size

class Guarded(gymnasium.Wrapper):
    def __init__(self, env, lock):
        super().__init__(env)
        self.lock = lock

    def reset(self, **arguments):
        with self.lock:
            return super().reset(**arguments)

class Guard:  # pickles another lock each time
    def __getstate__(self):
        return {"lock": threading.Lock()}

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass

def use(thing):
    if isinstance(thing, dict):
        return use(thing["run"][0])
    if callable(thing) and not isinstance(thing, sqlite3.Connection):  # a database's own method
        return thing("select value from numbers").fetchone()[0]
    if hasattr(thing, "apply"):
        return thing.apply(abs, (-7,))
    if hasattr(thing, "submit"):
        return thing.submit(abs, -7).result()
    if isinstance(thing, zmq.Context):
        with thing.socket(zmq.PAIR) as here, thing.socket(zmq.PAIR) as there:
            address = f"inproc://{next(COUNT)}"
            here.bind(address)
            there.connect(address)
            there.send(b"3")
            return float(here.recv())
    if isinstance(thing, sqlite3.Connection):
        return thing.execute("select value from numbers").fetchone()[0]
    if isinstance(thing, types.GeneratorType):
        return next(thing)
    if hasattr(thing, "put"):
        thing.put("seen")
        return 4
    if hasattr(thing, "readline"):
        thing.seek(0)
        return float(thing.readline())
    with thing:
        return 5

def numbers(start, *, by=1):
    while True:
        yield start
        start += by
"""


@dataclass(frozen=True)
class Program:
    """A program that hands over an object that cannot travel.

    setup: makes the object.  call: makes the vector env `envs` and uses it.  element: the expression in it whose place
    a remedy may name.  elements: such expressions by their places, where there are several.  fails: the line that the
    remedy replaces, where that is not a line to put it before.  original: what to replace to get a program that works
    with the original's classes.
    """

    setup: str
    call: str
    original: tuple[tuple[str, str], ...]
    element: str = ""
    elements: tuple[tuple[str, str], ...] = ()
    fails: str = ""
    cleanup: str = "pass"

    def text(self, setup: str, call: str) -> str:
        return (
            f"{PRELUDE}\n{setup}\nresult = None\ntry:\n{textwrap.indent(call, '    ')}\n"
            f"except Exception as error:\n    result = error\nfinally:\n    {self.cleanup}\n"
        )

    def repaired(self, message: str) -> str:
        """The program with the code in `message` put where the message says."""
        imports, code = split(code_in(message))
        setup, call = self.setup, self.call
        lines: list[str] = []  # that belong before the call
        while code:
            line = code.pop(0)
            if line.startswith("def ") and line.endswith(AS_IT_IS):
                head = re.escape(line.split("(")[0])
                setup = re.sub(rf"^( *){head}\(.*\):$", rf"\1{line.partition('   #')[0]}", setup, flags=re.M)
            elif code and code[0].endswith(AS_IT_IS):  # a class moves into a function
                head, last = code.pop(0).removesuffix(AS_IT_IS).strip(), code.pop(0)
                setup, call = (moved(text, head, line, last) if head in text else text for text in (setup, call))
            elif "# before " in line:
                lines.append(line)
                if not code:
                    name = line.partition("# before ")[2].rpartition(".")[2]
                    call, lines = put_before(call, rf"\b{name}\(", lines), []
            elif "# in the place of " in line:
                put, _, place = line.partition("   # in the place of ")
                if " in " in place:  # the place is in a function of the setup
                    assert f"return {place.partition(' in ')[0]}" in setup
                    setup = setup.replace(f"return {place.partition(' in ')[0]}", f"return {put}")
                else:
                    element = dict(self.elements).get(place, self.element)
                    assert element in call
                    call = re.sub(rf"{re.escape(element)}(?![\w(:])", lambda _, put=put: put, call)
            elif not code:
                assert self.fails in call
                call = call.replace(self.fails, line)
            else:
                lines.append(line)
        return self.text("\n".join([*imports, setup]), "\n".join([*lines, call]))


def moved(text: str, head: str, first: str, last: str) -> str:
    """`text` with the class that begins with `head` between two lines of a function."""
    name = re.match(r"class (\w+)", head)[1]
    node = next(node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef) and node.name == name)
    source = ast.get_source_segment(text, node)
    assert source.startswith(head)
    indent = " " * node.col_offset
    whole = [indent + first, textwrap.indent(indent + source, "    "), indent + last]
    return text.replace(indent + source, "\n".join(whole))


def put_before(text: str, pattern: str, code: list[str]) -> str:
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if re.search(pattern, line))
    return "\n".join([*lines[:at], *code, *lines[at:]])


def code_in(message: str) -> list[str]:
    """The lines of code under the first line that ends with a colon."""
    lines = message.splitlines()
    start = next(i for i, line in enumerate(lines) if line.endswith(":") and line.startswith(("  Build", "  Make")))
    block = []
    for line in lines[start + 1 :]:
        if not line.startswith(" " * 6):
            break
        block.append(line)
    code = textwrap.dedent("\n".join(block))
    assert "..." not in code, code
    return code.splitlines()


def split(code: list[str]) -> tuple[list[str], list[str]]:
    imports = [line for line in code if line.startswith("import ")]
    return imports, code[len(imports) :]


def run(path: Path, text: str):
    path.write_text(text)
    return runpy.run_path(str(path), run_name="__main__")["result"]


AS_IT_IS = "  # its body stays as it is"
CONTEXT = "context = zmq.Context()"
TERM = "context.term()"
SB3 = """
from stable_baselines3.common.vec_env import DummyVecEnv as Original
from muster.interop.sb3 import DummyVecEnv, SubprocVecEnv, make_vec_env
"""
SB3_ORIGINAL = (("SubprocVecEnv(", "Original("), ("vec_env_cls=SubprocVecEnv", "vec_env_cls=Original"))
DATABASE = "database = sqlite3.connect(FILE)"
POOL = "from multiprocessing.pool import ThreadPool\npool = ThreadPool(1)"
SB3_USE = """
obs = envs.reset()
result = [obs.tolist(), envs.step(np.zeros(2, int))[0].tolist()]
envs.close()
"""
GYM = """
from gymnasium.vector import SyncVectorEnv as Original
from muster.interop.gymnasium import AsyncVectorEnv
"""
GYM_ORIGINAL = (("AsyncVectorEnv(", "Original("),)
GYM_USE = """
obs = envs.reset()[0]
result = [obs.tolist(), envs.step(np.zeros(envs.num_envs, int))[0].tolist()]
envs.close()
"""
MAKE_VEC = "import muster"
TORCHRL_ORIGINAL = (
    ("from muster.interop.torchrl import ParallelEnv", "from muster.interop.gymnasium import SyncVectorEnv"),
    ("ParallelEnv(2, ", "SyncVectorEnv([("),
    ("))  # two", "))] * 2)"),
    ("envs.reset()['observation']", "envs.reset()[0]"),
)
SERIAL = (("muster.make_vec(", 'muster.make_vec(backend="serial", env='), ("env=[", "env=["))

slow = pytest.mark.slow
PROGRAMS = {
    "sb3, a partial": Program(
        SB3 + CONTEXT,
        f"envs = SubprocVecEnv([functools.partial(Env, context, size=4) for _ in range(2)])\n{SB3_USE}",
        SB3_ORIGINAL,
        element="functools.partial(Env, context, size=4)",
        cleanup=TERM,
    ),
    "sb3, a lambda": Program(
        SB3 + CONTEXT,
        f"envs = SubprocVecEnv([lambda: Env(context, size=3) for _ in range(2)])\n{SB3_USE}",
        SB3_ORIGINAL,
        element="lambda: Env(context, size=3)",
        cleanup=TERM,
    ),
    "sb3, a function": Program(
        SB3 + CONTEXT + "\ndef make_env(size=6):\n    return Env(context, size)",
        f"envs = SubprocVecEnv([make_env, make_env])\n{SB3_USE}",
        SB3_ORIGINAL,
        element="make_env",
        cleanup=TERM,
    ),
    "sb3, a lambda with a default": Program(
        SB3 + CONTEXT,
        f"envs = SubprocVecEnv([lambda i=i, c=context: Env(c, size=i) for i in (7, 7)])\n{SB3_USE}",
        SB3_ORIGINAL,
        element="lambda i=i, c=context: Env(c, size=i)",
        cleanup=TERM,
    ),
    "make_vec_env": Program(
        SB3 + CONTEXT,
        f"env_kwargs = dict(thing=context, size=4)\n"
        f"envs = make_vec_env(Env, 2, env_kwargs=env_kwargs, vec_env_cls=SubprocVecEnv)\n{SB3_USE}",
        SB3_ORIGINAL,
        cleanup=TERM,
    ),
    "make_vec_env, a wrapper's lock, and a generator": Program(
        SB3,
        "env_kwargs = dict(thing=numbers(3, by=2))\nwrapper_kwargs = dict(lock=threading.Lock())\n"
        "envs = make_vec_env(Env, 1, wrapper_class=Guarded, wrapper_kwargs=wrapper_kwargs, env_kwargs=env_kwargs, "
        f"vec_env_cls=SubprocVecEnv)\n{SB3_USE}".replace("np.zeros(2", "np.zeros(1"),
        SB3_ORIGINAL,
    ),
    "make_vec_env, a lambda": Program(
        SB3 + "lock = threading.Lock()",
        f"envs = make_vec_env(lambda: Env(lock), 2, vec_env_cls=SubprocVecEnv)\n{SB3_USE}",
        SB3_ORIGINAL,
        element="lambda: Env(lock)",
    ),
    "make_vec_env, a queue of the fork context": Program(
        SB3,
        "env_kwargs = dict(thing=multiprocessing.get_context('fork').Queue(5))\n"
        f"envs = make_vec_env(Env, 2, env_kwargs=env_kwargs, vec_env_cls=SubprocVecEnv)\n{SB3_USE}"
        "result.append([env_kwargs['thing'].get(timeout=5) for _ in range(4)])\n",
        SB3_ORIGINAL,
    ),
    "sb3, a queue in a partial": Program(
        SB3 + "seen = multiprocessing.get_context('fork').Queue()",
        f"envs = SubprocVecEnv([functools.partial(Env, seen)] * 2)\n{SB3_USE}"
        "result.append([seen.get(timeout=5) for _ in range(4)])\n",
        SB3_ORIGINAL,
    ),
    "sb3, a value of the fork context in a default argument": Program(
        SB3,
        "envs = SubprocVecEnv([lambda v=multiprocessing.get_context('fork').Value('i', 3): Env(v) for _ in range(2)])"
        f"\n{SB3_USE}",
        SB3_ORIGINAL,
        element="lambda v=multiprocessing.get_context('fork').Value('i', 3): Env(v)",
    ),
    "sb3, set_attr": Program(
        SB3 + "env = lambda: Env(threading.Lock())\nvec_env = None",
        "vec_env = SubprocVecEnv([env] * 2)\nlock = threading.Lock()\nvec_env.set_attr('given', {'lock': lock})\n"
        "result = vec_env.env_method('guarded')",
        SB3_ORIGINAL,
        fails="vec_env.set_attr('given', {'lock': lock})",
        cleanup="vec_env.close()",
    ),
    "sb3, env_method": Program(
        SB3 + "env = lambda: Env(threading.Lock())\nvec_env = None",
        "vec_env = SubprocVecEnv([env] * 2)\nlock = threading.Lock()\n"
        "result = []\nresult = list(vec_env.env_method('take', 1, lock))",
        SB3_ORIGINAL,
        fails="vec_env.env_method('take', 1, lock)",
        cleanup="vec_env.close()",
    ),
    "gymnasium, a database in a lambda": Program(
        GYM + "database = sqlite3.connect(FILE)",
        f"envs = AsyncVectorEnv([lambda: Env(database) for _ in range(2)])\n{GYM_USE}",
        GYM_ORIGINAL,
        element="lambda: Env(database)",
        cleanup="database.close()",
    ),
    "gymnasium, make_vec": Program(
        "import gymnasium as gym\nfrom gymnasium import make_vec as Original\n"
        "from muster.interop.gymnasium import make_vec\n"
        "gymnasium.register('Using-v0', entry_point=Env, disable_env_checker=True)\nlock = threading.Lock()",
        f"envs = make_vec('Using-v0', 2, vectorization_mode='async', thing=lock, size=9)\n{GYM_USE}",
        (("make_vec('Using-v0', 2, vectorization_mode='async'", "Original('Using-v0', 2, vectorization_mode='sync'"),),
        element="lock",
        cleanup="del gymnasium.registry['Using-v0']",
    ),
    "gymnasium, a function inside a function": Program(
        GYM + CONTEXT + "\ndef maker(context):\n    def make():\n        return Env(context)\n    return make",
        f"envs = AsyncVectorEnv([maker(context) for _ in range(2)])\n{GYM_USE}",
        GYM_ORIGINAL,
        element="return make",
        cleanup=TERM,
    ),
    "torchrl": Program(
        "from muster.interop.torchrl import ParallelEnv\nfile = open(FILE + '.txt', 'rb')",
        "create_env_kwargs = {'thing': file}\nenvs = ParallelEnv(2, Env, create_env_kwargs=create_env_kwargs)\n"
        "result = envs.reset()['observation'].tolist()\nenvs.close()",
        (("from muster.interop.torchrl import ParallelEnv", "from muster.interop.gymnasium import SyncVectorEnv"),)
        + (("ParallelEnv(2, Env, create_env_kwargs=create_env_kwargs)", "SyncVectorEnv([lambda: Env(file)] * 2)"),)
        + (("envs.reset()['observation']", "envs.reset()[0]"),),
        cleanup="file.close()",
    ),
    "torchrl, a partial": Program(
        "from muster.interop.torchrl import ParallelEnv\nclass Three:\n    size = 3\nthree = Three()\n"
        "class Sized(Env):\n    def __init__(self, thing, cfg):\n        super().__init__(thing, cfg.size)\n" + CONTEXT,
        "envs = ParallelEnv(2, functools.partial(Sized, thing=context, cfg=three))  # two\n"
        "result = envs.reset()['observation'].tolist()\nenvs.close()",
        TORCHRL_ORIGINAL,
        element="functools.partial(Sized, thing=context, cfg=three)",
        cleanup=TERM,
    ),
    "torchrl, a lambda": Program(
        "from muster.interop.torchrl import ParallelEnv\n" + CONTEXT,
        "envs = ParallelEnv(2, (lambda: Env(context)))  # two\n"
        "result = envs.reset()['observation'].tolist()\nenvs.close()",
        TORCHRL_ORIGINAL,
        element="lambda: Env(context)",
        cleanup=TERM,
    ),
    "sb3, a function with two globals": Program(
        SB3
        + CONTEXT
        + "\nlock = threading.Lock()\ndef make_env(size=6):\n    with lock:\n        return Env(context, size)",
        f"envs = SubprocVecEnv([make_env, make_env])\n{SB3_USE}",
        SB3_ORIGINAL,
        element="make_env",
        cleanup=TERM,
    ),
    "gymnasium, make_vec, a value of the fork context": Program(
        "from gymnasium import make_vec as Original\nfrom muster.interop.gymnasium import make_vec\n"
        "gymnasium.register('Using-v0', entry_point=Env, disable_env_checker=True)",
        "envs = make_vec('Using-v0', 2, vectorization_mode='async', "
        f"thing=multiprocessing.get_context('fork').Value('i', 3))\n{GYM_USE}",
        (("make_vec('Using-v0', 2, vectorization_mode='async'", "Original('Using-v0', 2, vectorization_mode='sync'"),),
        element="multiprocessing.get_context('fork').Value('i', 3)",
        cleanup="del gymnasium.registry['Using-v0']",
    ),
    "gymnasium, make_vec, two arguments": Program(
        "from gymnasium import make_vec as Original\nfrom muster.interop.gymnasium import make_vec\n"
        f"gymnasium.register('Using-v0', entry_point=Env, disable_env_checker=True)\n{CONTEXT}",
        "others = {'locks': [threading.Lock()]}\n"
        f"envs = make_vec('Using-v0', 2, vectorization_mode='async', thing=context, others=others)\n{GYM_USE}",
        (("make_vec('Using-v0', 2, vectorization_mode='async'", "Original('Using-v0', 2, vectorization_mode='sync'"),),
        elements=(("thing", "context"),),
        cleanup=f"del gymnasium.registry['Using-v0']; {TERM}",
    ),
    "gymnasium, make_vec, two plain arguments": Program(
        "from gymnasium import make_vec as Original\nfrom muster.interop.gymnasium import make_vec\n"
        f"gymnasium.register('Using-v0', entry_point=Env, disable_env_checker=True)\n{CONTEXT}\n"
        "lock = threading.Lock()",
        f"envs = make_vec('Using-v0', 2, vectorization_mode='async', thing=context, other=lock)\n{GYM_USE}",
        (("make_vec('Using-v0', 2, vectorization_mode='async'", "Original('Using-v0', 2, vectorization_mode='sync'"),),
        elements=(("thing", "context"), ("other", "lock")),
        cleanup=f"del gymnasium.registry['Using-v0']; {TERM}",
    ),
    "sb3, a class with a global": Program(
        SB3 + "lock = threading.Lock()\nclass Local(Env):\n"
        "    def __init__(self, size=4):\n        super().__init__(lock, size)",
        f"envs = SubprocVecEnv([Local, Local])\n{SB3_USE}",
        SB3_ORIGINAL,
        element="Local",
    ),
    "sb3, a class that closes over a context": Program(
        SB3,
        "def main():\n    context = zmq.Context()\n    class Local(Env):\n        def __init__(self):\n"
        "            super().__init__(context, 3)\n    try:\n        envs = SubprocVecEnv([Local, Local])\n"
        "        obs = envs.reset().tolist()\n        envs.close()\n        return obs\n    finally:\n"
        "        context.term()\nresult = main()",
        SB3_ORIGINAL,
        element="Local",
    ),
    "make_vec, a class with an attribute, in a lambda": Program(
        MAKE_VEC + "\nclass Local(Env):\n    shared = threading.Lock()\n    def __init__(self, size):\n"
        "        super().__init__(self.shared, size)",
        f"envs = muster.make_vec(lambda: Local(7), num_envs=2)\n{GYM_USE}",
        SERIAL,
        element="lambda: Local(7)",
    ),
    "make_vec, a class with a static method and a property": Program(
        MAKE_VEC + "\nlock = threading.Lock()\ncontext = zmq.Context()\nclass Local(Env):\n    def __init__(self):\n"
        "        super().__init__(self.context)\n        with self.lock():\n            pass\n    @staticmethod\n"
        "    def lock():\n        return lock\n    @property\n    def context(self):\n        return context",
        f"envs = muster.make_vec(Local, num_envs=2)\n{GYM_USE}",
        SERIAL,
        element="Local",
        cleanup=TERM,
    ),
    "make_vec, a lock in a tuple": Program(
        MAKE_VEC,
        "env_kwargs = {'thing': threading.Lock(), 'others': {'locks': (threading.Lock(), 1)}}\n"
        f"envs = muster.make_vec(Env, num_envs=2, env_kwargs=env_kwargs)\n{GYM_USE}",
        SERIAL,
    ),
    "make_vec, one dict of several": Program(
        MAKE_VEC,
        "env_kwargs = [{'thing': muster.lazy(threading.RLock)}, {'thing': threading.Lock(), 'size': 8}]\n"
        f"envs = muster.make_vec(Env, num_envs=2, env_kwargs=env_kwargs)\n{GYM_USE}",
        SERIAL,
    ),
    "make_vec, a factory": Program(
        MAKE_VEC + "\nlock = threading.Lock()\ndef make_env(size=3):\n    return Env(lock, size)",
        f"envs = muster.make_vec(make_env, num_envs=2)\n{GYM_USE}",
        SERIAL,
        element="make_env",
    ),
    "make_vec, a wrapper": Program(
        MAKE_VEC + "\nlock = threading.Lock()",
        "env_kwargs = {'thing': numbers(4)}\nenvs = muster.make_vec(Env, num_envs=1, env_kwargs={'thing': "
        f"muster.lazy(numbers, 4)}}, wrappers=[lambda env: Guarded(env, lock)])\n{GYM_USE}",
        SERIAL,
        element="lambda env: Guarded(env, lock)",
    ),
    "make_vec, a held lock by fork": Program(
        MAKE_VEC + "\nlock = threading.Lock()",
        "env_kwargs = {'thing': lock}\nlock.acquire()\n"
        f"envs = muster.make_vec(Env, num_envs=2, env_kwargs=env_kwargs, context='fork')\n{GYM_USE}",
        (("lock.acquire()", "pass"),),
    ),
    "make_vec, a spec": Program(
        MAKE_VEC + "\ngymnasium.register('Locked-v0', entry_point=Env, kwargs={'thing': threading.Lock()})",
        f"envs = muster.make_vec('Locked-v0', num_envs=2)\n{GYM_USE}",
        SERIAL,
        cleanup="del gymnasium.registry['Locked-v0']",
    ),
    "make_vec_env, a method of C code": Program(
        SB3 + DATABASE,
        "env_kwargs = {'thing': {'run': [database.execute]}}\n"
        f"envs = make_vec_env(Env, 2, env_kwargs=env_kwargs, vec_env_cls=SubprocVecEnv)\n{SB3_USE}",
        SB3_ORIGINAL,
        cleanup="database.close()",
    ),
    "sb3, a method of C code in a partial": Program(
        SB3 + DATABASE,
        f"envs = SubprocVecEnv([functools.partial(Env, database.execute)] * 2)\n{SB3_USE}",
        SB3_ORIGINAL,
        element="functools.partial(Env, database.execute)",
        cleanup="database.close()",
    ),
    "gymnasium, a method of C code in a lambda": Program(
        GYM + DATABASE + "\nrun = database.execute",
        f"envs = AsyncVectorEnv([lambda: Env(run) for _ in range(2)])\n{GYM_USE}",
        GYM_ORIGINAL,
        element="lambda: Env(run)",
        cleanup="database.close()",
    ),
    "torchrl, a method of C code": Program(
        "from muster.interop.torchrl import ParallelEnv\n" + DATABASE,
        "create_env_kwargs = {'thing': database.execute}\n"
        "envs = ParallelEnv(2, Env, create_env_kwargs=create_env_kwargs)\n"
        "result = envs.reset()['observation'].tolist()\nenvs.close()",
        (("from muster.interop.torchrl import ParallelEnv", "from muster.interop.gymnasium import SyncVectorEnv"),)
        + (("ParallelEnv(2, Env, create_env_kwargs=create_env_kwargs)", "SyncVectorEnv([lambda: Env(run)] * 2)"),)
        + (("create_env_kwargs = {'thing': database.execute}", "run = database.execute"),)
        + (("envs.reset()['observation']", "envs.reset()[0]"),),
        cleanup="database.close()",
    ),
    "make_vec, what a __getstate__ returns": Program(
        MAKE_VEC,
        f"env_kwargs = {{'thing': Guard()}}\nenvs = muster.make_vec(Env, num_envs=2, env_kwargs=env_kwargs)\n{GYM_USE}",
        SERIAL,
    ),
    "sb3, what a __getstate__ returns": Program(
        SB3,
        f"envs = SubprocVecEnv([functools.partial(Env, Guard())] * 2)\n{SB3_USE}",
        SB3_ORIGINAL,
        element="functools.partial(Env, Guard())",
    ),
    "make_vec, a thread pool by fork": Program(
        f"{MAKE_VEC}\n{POOL}",
        "env_kwargs = {'thing': pool}\n"
        f"envs = muster.make_vec(Env, num_envs=2, env_kwargs=env_kwargs, context='fork')\n{GYM_USE}",
        (("muster.make_vec(", 'muster.make_vec(backend="serial", env='), (", context='fork'", "")),
        cleanup="pool.terminate()",
    ),
    "gymnasium, a thread pool": Program(
        f"{GYM}\n{POOL}",
        f"envs = AsyncVectorEnv([functools.partial(Env, pool)] * 2)\n{GYM_USE}",
        GYM_ORIGINAL,
        element="functools.partial(Env, pool)",
        cleanup="pool.terminate()",
    ),
    "make_vec, a class under the name of a loop": Program(
        f"{MAKE_VEC}\nimport queue\nfor make in (queue.Queue,):\n    thing = make()",
        f"env_kwargs = {{'thing': thing}}\nenvs = muster.make_vec(Env, num_envs=2, env_kwargs=env_kwargs)\n{GYM_USE}",
        SERIAL,
    ),
    "make_vec, call": Program(
        MAKE_VEC + "\nenvs = None",
        "envs = muster.make_vec(lambda: Env(threading.Lock()), num_envs=2)\nlock = threading.Lock()\n"
        "result = []\nresult = list(envs.call('take', 1, lock=lock))",
        SERIAL,
        fails="envs.call('take', 1, lock=lock)",
        cleanup="envs.close()",
    ),
    "make_vec, call of a lambda": Program(
        MAKE_VEC + "\nenvs = None",
        "envs = muster.make_vec(lambda: Env(threading.Lock()), num_envs=2)\nlock = threading.Lock()\n"
        "result = list(envs.call(lambda env, i: env.unwrapped.take(i, lock)))",
        SERIAL,
        fails="envs.call(lambda env, i: env.unwrapped.take(i, lock))",
        cleanup="envs.close()",
    ),
    "Collector": Program(
        MAKE_VEC,
        "make_vec_options = {'env_kwargs': {'thing': numbers(3)}}\n"
        "collector = muster.Collector(Env, None, num_envs=1, frames_per_batch=2, make_vec_options=make_vec_options)\n"
        "result = collector.rollout()['observation'].tolist()\ncollector.shutdown()",
        (("'env_kwargs': {", "'backend': 'serial', 'env_kwargs': {"),),
    ),
    "MultiCollector": Program(
        MAKE_VEC,
        "make_vec_options = {'env_kwargs': {'thing': threading.Lock()}}\n"
        "collector = muster.MultiCollector(Env, None, num_collectors=2, num_envs=2, frames_per_batch=4, "
        "make_vec_options=make_vec_options)\n"
        "result = collector.rollout()['observation'].tolist()\ncollector.shutdown()",
        (
            ("muster.MultiCollector(Env, None, num_collectors=2, ", "muster.Collector(Env, None, "),
            ("'env_kwargs': {", "'backend': 'serial', 'env_kwargs': {"),
        ),
    ),
}
QUICK = {
    "sb3, a partial",
    "make_vec_env",
    "gymnasium, a database in a lambda",
    "gymnasium, a method of C code in a lambda",
    "make_vec, a lock in a tuple",
    "make_vec, what a __getstate__ returns",
}
CASES = [pytest.param(one, id=name, marks=() if name in QUICK else slow) for name, one in PROGRAMS.items()]
