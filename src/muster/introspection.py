"""Looks at objects without running any of their code, and names what it sees for messages."""

from __future__ import annotations

import builtins
import contextlib
import dis
import functools
import sys
import types
from typing import Any

from muster.errors import RecipeError

# TorchRL's metaclasses stand between the user and the classes derived from TorchRL's, Gymnasium's `close` calls ours,
# and `torch.no_grad` the function that it decorates.
_NOT_THE_USERS = (__name__.partition(".")[0], "gymnasium", "torchrl", "torch", "abc")


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes of the instance itself, read without running a property."""
    descriptor = attribute_dict(type(value))
    return {} if descriptor is None else dict(descriptor.__get__(value))


def attribute_dict(kind: type) -> Any:
    """The descriptor of the attribute dict of the class's instances; None if instances have no such dict."""
    for base in kind.__mro__:
        descriptor = vars(base).get("__dict__")
        # A property of this name would be the class's own code.
        if type(descriptor) in (types.GetSetDescriptorType, types.MemberDescriptorType):
            return descriptor
    return None


def global_names(code: types.CodeType) -> set[str]:
    """The global names that ``code`` and the functions defined in it read."""
    names = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= global_names(constant)
    return names


def closure_of(function: Any) -> dict[str, Any]:
    """The variables of outer functions that a function uses, by their names, but for those without a value yet."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):
            found[name] = cell.cell_contents
    return found


def subscript(key: Any) -> str:
    """The subscript of an element in messages: ``["server"]``, ``[3]``; a key that is no plain value as its class."""
    if type(key) is str:
        return f'["{key}"]'
    return f"[{key!r}]" if type(key) in (int, float, bool, bytes, type(None)) else f"[<{type(key).__qualname__}>]"


def place_of(path: str, key: Any) -> str:
    """The path of an element of what `path` names; `key` itself, the name of an argument, where `path` is empty."""
    return path + subscript(key) if path else str(key)


def type_name(value: Any) -> str:
    """Module and name of the object's class; the name alone for a builtin."""
    return class_name(type(value))


def class_name(kind: type) -> str:
    """Module and name of a class; the name alone for a builtin."""
    module = module_name(kind)
    return kind.__qualname__ if module == "builtins" else f"{module}.{kind.__qualname__}"


def public_name(definition: Any) -> str | None:
    """Module and name for importing a class or function; None where only private names lead to it.

    Where its own module is private, that is a public one that has it, too: ``queue`` for ``_queue``,
    ``concurrent.futures`` for ``concurrent.futures._base``.
    """
    name, parts = definition.__qualname__, module_name(definition).split(".")
    if parts == ["builtins"]:
        return name if getattr(builtins, name, None) is definition else None
    packages = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    for module in (*packages, ".".join(part.lstrip("_") for part in parts)):
        found: Any = sys.modules.get(module)
        for part in name.split("."):
            found = vars(found).get(part) if isinstance(found, (type, types.ModuleType)) else None
        if found is definition and not any(part.startswith("_") for part in f"{module}.{name}".split(".")):
            return f"{module}.{name}"
    return None


def module_name(definition: Any) -> str:
    """The module of a class or function. Classes made by C code, as by SWIG, may have none: they count as builtins."""
    return getattr(definition, "__module__", None) or "builtins"


def callable_name(function: Any) -> str:
    """Module and name of a callable, ``"my_module.make_env"``; for an instance those of its class."""
    while type(function) is functools.partial:
        function = function.func
    named = function if isinstance(function, (type, types.FunctionType, types.MethodType)) else type(function)
    return f"{module_name(named)}.{named.__qualname__}"


def caller_stacklevel() -> int:
    """The ``stacklevel`` with which a warning of the calling function points at the user's line."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_USERS:
        level, frame = level + 1, frame.f_back
    return level


def find_in(module: types.ModuleType, name: str) -> Any:
    """The attribute `name` of `module`. Raises RecipeError, which lists the callables that `module` has."""
    found = getattr(module, name, None)
    if found is None:
        callables = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise RecipeError(f"module {module.__name__} has no {name!r}. It has: {', '.join(callables) or 'no callable'}")
    return found
