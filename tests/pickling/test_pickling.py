"""Why an object cannot travel: real objects, and what is said about each."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import csv
import ctypes
import functools
import hashlib
import io
import itertools
import mmap
import multiprocessing
import queue
import random
import runpy
import socket
import sqlite3
import sys
import tempfile
import threading
import time
import types
import weakref

import gymnasium as gym
import numpy as np
import pytest
import zmq

from muster.errors import CannotTravel
from muster.pickling import Culprit, find_culprits
from muster.pickling.remedies import Remedy, remedy_for
from muster.recipes.recipe import make_recipes, pack, shared_by

LIMIT_S = 5.0


def make_env(**kwargs):
    return gym.make("CartPole-v1")


class Server:
    """A user's object: plain Python, with something inside that cannot travel."""

    def __init__(self, context):
        self._context = context


class Plain:
    def __init__(self):
        self.lock = threading.Lock()


class Slotted:
    __slots__ = ("lock", "never_set")

    def __init__(self):
        self.lock = threading.Lock()


class RaisesInReduce:
    def __reduce__(self):
        raise ValueError("I am bound to this machine")


class ExitsInReduce:
    def __reduce__(self):
        sys.exit(3)


class HangsInGetstate:
    def __getstate__(self):
        time.sleep(600)


def refusal(value, start_method="spawn") -> str:
    """What pack says about ``value`` in env_kwargs; checks that it says so in time."""
    started = time.monotonic()
    with pytest.raises(CannotTravel) as raised:
        pack(make_recipes(make_env, 2, {"x": value}), start_method=start_method)
    assert time.monotonic() - started < LIMIT_S
    return str(raised.value)


def only(culprits: list[Culprit]) -> Culprit:
    assert len(culprits) == 1, culprits
    return culprits[0]


def generate():
    yield from range(3)


FORK = '\n  context="fork" copies all objects. Nobody looks at what a fork breaks: threads, held locks, CUDA.\n'


@pytest.mark.parametrize(
    ("make", "type_name", "fix"),
    [
        (zmq.Context, "zmq.sugar.context.Context", "muster.lazy(zmq.Context)"),
        (threading.Lock, "_thread.lock", "muster.lazy(threading.Lock)"),
        (threading.RLock, "_thread.RLock", "muster.lazy(threading.RLock)"),
        (generate, "generator", "muster.lazy(generate)"),
        (lambda: ctypes.pointer(ctypes.c_int(3)), "LP_c_int", "Build it in the worker instead: set "),
        (lambda: ctypes.CDLL(None), "ctypes.CDLL", "muster.lazy(ctypes.CDLL,"),
        (
            multiprocessing.get_context("fork").Lock,
            "multiprocessing.synchronize.Lock",
            'Make it in a context that can start fresh processes, multiprocessing.get_context("forkserver")',
        ),
        (RaisesInReduce, "RaisesInReduce", "muster.lazy(test_pickling.RaisesInReduce)"),
        (ExitsInReduce, "ExitsInReduce", "SystemExit: 3"),
        (RaisesInReduce, "RaisesInReduce", "ValueError: I am bound to this machine"),
        (lambda: multiprocessing.Pipe()[0], "Connection", "another file in a worker"),
        (threading.Thread, "threading.Thread", "muster.lazy(function)"),
        (lambda: mmap.mmap(-1, 10), "mmap.mmap", "muster.lazy(mmap.mmap"),
        (lambda: weakref.ref(Server), "weakref", "muster.lazy("),
    ],
)
def test_a_clear_answer_for(make, type_name, fix):
    value = make()
    message = refusal(value)
    if isinstance(value, zmq.Context):
        value.term()
    assert message.startswith('env_kwargs["x"] cannot be sent to a worker (context="spawn").\n  env_kwargs["x"]: ')
    assert type_name in message.splitlines()[1]
    assert fix in message
    assert FORK in message


