"""Envs of known libraries: they share nothing with others in their process, and their code is no stranger's.

Several may be stepped in one process, and a run folder may name them.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from gymnasium.envs.registration import EnvSpec

from muster.introspection import module_name
from muster.recipes.gymnasium_ids import MakeGym, module_of
from muster.recipes.named import split_name
from muster.recipes.recipe import Recipe

_PACKAGES = ("gymnasium", "ale_py", "pettingzoo", "mpe2", "minigrid", "dm_control", "meltingpot", "muster")
_RUNNING = ("gymnasium", "muster")  # imported here already, from wherever
# Wraps many libraries for Gymnasium; each has a namespace of ids.
_BRIDGE, _BRIDGED = "shimmy", "dm_control"


class OfKnownLibrary:
    """A base for Muster's own factories of envs of these libraries: none of their arguments changes the code."""


def is_known(recipe: Recipe) -> bool:
    """Returns whether the recipe makes an env of an id, with code and wrappers of known libraries alone.

    A factory may do anything, and is never known: not even one that calls ``gymnasium.make`` with such an id.
    """
    return _makes_known(recipe.factory) and all(map(_is_of_known, recipe.wrappers))


def is_of_known_library(path: str) -> bool:
    """Returns whether ``package.module``, or ``package.module:Id-v0``, is of one of these libraries."""
    return _package(path) in _PACKAGES


def not_installed(env_id: str) -> str:
    """The package of a known library that an id needs, where no installed distribution has what an import would find.

    Editable distributions are installed, too. Empty where all is well, and for ids that are registered here.
    """
    with installed_alone():
        package = _package(split_name(env_id)[0] or module_of(env_id))
        return package if package not in ("", *_RUNNING) and not _is_installed(package) else ""


@contextmanager
def installed_alone() -> Iterator[None]:
    """Keeps imports out of the working directory, in this process and in workers that start meanwhile.

    A known library that is installed from there as editable is found all the same.
    """
    before = list(sys.path)
    kept = [entry for entry in before if not _is_here(entry)]
    sys.path[:] = kept
    if kept != before and any(map(Path.cwd().is_relative_to, filter(None, map(_editable, metadata.distributions())))):
        kept.append(os.getcwd())
    sys.path[:] = kept
    try:
        yield
    finally:
        sys.path[:] = [*before, *(entry for entry in sys.path if entry not in kept)]


def _is_here(entry: Any) -> bool:
    try:
        return os.path.samefile(os.fsdecode(entry) or ".", ".")
    except OSError:
        return False


def _is_installed(package: str) -> bool:
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # of a module that was put into sys.modules and has no spec
        return False
    if spec is None or spec.origin is None:
        return False
    origin = Path(spec.origin).resolve()
    for one in metadata.distributions():
        folder, listed = Path(str(one.locate_file(""))).resolve(), one.read_text("RECORD")
        if origin.is_relative_to(folder):
            names = (one.read_text("top_level.txt") or "").split()  # Debian's have no list of files
            file = origin.relative_to(folder).as_posix()
            if package in names if listed is None else f"\n{file}," in f"\n{listed}":
                return True
        if (root := _editable(one)) is not None and origin.is_relative_to(root):
            return True
    return False


def _editable(distribution: metadata.Distribution) -> Path | None:
    """The folder from which a known library is installed as editable; None for other distributions.

    Another's folder may be where the user works, and where strangers' files lie.
    """
    with suppress(ValueError, AttributeError, KeyError):  # of a file that somebody else has written
        url = json.loads(distribution.read_text("direct_url.json") or "{}")
        name = distribution.name.lower().replace("-", "_").removeprefix("dm_")
        if url.get("dir_info", {}).get("editable") and {name, f"dm_{name}"} & {*_PACKAGES, _BRIDGE}:
            return Path(url2pathname(urlsplit(url["url"]).path)).resolve()
    return None


def advise_apart(recipes: Sequence[Recipe]) -> str:
    """The sentence that says how each of several envs in one process gets its own; empty where that cannot help."""
    if len(recipes) < 2 or all(map(is_known, recipes)):
        return ""
    one_each = recipes[0].call.one_each
    return f"If a library behind the envs works only once in a process, give each env its own: {one_each}."


def _makes_known(factory: Callable[..., Any]) -> bool:
    if type(factory) is not MakeGym:
        return isinstance(factory, OfKnownLibrary)
    target = factory.target
    if isinstance(target, str):  # an id of a module that only the worker imports
        return _package(target) in _PACKAGES
    return (
        _entry_is_known(target.entry_point, target)
        and all(_entry_is_known(one.entry_point) and _are_known(one.kwargs or {}) for one in target.additional_wrappers)
        and all(_is_of_known(wrapper) and _are_known(kwargs) for wrapper, kwargs in factory.late_wrappers)
    )


def _entry_is_known(entry_point: Any, spec: EnvSpec | None = None) -> bool:
    package = _package(entry_point) if isinstance(entry_point, str) else _package_of(entry_point)
    return package in _PACKAGES or (package == _BRIDGE and spec is not None and spec.namespace == _BRIDGED)


def _are_known(kwargs: Mapping[str, Any]) -> bool:
    return all(_is_of_known(value) for value in kwargs.values() if callable(value))


def _is_of_known(function: Any) -> bool:
    if type(function) is functools.partial:
        functions = (function.func, *function.args, *function.keywords.values())
        return all(_is_of_known(one) for one in functions if callable(one))
    return _package_of(function) in _PACKAGES


def _package_of(function: Any) -> str:
    if isinstance(function, types.FunctionType):  # what functools.wraps has copied names another function's module
        return _package(str(function.__globals__.get("__name__", "")))
    code = isinstance(function, (type, types.BuiltinFunctionType))
    return _package(module_name(function if code else type(function)))


def _package(path: str) -> str:
    return path.partition(":")[0].partition(".")[0]
