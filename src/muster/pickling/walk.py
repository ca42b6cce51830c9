"""Walks through what an object holds, without running any of its code, and keeps the path to each part."""

from __future__ import annotations

import collections
import contextlib
import gc
import itertools
import logging
import sys
import threading
import time
import types
from collections.abc import Iterator, Mapping
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np

from muster.introspection import attribute_dict, closure_of, global_names, module_name, subscript
from muster.pickling.main_module import is_only_here, named_in

Edge = tuple[str, Any]

_ATOMS = (type(None), bool, int, float, complex, str, bytes, bytearray, type(...), range, np.dtype)
_OPAQUE = (
    *(types.CodeType, types.FrameType, types.GetSetDescriptorType),
    logging.Logger,  # travels by its name, and renews its locks after a fork; it leads to the handlers of all others
)
METHODS = (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)
"""Functions that may be bound to an object. Those of C code are also what builtin functions are."""

_MODULES_OF_ITERATORS = ("builtins", "itertools")

_CODE = (types.FunctionType, *METHODS, types.ModuleType, staticmethod, classmethod, property)
_WITH_ELEMENTS = (dict, list, tuple, collections.deque, set, frozenset, types.CellType, np.ndarray)


class Walk:
    """Everything that can be reached from ``parts``, nearest first.

    inherited: follows what a forked process sees (also the globals of importable functions), not just what is pickled.
    Stops after ``limit_s`` seconds.
    """

    def __init__(self, parts: Mapping[str, Any], *, limit_s: float, inherited: bool = False) -> None:
        self._inherited = inherited
        self._deadline = time.monotonic() + limit_s
        # By id: the object, which must live as long as its id is in use here, its holder's id and its place in there.
        self._reached: dict[int, tuple[Any, int | None, str]] = {}
        self._layouts: dict[type, _ClassLayout] = {}
        self.parts = parts

    def __iter__(self) -> Iterator[Any]:
        """Each object once, roots first."""
        queue: collections.deque[Any] = collections.deque()
        for name, root in self.parts.items():
            if self._enter(root, None, name):
                queue.append(root)
        while queue:
            holder = queue.popleft()
            yield holder
            for part, value in edges(holder, self._layouts, inherited=self._inherited):
                if type(value) not in _ATOMS and self._enter(value, id(holder), part):
                    queue.append(value)
                if time.monotonic() > self._deadline:
                    return

    def trail(self, value: Any) -> list[Edge]:
        """The way from a root to ``value``: each object on it, with its path. [] if the walk did not reach it."""
        steps: list[Edge] = []
        key: int | None = id(value)
        while key is not None and key in self._reached:
            reached, key_of_holder, part = self._reached[key]
            steps.append((part, reached))
            key = key_of_holder
        steps.reverse()
        paths = itertools.accumulate(part for part, _ in steps)
        return [(path, reached) for path, (_, reached) in zip(paths, steps, strict=True)]

    def _enter(self, value: Any, holder: int | None, part: str) -> bool:
        if id(value) in self._reached:
            return False
        self._reached[id(value)] = (value, holder, part)
        return True


def edges(holder: Any, layouts: dict[type, _ClassLayout], *, inherited: bool) -> Iterator[Edge]:
    """Pairs (place, object) of what ``holder`` holds. Runs no property and no method of a user's class.

    layouts: the layouts of the classes met before; new ones are added.
    The code uses ``issubclass(type(x), ...)``, because ``isinstance`` asks an object for its ``__class__``.
    """
    kind = type(holder)
    if kind in _ATOMS or issubclass(kind, _OPAQUE):
        return
    if kind in _CODE or issubclass(kind, type):
        yield from _code_edges(holder, kind, inherited)
        return
    if kind is types.GeneratorType:
        if inherited and holder.gi_frame is not None:
            yield from ((f".<local>.{name}", value) for name, value in dict(holder.gi_frame.f_locals).items())
        return
    if inherited and module_name(kind).startswith("multiprocessing."):
        return  # renews its locks, and leaves its processes alone, after a fork
    if kind not in layouts:
        layouts[kind] = _ClassLayout(kind)
    layout = layouts[kind]
    if layout.has_elements:
        yield from _element_edges(holder, kind)
    elif layout.is_iterator:
        yield from ((f".<held {i}>", value) for i, value in enumerate(gc.get_referents(holder)))
    yield from layout.attributes(holder)
    if not inherited and not layout.importable:
        yield ".__class__", kind


class _ClassLayout:
    """The places where the instances of a class keep what they hold."""

    def __init__(self, kind: type) -> None:
        self.has_elements = issubclass(kind, _WITH_ELEMENTS)
        self.importable = is_importable(kind)
        self._dict = attribute_dict(kind)
        self._slots = [
            (f".{name}", member)
            for base in kind.__mro__
            for name, member in vars(base).items()
            if type(member) is types.MemberDescriptorType and name != "__dict__"
        ]
        # Iterators, views and others of C code: their classes do not show what they hold.
        self.is_iterator = module_name(kind) in _MODULES_OF_ITERATORS and self._dict is None and not self._slots
        self._hidden: str | None = None
        if issubclass(kind, gym.Space):
            # Code that draws from a space seeds the space's generator again: the generator's state does not matter.
            self._hidden = "_np_random"
        elif issubclass(kind, threading.Thread):
            self._hidden = "_tstate_lock"  # held while the thread runs, and renewed after a fork

    def attributes(self, holder: Any) -> Iterator[Edge]:
        if self._dict is not None:
            for name, value in self._dict.__get__(holder).copy().items():
                if name != self._hidden:
                    yield f".{name}", value
        for place, member in self._slots:
            try:
                yield place, member.__get__(holder)
            except AttributeError:  # a slot that was never set
                continue