@pytest.mark.parametrize(
    ("open_resource", "type_name", "fix"),
    [
        (functools.partial(open, mode="w"), "_io.TextIOWrapper", "muster.lazy(open, '{}', 'w')"),
        (functools.partial(open, mode="ab"), "_io.BufferedWriter", "muster.lazy(open, '{}', 'ab')"),
        (functools.partial(open, mode="rb"), "_io.BufferedReader", "muster.lazy(open, '{}', 'rb')"),
        (functools.partial(open, mode="rb", buffering=0), "_io.FileIO", "muster.lazy(open, '{}', 'rb')"),
        (
            lambda path: socket.socket(),
            "socket.socket",
            "muster.lazy(socket.create_connection)   # with its arguments, ",
        ),
        (
            lambda path: sqlite3.connect(path),
            "sqlite3.Connection",
            "muster.lazy(sqlite3.connect)   # with its arguments, ",
        ),
        (lambda path: zmq.Context.instance().socket(zmq.REQ), "Socket", 'set env_kwargs["x"] to muster.lazy(function)'),
    ],
)
def test_what_is_open_is_built_there_with_its_arguments(tmp_path, open_resource, type_name, fix):
    path = tmp_path / "file"
    path.touch()
    resource = open_resource(path)
    try:
        message = refusal({"deep": [Server(resource)]})
        assert f'env_kwargs["x"]["deep"][0]._context: {type_name}' in message or type_name in message.splitlines()[1]
        code = 'env_kwargs["x"]["deep"][0] = muster.lazy(test_pickling.Server)   # with its arguments, before'
        assert code in message
        assert fix.format(path) in refusal(resource)
    finally:
        resource.close()


LOCK = "muster.lazy(threading.Lock)"
AN_ARGUMENT = "Build it in the worker instead. Make {} an argument of {}, and hand it over"


def remedy(value, name='env_kwargs["x"]') -> Remedy:
    """For the first obstacle in `value`, without the imports, which must be there."""
    found = remedy_for(find_culprits(value, name)[0].obstacle)
    *imports, code = found.code.splitlines() or [""]
    for line in imports:
        exec(line)
    return Remedy(found.lead, code.removesuffix("   # before muster.make_vec"))


@pytest.mark.parametrize(
    ("value", "name", "code"),
    [
        (threading.Lock(), 'env_kwargs["x"]', f'env_kwargs["x"] = {LOCK}'),
        (threading.Lock(), "thing", f"thing = {LOCK}"),
        ([{"a": threading.Lock()}], 'env_kwargs[3]["x"]', f'env_kwargs[3]["x"][0]["a"] = {LOCK}'),
        (functools.partial(print, a={"b": threading.Lock()}), "env_fns[0]", f'env_fns[0].keywords["a"]["b"] = {LOCK}'),
    ],
)
def test_what_an_assignment_reaches_is_assigned(value, name, code):
    assert remedy(value, name) == Remedy("Build it in the worker instead", code)


def with_default(lock=threading.Lock()):  # noqa: B008  # the point of the test
    return lock


with_default.__module__ = "__main__"


class Callable:
    def __init__(self, lock):
        self.lock = lock

    def __call__(self):
        pass


@pytest.mark.parametrize(
    ("value", "name"),
    [
        ((lambda server: lambda: server)(threading.Lock()), "server"),
        (functools.partial(make_env, threading.Lock()), "lock"),
        (functools.partial(make_env, a=(1, threading.Lock())), "lock"),
        (with_default, "lock"),
        (Callable(threading.Lock()), "lock"),
    ],
)
def test_what_a_function_holds_becomes_an_argument_of_it(value, name):
    code = f"wrappers[1] = functools.partial(wrappers[1], {name}={LOCK})"
    assert remedy(value, "wrappers[1]") == Remedy(AN_ARGUMENT.format(name, "wrappers[1]"), code)


@pytest.mark.parametrize(
    "value",
    [
        (threading.Lock(), 1),
        {(1, 2): threading.Lock()},
        {threading.Lock()},
        (functools.partial(print, threading.Lock()),),
    ],
)
def test_what_no_assignment_reaches_becomes_an_argument_of_the_env(value):
    assert remedy(value) == Remedy(AN_ARGUMENT.format("lock", "the env"), f'env_kwargs["lock"] = {LOCK}')


SCRIPT = """
import threading
from muster.pickling import find_culprits

lock = threading.Lock()

class Base:
    def __init__(self):
        with lock:
            pass

class Derived(Base):
    pass

found = find_culprits({value}, "factory")
"""


