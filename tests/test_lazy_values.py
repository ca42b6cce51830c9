"""Arguments that are built where the env runs, and released with it."""

from __future__ import annotations

import copy
import functools
import inspect
import multiprocessing
import operator
import os
import pickle
import sqlite3
import threading
import time
from contextlib import contextmanager

import cloudpickle
import gymnasium as gym
import numpy as np
import pytest
import zmq

import muster
from muster.errors import NotBuilt, RecipeError
from muster.lazy_values import LazyValues, lazy
from muster.worker_info import WorkerInfo, get_worker_info, worker_info_context


class Resource:
    """Notes in a shared list what happens to it."""

    def __init__(self, name, events):
        self.name = name
        self.events = events

    def close(self):
        self.events.append(f"close {self.name}")


def resolve(**kwargs):
    values = LazyValues()
    return values, values.resolve_arguments(kwargs, "env_kwargs")


def test_values_without_lazies_are_handed_over_as_they_are():
    given = {"list": [1, {"a": object()}], "tuple": (object(),), "lock": threading.Lock()}
    _, resolved = resolve(**given)
    assert all(resolved[key] is given[key] for key in given)


def test_lazies_in_containers_are_built_and_the_rest_is_kept():
    kept = object()
    given = {"a": [lazy(dict, x=1), kept], "b": {"c": {"d": (lazy(int, "7"),)}}}
    _, resolved = resolve(**given)
    assert resolved == {"a": [{"x": 1}, kept], "b": {"c": {"d": (7,)}}}
    assert resolved["a"][1] is kept
    assert repr(given["a"][0]) == "muster.lazy(dict, x=1)"


def test_lazies_in_partials_are_built_at_any_depth():
    values = LazyValues()
    inner = functools.partial(dict, lazy(int, "1"), key=[lazy(str, 2)])
    inner.note = "kept"
    resolved = values.resolve({"make": (functools.partial(max, [inner]),)}, "x")
    built = resolved["make"][0].args[0][0]
    assert (built.func, built.args, built.keywords, built.note) == (dict, (1,), {"key": ["2"]}, "kept")
    assert inner.args != built.args
    plain = functools.partial(max, [1])
    assert values.resolve([plain], "x")[0] is plain


USES = {
    "attribute": lambda value: value.socket,
    "call": lambda value: value(1),
    "truth": bool,
    "length": len,
    "iteration": list,
    "item": lambda value: value["x"],
    "setting an item": lambda value: operator.setitem(value, 0, 1),
    "with": lambda value: entered(value),
    "in": lambda value: 1 in value,
    "sum": lambda value: value + 1,
    "comparison": lambda value: value < 1,
    "number": float,
    "index": lambda value: [1][value],
    "path": os.fspath,
    "array": np.asarray,
    "format": lambda value: f"{value:>10}",
    "setting an attribute": lambda value: setattr(value, "speed", 3),
    "deleting an attribute": lambda value: delattr(value, "speed"),
}


def entered(value):
    with value:
        pass


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_using_a_lazy_that_nothing_has_built_says_where_it_would_have_been(use):
    with pytest.raises(NotBuilt, match="muster.lazy\\(list, 1\\) has not been built") as raised:
        use(lazy(list, 1))
    assert "env_kwargs, wrapper_kwargs, monitor_kwargs or create_env_kwargs" in str(raised.value)
    assert isinstance(raised.value, (TypeError, AttributeError))


def test_an_unbuilt_lazy_can_be_copied_pickled_shown_and_looked_at():
    value = lazy(int, "7", base=8)
    for same in (copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value)), cloudpickled(value)):
        assert (type(same), same.fn, same.args, same.kwargs) == (type(value), int, ("7",), {"base": 8})
    assert repr(value) == str(value) == f"{value}" == "muster.lazy(int, '7', base=8)"
    assert not hasattr(value, "anything")
    assert not hasattr(value, "__wrapped__")
    assert not isinstance(value, (int, str, dict))
    assert not any(look(value) for look in (inspect.isclass, inspect.isfunction, inspect.isgenerator))
    assert value in [value]
    assert value != lazy(int, "7", base=8)
    assert {value: 1}[value] == 1
    assert dict(inspect.getmembers_static(value))


def cloudpickled(value):
    return pickle.loads(cloudpickle.dumps(value))


def test_a_lazy_builds_no_env_by_itself():
    with pytest.raises(RecipeError, match="env must be an env id"):
        muster.make_vec(lazy(gym.make, "CartPole-v1"), 1)


def test_a_container_that_holds_itself_ends():
    cycle = [lazy(int)]
    cycle += [cycle] * 10
    _, resolved = resolve(cycle=cycle)
    assert resolved["cycle"][0] == 0


def test_one_lazy_used_twice_is_built_once_per_env():
    context = lazy(object)
    given = {"context": context, "socket": lazy(lambda c: [c], context)}
    _, first = resolve(**given)
    _, second = resolve(**given)
    assert first["socket"][0] is first["context"]
    assert first["context"] is not second["context"]