def is_bound(value: Any) -> bool:
    """Returns whether `value` is a method of an object, and travels with it. Functions of C code belong to modules."""
    if type(value) not in METHODS or value.__self__ is None:
        return False
    owner = type(value.__self__)
    return owner is not types.ModuleType and owner.__name__ != "PyCapsule"  # which is that of a function of pybind11


def is_importable(definition: Any) -> bool:
    """Returns whether a function or class travels by its name; else it is sent by value, with what it uses."""
    module = module_name(definition)
    if is_only_here(module) or module in cloudpickle.list_registry_pickle_by_value():
        return False
    return named_in(sys.modules.get(module), getattr(definition, "__qualname__", "")) is definition


def is_found_by_name(module: types.ModuleType) -> bool:
    """Returns whether an import by the name gives this module, or another one from the same file. Imports nothing."""
    name, spec = (vars(module).get(key) for key in ("__name__", "__spec__"))
    if type(name) is not str or sys.modules.get(name) is module:
        return type(name) is str
    if type(module) is not types.ModuleType or type(spec) is not ModuleSpec or not spec.has_location:
        return False
    package = name.rpartition(".")[0]
    if package and package not in sys.modules:
        return False  # to look for the module would import the package
    with contextlib.suppress(Exception):  # the finders are other people's code, and so is what `sys.modules` holds
        found = find_spec(name)
        return found is not None and found.origin == spec.origin
    return False


def _code_edges(holder: Any, kind: type, inherited: bool) -> Iterator[Edge]:
    if kind is types.FunctionType:
        yield from _function_edges(holder, inherited)
    elif kind in METHODS:
        if is_bound(holder):
            yield ".__self__", holder.__self__
        if kind is types.MethodType:
            yield ".__func__", holder.__func__
    elif kind in (staticmethod, classmethod):
        yield ".__func__", holder.__func__
    elif kind is property:
        yield from ((f".{name}", getattr(holder, name)) for name in ("fget", "fset", "fdel"))
    elif kind is types.ModuleType:
        if not inherited and (is_only_here(holder.__name__) or not is_found_by_name(holder)):
            yield from _named(dict(vars(holder)))
    elif not is_importable(holder):
        yield from _named(dict(vars(holder)))
        yield from ((f".__bases__[{i}]", base) for i, base in enumerate(holder.__bases__))
    elif inherited and "__init__" in vars(holder):
        yield ".__init__", vars(holder)["__init__"]


def _function_edges(function: Any, inherited: bool) -> Iterator[Edge]:
    importable = is_importable(function)
    if importable and not inherited:
        return
    yield from ((f".<closure>.{name}", value) for name, value in closure_of(function).items())
    defaults = function.__defaults__ or ()
    names = function.__code__.co_varnames[: function.__code__.co_argcount][-len(defaults) :] if defaults else ()
    yield from ((f".<default>.{name}", value) for name, value in zip(names, defaults, strict=False))
    yield from ((f".<default>.{name}", value) for name, value in (function.__kwdefaults__ or {}).items())
    yield from _named(vars(function))
    for name in sorted(global_names(function.__code__)):
        # An importable function leads into its whole library, so only the objects that it names itself are followed.
        if name in function.__globals__ and (not importable or _is_object(function.__globals__[name])):
            yield f".<global>.{name}", function.__globals__[name]


def _element_edges(holder: Any, kind: type) -> Iterator[Edge]:
    # The builtin classes' own methods, because a subclass may have overridden them.
    if issubclass(kind, dict):
        yield from ((subscript(key), value) for key, value in dict.copy(holder).items())
        yield from (("<key>", key) for key in dict.keys(dict.copy(holder)) if type(key) not in _ATOMS)
    elif issubclass(kind, (list, tuple, collections.deque)):
        yield from ((f"[{i}]", value) for i, value in enumerate(_copied(holder, kind)))
    elif issubclass(kind, (set, frozenset)):
        yield from ((f"<element {i}>", value) for i, value in enumerate(_copied(holder, kind)))
    elif issubclass(kind, types.CellType):
        with contextlib.suppress(ValueError):  # a variable that has no value yet
            yield ".cell_contents", holder.cell_contents
    elif issubclass(kind, np.ndarray) and holder.dtype.hasobject:
        yield from ((f".flat[{i}]", value) for i, value in enumerate(np.ndarray.ravel(holder).tolist()))


def _copied(holder: Any, kind: type) -> list[Any]:
    """The elements, copied: another thread may change the container meanwhile."""
    base: Any = next(b for b in (list, tuple, set, frozenset, collections.deque) if issubclass(kind, b))
    return list(base.__iter__(holder))


def _is_object(value: Any) -> bool:
    return type(value) not in _CODE and not issubclass(type(value), type)


def _named(attributes: Mapping[str, Any]) -> Iterator[Edge]:
    return ((f".{name}", value) for name, value in attributes.items())
