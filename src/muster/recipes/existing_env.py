"""Finds envs that exist already, where a recipe for a new one is expected."""

from __future__ import annotations

import contextlib
import functools
import threading
import types
import weakref
from collections.abc import Iterator
from typing import Any

import gymnasium as gym

from muster.introspection import attributes_of, closure_of, global_names, subscript
from muster.pickling.interrupts import new_in_child

_ACTION_NAMES = ("action_space", "action_spec", "action_spaces")
_CONTAINERS = (dict, list, tuple, set, frozenset)


def is_env(value: Any) -> bool:
    """Returns whether ``value`` is an env, of any API. Runs no code of ``value``.

    APIs other than Gymnasium's are recognised by their methods; a simulator has ``reset`` and ``step``, but no
    actions.
    """
    kind = type(value)
    if issubclass(kind, (type, types.ModuleType)):
        return False
    if issubclass(kind, (gym.Env, gym.vector.VectorEnv)):
        return True
    steps = callable(getattr(kind, "reset", None)) and callable(getattr(kind, "step", None))
    return steps and any(hasattr(kind, name) or name in attributes_of(value) for name in _ACTION_NAMES)


def find_existing_env(factory: Any, name: str = "factory") -> tuple[str, Any] | None:
    """Path and object of the first existing env that ``factory`` holds, None if it holds none.

    Looks at what a factory can return without building it: closures, defaults, the globals that its code names,
    arguments of a ``functools.partial``, a bound method's object; in each one level into containers, and through the
    functions among them.
    """
    seen: set[int] = set()
    pending = [(name, factory)]
    while pending:
        path, holder = pending.pop()
        if id(holder) in seen:
            continue
        seen.add(id(holder))
        for part, held in _held(holder):
            for where, value in ((path + part, held), *_one_level(path + part, held)):
                if is_env(value):
                    return where, value
                if issubclass(type(value), (types.FunctionType, types.MethodType, functools.partial)):
                    pending.append((where, value))
    return None


def _held(holder: Any) -> Iterator[tuple[str, Any]]:
    """Pairs (path suffix, object) of what a callable holds directly."""
    kind = type(holder)
    if issubclass(kind, functools.partial):
        yield ".func", holder.func
        yield ".args", holder.args
        yield ".keywords", holder.keywords
    elif kind is types.MethodType:
        yield ".__self__", holder.__self__
        yield ".__func__", holder.__func__
    elif kind is types.FunctionType:
        yield from ((f".<closure>.{variable}", held) for variable, held in closure_of(holder).items())
        yield ".__defaults__", holder.__defaults__
        yield ".__kwdefaults__", holder.__kwdefaults__
        for global_name in global_names(holder.__code__):
            held = holder.__globals__.get(global_name)
            if is_env(held) or type(held) in _CONTAINERS:
                yield f".<global>.{global_name}", held


def _one_level(path: str, held: Any) -> Iterator[tuple[str, Any]]:
    if type(held) is dict:
        yield from ((path + subscript(key), value) for key, value in held.items())
    elif type(held) in _CONTAINERS:
        yield from ((f"{path}[{i}]", value) for i, value in enumerate(held))


class LiveEnvs:
    """The envs that recipes built in this process and that are still in use, held weakly."""

    def __init__(self) -> None:
        # Reentrant: garbage collection may close a dropped vector env, and so call `discard`, in the middle of `add`.
        self._lock = new_in_child(threading.RLock())
        self._by_id: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def add(self, env: Any) -> bool:
        """Records ``env`` if it is new, and returns whether it is. A wrapper around an env that is in use is not."""
        core = _unwrapped(env)
        with self._lock:
            if self._by_id.get(id(core)) is core:
                return False
            with contextlib.suppress(TypeError):  # a class without __weakref__ cannot be recorded
                self._by_id[id(core)] = core
        return True

    def discard(self, env: Any) -> None:
        """Forgets ``env``, which is no longer in use."""
        core = _unwrapped(env)
        with self._lock:
            self._by_id.pop(id(core), None)


def _unwrapped(env: Any) -> Any:
    try:
        return env.unwrapped
    except Exception:  # other APIs have no such attribute, or raise what they like
        return env
