"""Modules that travel by their names, also where `sys.modules` does not list them.

PettingZoo loads ``from pettingzoo.sisl import multiwalker_v9`` itself, a new module for every such line.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
import types
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any


def is_found_by_name(module: types.ModuleType) -> bool:
    """Whether an import by the module's name gives this module, or another one from the same file. Imports nothing."""
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


def reduction_of(value: Any) -> tuple[Any, ...] | None:
    """The reduction that imports `value`; None where it is no module, or one for cloudpickle to pickle."""
    if type(value) is not types.ModuleType or sys.modules.get(value.__name__) is value:
        return None
    return (importlib.import_module, (value.__name__,)) if is_found_by_name(value) else None