@pytest.mark.parametrize(("value", "what"), [("Derived", "factory"), ("Base()", "the env"), ("[Base()]", "the env")])
def test_what_a_class_of_a_script_holds_becomes_an_argument(value, what, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(value=value))
    culprit = only(runpy.run_path(str(script), run_name="__main__")["found"])
    found = remedy_for(culprit.obstacle)
    assert found.lead == AN_ARGUMENT.format("lock", what)
    assert "muster.lazy(threading.Lock)" in found.code


@pytest.mark.parametrize(("value", "name"), [(threading.Event(), "threading.Event"), (Plain(), "test_pickling.Plain")])
def test_a_class_that_takes_no_arguments_is_called_without_any(value, name):
    assert remedy(value).code == f'env_kwargs["x"] = muster.lazy({name})'


@pytest.mark.parametrize(
    "make",
    [
        tempfile.NamedTemporaryFile,
        hashlib.sha256,
        asyncio.new_event_loop,
        threading.local,
        lambda: csv.writer(io.StringIO()),
        lambda: (i for i in ()),
    ],
)
def test_no_private_name_is_offered(make):
    value = make()
    found = remedy_for(find_culprits(value, 'env_kwargs["x"]')[0].obstacle)
    if hasattr(value, "close"):
        value.close()
    assert 'set env_kwargs["x"] to muster.lazy(function)' in found.lead
    assert found.code == ""


def test_find_culprits_is_bounded_and_finds_what_stands_behind_a_hanging_object():
    started = time.monotonic()
    culprits = find_culprits([HangsInGetstate(), threading.Lock()], "env")
    assert time.monotonic() - started < 3.0
    assert [culprit.path for culprit in culprits] == ["env[0]", "env[1]"]


def test_what_travels_has_no_culprits():
    assert find_culprits(make_env) == []
    assert find_culprits({"a": [1, (2, {3})], "b": np.zeros(3), "space": gym.spaces.Discrete(3)}) == []
    assert find_culprits(np) == []


# Paths


class Trainer:
    """Has a method as its factory; a property that must not run."""

    def __init__(self):
        self.lock = threading.Lock()
        self.asked = 0

    @property
    def expensive(self):
        self.asked += 1
        raise AssertionError

    def make(self):
        return make_env()


class Proxy:
    """Says that it is something else, as proxies do; isinstance would run this."""

    asked = 0

    @property
    def __class__(self):
        type(self).asked += 1
        return Server

    def __getattr__(self, name):
        type(self).asked += 1
        raise AttributeError(name)

    def make(self):
        return make_env()


def test_path_through_a_bound_method_runs_no_property():
    trainer = Trainer()
    culprit = only(find_culprits(trainer.make))
    assert culprit.path == "factory.__self__.lock"
    assert trainer.asked == 0


def test_looking_for_shared_objects_and_existing_envs_runs_nothing():
    proxy = Proxy()
    assert shared_by(make_recipes(proxy.make, 2, {}, [lambda env: proxy]), by_fork=True) == ""
    assert Proxy.asked == 0


def decorate(function):
    @functools.wraps(function)
    def wrapper():
        return function()

    return wrapper


def class_with_lock():
    class Local(gym.Env):
        lock = threading.Lock()

    return Local


def lock_in_an_array():
    return np.array([None, threading.Lock()], dtype=object)


class Attributed(dict):
    pass


