"""The objects that multiprocessing shares between processes, and how to make them so that workers can receive them."""

from __future__ import annotations

import ctypes
import sys
from typing import Any

from muster.introspection import attributes_of, module_name

MODULES = ("multiprocessing.synchronize", "multiprocessing.queues", "multiprocessing.sharedctypes")

_OTHERS = (
    ("multiprocessing.connection", "_ConnectionBase"),
    ("multiprocessing.managers", "BaseProxy"),
    ("multiprocessing.shared_memory", "SharedMemory"),
    ("multiprocessing.shared_memory", "ShareableList"),
)
C_DATA = ctypes.Structure.__mro__[1]

_CONTEXT = 'multiprocessing.get_context("forkserver")'
# Longer arrays are not written out.
_SHOWN_ELEMENTS = 8


def is_shared(value: Any) -> bool:
    """Whether `value` is one of these objects."""
    return any(module_name(base) in MODULES for base in type(value).__mro__)


def is_callers_own(value: Any) -> bool:
    """Whether a worker that receives `value` uses what this process uses: one of these objects, a pipe, memory, ..."""
    kind = type(value)
    if issubclass(kind, C_DATA):
        return "_wrapper" in attributes_of(value)  # a RawValue or RawArray, which lies in memory of multiprocessing
    return is_shared(value) or any((module_name(base), base.__name__) in _OTHERS for base in kind.__mro__)


def made_anew(value: Any) -> str:
    """The code that makes an object like `value` in a context that can start fresh processes.

    Objects of the fork context have no name by which another process could find them. The code is empty where it is not
    known how `value` was made.
    """
    base = next((base for base in type(value).__mro__ if module_name(base) in MODULES), None)
    if base is None:
        return ""
    try:
        arguments = _ARGUMENTS[base.__name__](value)
    except Exception:  # of a subclass, or of another Python, that keeps its state elsewhere
        return ""
    name = {"Synchronized": "Value", "SynchronizedArray": "Array", "SynchronizedString": "Array"}.get(base.__name__)
    return f"{_CONTEXT}.{name or base.__name__}({arguments})"


def _maxsize(queue: Any) -> str:
    most = sys.modules["multiprocessing.synchronize"].SEM_VALUE_MAX
    return "" if queue._maxsize == most else str(queue._maxsize)


def _typecode(kind: type) -> str:
    codes = sys.modules["multiprocessing.sharedctypes"].typecode_to_type
    return next(f'"{code}"' for code, known in codes.items() if known is kind)


def _number(value: Any) -> str:
    held = value.get_obj()
    return f"{_typecode(type(held))}, {held.value!r}"


def _array(value: Any) -> str:
    held = value.get_obj()
    elements = repr(list(held)) if len(held) <= _SHOWN_ELEMENTS else str(len(held))
    return f"{_typecode(held._type_)}, {elements}"


_ARGUMENTS = {
    "Queue": _maxsize,
    "JoinableQueue": _maxsize,
    "SimpleQueue": lambda value: "",
    "Lock": lambda value: "",
    "RLock": lambda value: "",
    "Event": lambda value: "",
    "Condition": lambda value: "",
    "Semaphore": lambda value: str(value._semlock._get_value()),
    "BoundedSemaphore": lambda value: str(value._semlock.maxvalue),
    "Barrier": lambda value: str(value._parties),
    "Synchronized": _number,
    "SynchronizedArray": _array,
    "SynchronizedString": _array,
}
