"""Pickling of `functools` caches and dispatchers, which travel with their functions but without what they remember.

In a script's own classes pickle looks for them under names that no worker can find, or fails on their locks and weak
references.
"""

from __future__ import annotations

import functools
import gc
import importlib
import io
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any, cast

import cloudpickle

from muster.pickling.main_module import Arriving, Definitions
from muster.pickling.walk import is_found_by_name, is_importable


class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle ships no types
    """Cloudpickle's pickler, which here also pickles these caches and dispatchers, and modules by their names.

    lays_main: see `Definitions`.
    """

    def __init__(self, file: io.BytesIO, *, lays_main: bool = False, **options: Any) -> None:
        super().__init__(file, **options)
        self._definitions = Definitions(lays=lays_main)
        self.globals_ref.update(self._definitions.globals_ref())

    def dump(self, obj: Any) -> None:
        super().dump(Arriving(obj, self._definitions))

    def reducer_override(self, obj: Any) -> Any:
        self._definitions.note(obj)
        return reduction_of(obj) or _reduction_of_module(obj) or super().reducer_override(obj)


def dumps(value: object, *, lays_main: bool = False) -> bytes:
    """``value`` as a pickle by value, which another process can load. lays_main: see `Definitions`."""
    buffer = io.BytesIO()
    Pickler(buffer, lays_main=lays_main).dump(value)
    return buffer.getvalue()


_CACHE = type(functools.lru_cache(len))
_DISPATCHER = cast(types.FunctionType, functools.singledispatch(len)).__code__
_OWN_OF_DISPATCHERS = ("register", "dispatch", "registry", "_clear_cache", "__wrapped__")


def reduction_of(value: Any) -> tuple[Any, ...] | None:
    """The reduction from which pickle makes `value` again; None where cloudpickle can pickle `value` itself."""
    kind = type(value)
    if kind is functools.cached_property:
        return _cached_property, (value.func, value.attrname)
    if kind is _CACHE and not is_importable(value):
        function, parameters = (vars(value).get(name) for name in ("__wrapped__", "cache_parameters"))
        # Code that wraps a cache may have replaced `__wrapped__`: then it is not known which function the cache calls.
        if parameters is None or not any(part is function for part in gc.get_referents(value)):
            return None
        return _cache, (parameters(), function), _without(value, "__wrapped__", "cache_parameters")
    if kind is types.FunctionType and value.__code__ is _DISPATCHER and not is_importable(value):
        return _dispatcher, (dict(value.registry),), _without(value, *_OWN_OF_DISPATCHERS)
    return None


def _reduction_of_module(value: Any) -> tuple[Any, ...] | None:
    """The reduction that imports `value`; None where it is no module, or one for cloudpickle to pickle.

    PettingZoo loads ``from pettingzoo.sisl import multiwalker_v9`` itself, a new module for every such line.
    """
    if type(value) is not types.ModuleType or sys.modules.get(value.__name__) is value:
        return None
    return (importlib.import_module, (value.__name__,)) if is_found_by_name(value) else None


def _without(value: Any, *names: str) -> dict[str, Any]:
    return {name: attribute for name, attribute in vars(value).items() if name not in names}


def _cached_property(function: Callable[..., Any], name: str | None) -> functools.cached_property[Any]:
    made = functools.cached_property(function)
    made.attrname = name
    return made


def _cache(parameters: Mapping[str, Any], function: Callable[..., Any]) -> object:
    return functools.lru_cache(**parameters)(function)


def _dispatcher(registry: Mapping[type, Callable[..., Any]]) -> object:
    made = functools.singledispatch(registry[object])
    for kind, function in registry.items():
        made.register(kind, function)
    return made