def test_identity_of_lazies_survives_pickling():
    context = lazy(object)
    given = pickle.loads(pickle.dumps({"context": context, "socket": lazy(list, [context])}))
    _, resolved = resolve(**given)
    assert resolved["socket"][0] is resolved["context"]


def test_released_in_reverse_order_and_once():
    events = []
    values, _ = resolve(a=lazy(Resource, "a", events), b=[lazy(Resource, "b", events)])
    values.release(1.0)
    values.release(1.0)
    assert events == ["close b", "close a"]


def test_what_several_lazies_return_is_released_once():
    events = []

    @contextmanager
    def opened():
        events.append("enter")
        yield Resource("b", events)
        events.append("exit")

    one, other = lazy(Resource, "a", events), lazy(opened)
    values, resolved = resolve(one=lazy(lambda it: it, one), other=lazy(lambda it: it, other), again=one)
    assert resolved["one"] is resolved["again"]
    values.release(5.0)
    assert events == ["enter", "exit", "close a"]


def test_context_managers_are_entered_and_left():
    events = []

    @contextmanager
    def opened():
        events.append("enter")
        yield "value"
        events.append("exit")

    values, resolved = resolve(x=lazy(opened))
    assert resolved == {"x": "value"}
    values.release(1.0)
    assert events == ["enter", "exit"]


def test_locks_are_not_taken():
    _, resolved = resolve(lock=lazy(threading.Lock), rlock=lazy(threading.RLock), condition=lazy(threading.Condition))
    assert not resolved["lock"].locked()
    assert resolved["rlock"].acquire(blocking=False)


def test_a_database_connection_is_closed_not_just_committed(tmp_path):
    values, resolved = resolve(db=lazy(sqlite3.connect, tmp_path / "a.db", check_same_thread=False))
    values.release(5.0)
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        resolved["db"].execute("select 1")


def test_zeromq_socket_is_closed_before_its_context():
    context = lazy(zmq.Context)
    values, resolved = resolve(context=context, socket=lazy(lambda c: c.socket(zmq.REQ), context))
    values.release(5.0)
    assert resolved["socket"].closed
    assert resolved["context"].closed


def test_a_release_that_hangs_is_left_behind_and_the_others_are_released(caplog):
    events = []

    class Hangs(Resource):
        def close(self):
            time.sleep(60)

    values, _ = resolve(first=lazy(Resource, "first", events), hangs=lazy(Hangs, "", events))
    started = time.monotonic()
    values.release(0.4)
    assert time.monotonic() - started < 10
    assert events == ["close first"]
    assert 'env_kwargs["hangs"] was not released' in caplog.text


def test_a_release_that_raises_is_logged(caplog):
    class Bad(Resource):
        def close(self):
            raise SystemExit(3)

    values, _ = resolve(bad=lazy(Bad, "", []))
    values.release(1.0)
    assert 'Releasing env_kwargs["bad"] failed: SystemExit: 3' in caplog.text


def test_a_context_that_cannot_be_left_is_closed():
    events = []

    class Odd(Resource):
        def __enter__(self):
            return self

        def __exit__(self, *args):
            raise ValueError("no")

    values, _ = resolve(odd=lazy(Odd, "odd", events))
    values.release(1.0)
    assert events == ["close odd"]


def test_worker_info_is_seen_while_building_and_releasing():
    seen = []

    class Noting:
        def close(self):
            seen.append(get_worker_info().env_index)

    values = LazyValues()
    with worker_info_context(WorkerInfo(3, 1, 8, 2, None)):
        port = values.resolve(lazy(lambda: 5555 + get_worker_info().env_index), "port")
        values.resolve(lazy(Noting), "noting")
        values.release(1.0)
    assert port == 5558
    assert seen == [3]
    assert get_worker_info() is None


def test_worker_info_is_per_thread_and_nests():
    outer, inner = WorkerInfo(None, 0, 2, 1, 5), WorkerInfo(1, 0, 2, 1, 5)
    seen = []
    with worker_info_context(outer):
        with worker_info_context(inner):
            thread = threading.Thread(target=lambda: seen.append(get_worker_info()))
            thread.start()
            thread.join()
            assert get_worker_info() is inner
        assert get_worker_info() is outer
    assert seen == [None]


def test_an_error_says_which_value_was_being_built():
    def fails():
        raise OSError("port in use")

    with pytest.raises(OSError, match="port in use") as raised:
        resolve(port=[lazy(fails)])
    assert 'env_kwargs["port"][0]' in raised.value.__notes__[0]


def test_a_value_in_place_of_a_function_is_explained():
    with pytest.raises(TypeError, match=r"muster\.lazy\(zmq\.Context\), not muster\.lazy\(zmq\.Context\(\)\)"):
        lazy(5)


def test_what_multiprocessing_shares_comes_unlocked():
    counted = lazy(multiprocessing.Value, "i", 3)
    _, resolved = resolve(
        value=counted, numbers=lazy(multiprocessing.Array, "i", 2), gate=lazy(multiprocessing.Condition)
    )
    assert resolved["value"].value == 3
    assert list(resolved["numbers"]) == [0, 0]
    assert all(one.acquire(block=False) for one in (resolved["value"], resolved["numbers"]))
    assert resolved["gate"].acquire(False)