def attributed():
    value = Attributed(a=1)
    value.lock = threading.Lock()
    return value


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (lambda: functools.partial(make_env, lock=threading.Lock()), 'factory.keywords["lock"]'),
        (lambda: functools.partial(make_env, threading.Lock()), "factory.args[0]"),
        (lambda: decorate(decorate((lambda lock: lambda: lock)(threading.Lock()))), ".<closure>.lock"),
        (lambda: [{"a": (1, threading.Lock())}], 'factory[0]["a"][1]'),
        (lambda: {(1, 2): threading.Lock()}, "factory[<tuple>]"),
        (lambda: {threading.Lock()}, "factory<element 0>"),
        (lambda: {threading.Lock(): 1}, "factory<key>"),
        (lambda: collections.deque([threading.Lock()]), "factory[0]"),
        (lambda: collections.OrderedDict(a=threading.Lock()), 'factory["a"]'),
        (Slotted, "factory.lock"),
        (lock_in_an_array, "factory.flat[1]"),
        (attributed, "factory.lock"),
        (class_with_lock, "factory.lock"),
        (lambda: class_with_lock()(), "factory.__class__.lock"),
        (lambda: with_default, "factory.<default>.lock"),
        (lambda: types.SimpleNamespace(a=types.SimpleNamespace(lock=threading.Lock())), "factory.a.lock"),
        (threading.Condition, "factory._lock"),
    ],
)
def test_path(make, path):
    blocking = [culprit for culprit in find_culprits(make()) if culprit.severity == "blocks"]
    assert blocking[0].path.endswith(path), blocking[0].path


def test_cycles_end_and_the_shortest_path_is_given():
    first, second = Server(None), Server(threading.Lock())
    first.other, second.other = second, first
    first.all = [first, second, first]
    assert only(find_culprits(first)).path == "factory.other._context"


def test_all_culprits_are_found():
    paths = [c.path for c in find_culprits([threading.Lock(), 1, RaisesInReduce(), (x for x in [])], "env")]
    assert paths == ["env[0]", "env[2]", "env[3]"]


def nested_lists(levels):
    nested = []
    for _ in range(levels):
        nested = [nested]
    return nested


def linked_servers(count):
    """Each holds the one after it."""
    servers = [Server(None)]
    for _ in range(count - 1):
        servers.insert(0, Server(servers[0]))
    return servers


@pytest.mark.parametrize("make", [lambda: {"deep": nested_lists(20_000)}, lambda: linked_servers(20_000)])
def test_nesting_beyond_the_recursion_limit_is_told(make):
    assert "nested too deeply to be pickled" in refusal(make()).splitlines()[1]


def test_a_reduce_that_never_ends_is_told():
    class Endless:
        def __reduce__(self):
            return Endless, (Endless(),)

    message = refusal(Endless())
    assert 'env_kwargs["x"]: test_pickling.' in message
    assert "its __reduce__ makes ever more objects" in message


class Hidden:
    """Pickles what is no part of it, behind a part that travels."""

    def __init__(self):
        self.part = Server(None)

    def __getstate__(self):
        return {"part": self.part, "lock": [threading.Lock()]}


class Reducing:
    def __reduce__(self):
        return Reducing, (threading.Lock(),)


@pytest.mark.parametrize(
    ("make", "path", "code"),
    [
        (Hidden, 'env_kwargs["x"]', 'env_kwargs["x"] = muster.lazy(test_pickling.Hidden)'),
        (lambda: {"a": [1, Hidden()]}, 'env_kwargs["x"]["a"][1]', 'env_kwargs["x"]["a"][1] = muster.lazy('),
        (lambda: (Reducing(),), 'env_kwargs["x"][0]', 'env_kwargs["reducing"] = muster.lazy(test_pickling.Reducing)'),
        (lambda: Server(Reducing()), 'env_kwargs["x"]._context', 'env_kwargs["x"] = muster.lazy(test_pickling.Server)'),
    ],
)
def test_what_only_a_getstate_or_reduce_returns_is_told_by_who_returns_it(make, path, code):
    message = refusal(make())
    assert message.startswith('env_kwargs["x"] cannot be sent')
    (found,) = [line for line in message.splitlines() if "_thread.lock" in line]
    assert found.startswith(f"  {path}: test_pickling.")
    assert "what its __reduce__ or __getstate__ returns holds a _thread.lock: a lock works only within" in found
    assert code in message


@pytest.mark.parametrize("hidden", [itertools.cycle, iter, dict.fromkeys, lambda values: map(print, values)])
def test_what_iterators_and_views_hold_is_found(hidden):
    held = hidden([threading.Lock()])
    (culprit,) = find_culprits([held.keys() if type(held) is dict else held], "env")
    assert culprit.path.startswith("env[0]")
    assert culprit.type == "_thread.lock"


