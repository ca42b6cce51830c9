"""Pickling of `functools` caches and dispatchers, which travel with their functions but without what they remember.

In a script's own classes pickle looks for them under names that no worker can find, or fails on their locks and weak
references.
"""

from __future__ import annotations

import collections
import functools
import gc
import importlib
import io
import sys
import threading
import types
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, cast

import cloudpickle

from muster.introspection import module_name
from muster.pickling.interrupts import new_in_child
from muster.pickling.main_module import CACHE, MAIN_NAMES, Arriving, Definitions, is_only_here, own_first
from muster.pickling.walk import is_found_by_name, is_importable


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle ships no types
    """Cloudpickle's pickler, which here also pickles these caches and dispatchers, and modules by their names.

    What only this process knows travels by value. lays_main, forks: see `Definitions`.
    """

    def __init__(self, file: io.BytesIO, *, lays_main: bool = False, forks: bool = False, **options: Any) -> None:
        super().__init__(file, **options)
        self._definitions = Definitions(lays=lays_main, forks=forks)
        self._by_value = _ByValue()

    def dump(self, obj: Any) -> None:
        try:
            super().dump(Arriving(obj, self._definitions))
        finally:
            self._by_value.forget()

    def reducer_override(self, obj: Any) -> Any:
        may_be_there = self._definitions.note(obj)
        self._by_value.note(obj)
        if (own := self._definitions.globals_of(obj)) is not None:
            self.globals_ref.setdefault(id(obj.__globals__), own)
        reduction = reduction_of(obj) or self._reduction_of_module(obj) or super().reducer_override(obj)
        return own_first(obj, reduction) if may_be_there and reduction is not NotImplemented else reduction

    def _reduction_of_module(self, value: Any) -> tuple[Any, ...] | None:
        """The reduction that makes a module; None where `value` is none, or one for cloudpickle to pickle.

        PettingZoo loads ``from pettingzoo.sisl import multiwalker_v9`` itself, a new module for every such line.
        """
        if type(value) is not types.ModuleType:
            return None
        if sys.modules.get(value.__name__) is value:
            is_here = value.__name__ not in MAIN_NAMES and is_only_here(value.__name__)
            return self._definitions.reduction_of_module(value) if is_here else None
        return (importlib.import_module, (value.__name__,)) if is_found_by_name(value) else None


class _ByValue:
    """The modules with classes and functions that cloudpickle is to pickle by value, until `forget`.

    Its list of these is the process's, and stays as it was: a module that several threads need leaves it with the last.
    """

    _users: ClassVar[collections.Counter[str]] = collections.Counter()
    _lock: ClassVar[Any] = new_in_child(threading.Lock())

    def __init__(self) -> None:
        self._noted: set[str] = set()

    def note(self, value: Any) -> None:
        """Adds the module of the class or function `value`, where only this process knows that."""
        if not (type(value) is types.FunctionType or issubclass(type(value), type)):
            return
        name = module_name(value)
        if name in self._noted or name == MAIN_NAMES[0] or not is_only_here(name):
            return
        with self._lock:
            if self._users[name] or name not in cloudpickle.list_registry_pickle_by_value():
                self._noted.add(name)
                self._users[name] += 1
                cloudpickle.register_pickle_by_value(sys.modules[name])

    def forget(self) -> None:
        """Takes away what was added."""
        with self._lock:
            self._users.subtract(self._noted)
            for name in self._noted:
                if not self._users[name]:
                    cloudpickle.unregister_pickle_by_value(sys.modules[name])
            self._noted.clear()


def dumps(value: object, *, lays_main: bool = False) -> bytes:
    """``value`` as a pickle by value, which another process can load. lays_main: see `Definitions`."""
    buffer = io.BytesIO()
    Pickler(buffer, lays_main=lays_main).dump(value)
    return buffer.getvalue()


_DISPATCHER = cast(types.FunctionType, functools.singledispatch(len)).__code__
_OWN_OF_DISPATCHERS = ("register", "dispatch", "registry", "_clear_cache", "__wrapped__")


def reduction_of(value: Any) -> tuple[Any, ...] | None:
    """The reduction from which pickle makes `value` again; None where cloudpickle can pickle `value` itself."""
    kind = type(value)
    if kind is functools.cached_property:
        return functools.cached_property, (value.func,), {"attrname": value.attrname}
    if kind is CACHE and not is_importable(value):
        function, parameters = (vars(value).get(name) for name in ("__wrapped__", "cache_parameters"))
        # Code that wraps a cache may have replaced `__wrapped__`: then it is not known which function the cache calls.
        if parameters is None or not any(part is function for part in gc.get_referents(value)):
            return None
        return _cache, (parameters(), function), _without(value, "__wrapped__", "cache_parameters")
    if kind is types.FunctionType and value.__code__ is _DISPATCHER and not is_importable(value):
        return _dispatcher, (dict(value.registry),), _without(value, *_OWN_OF_DISPATCHERS)
    return None


def _without(value: Any, *names: str) -> dict[str, Any]:
    return {name: attribute for name, attribute in vars(value).items() if name not in names}


def _cache(parameters: Mapping[str, Any], function: Callable[..., Any]) -> object:
    return functools.lru_cache(**parameters)(function)


def _dispatcher(registry: Mapping[type, Callable[..., Any]]) -> object:
    made = functools.singledispatch(registry[object])
    for kind, function in registry.items():
        made.register(kind, function)
    return made