@pytest.mark.parametrize("bind", [lambda file: file.write, lambda file: file.__iter__, lambda file: file.buffer.write])
def test_a_bound_method_of_c_code_is_told_by_the_object_that_it_is_bound_to(bind, tmp_path):
    with open(tmp_path / "log", "w") as file:
        message = refusal({"log": [bind(file)]})
    assert message.startswith('env_kwargs["x"] cannot be sent')
    assert message.splitlines()[1].startswith('  env_kwargs["x"]["log"][0].__self__: _io.')
    assert "] = muster.lazy(open, " in message


def test_functions_of_c_code_travel_by_their_names():
    assert find_culprits([len, time.monotonic, dict.fromkeys, "".join, [].append]) == []


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (queue.Queue, "queue.Queue"),
        (queue.SimpleQueue, "queue.SimpleQueue"),
        (concurrent.futures.Future, "concurrent.futures.Future"),
    ],
)
def test_a_class_is_named_by_its_public_module(make, name):
    assert f'env_kwargs["x"][0] = muster.lazy({name})' in remedy([make()]).code


def test_the_original_error_is_the_cause():
    with pytest.raises(CannotTravel) as raised:
        pack(make_recipes(make_env, 1, {"x": RaisesInReduce()}), start_method="spawn")
    assert isinstance(raised.value.__cause__, ValueError)


def test_a_memory_map_arrives_as_a_copy(tmp_path):
    np.save(tmp_path / "a.npy", np.zeros(10))
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r")
    assert "copy of its contents" in only(find_culprits(mapped)).reason


def test_a_file_without_a_name_is_not_opened_by_its_number():
    with tempfile.TemporaryFile() as file:
        assert "muster.lazy(open)   # with its arguments, " in remedy(file).code


def test_what_a_class_brings_along_from_its_module_is_named_last():
    script = types.ModuleType("__main__")
    code = """
import threading
context, unneeded = threading.Lock(), threading.Lock()
class Env:
    def debug(self):
        return unneeded
    def __init__(self, lock):
        pass
def make():
    return Env(context)
"""
    exec(code, script.__dict__)
    first, second = find_culprits(functools.partial(script.make, lock=threading.Lock()))[:2]
    assert first.path == 'factory.keywords["lock"]'
    assert second.path == "factory.func.<global>.context"


def test_spec_kwargs_are_named():
    gym.register("Locked-v0", entry_point=make_env, kwargs={"lock": threading.Lock()})
    with pytest.raises(CannotTravel, match=r'env\.kwargs\["lock"\]') as raised:
        pack(make_recipes("Locked-v0", 1), start_method="spawn")
    code = 'gymnasium.spec("Locked-v0").kwargs["lock"] = muster.lazy(threading.Lock)   # before muster.make_vec'
    assert code in str(raised.value)
    gym.registry.pop("Locked-v0")


# What travels, but not as it was


def test_a_file_that_is_read_is_warned_about(tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    with open(tmp_path / "a.txt") as file:
        culprit = only(find_culprits(lambda: file))
        assert culprit.severity == "silently_wrong"
        assert culprit.path == "factory.<closure>.file"
        assert "StringIO" in culprit.reason
        with pytest.warns(UserWarning, match=r'env_kwargs\["x"\].*StringIO') as caught:
            pack(make_recipes(make_env, 1, {"x": file}), start_method="spawn")
        assert "muster.lazy(open, " in str(caught[0].message)
        assert caught[0].filename == __file__


def test_a_huge_array_is_warned_about_with_its_size():
    array = np.zeros(200_000_000, np.uint8)
    with pytest.warns(UserWarning, match="200 MB"):
        pack(make_recipes(make_env, 1, {"x": [array]}), start_method="spawn")
    culprit = only(find_culprits(functools.partial(make_env, array)))
    assert culprit.severity == "silently_wrong"


@pytest.mark.parametrize("make", [np.random.default_rng, np.random.RandomState, random.Random])
def test_a_random_generator_repeats_itself_in_every_worker(make):
    assert "repeat" in only(find_culprits(make())).reason


def test_a_space_that_was_sampled_is_no_culprit():
    space = gym.spaces.Dict(a=gym.spaces.Discrete(3))
    space.sample()
    assert find_culprits(space) == []
