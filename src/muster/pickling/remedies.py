"""The change that keeps an object from having to travel: one of three templates, with names filled in."""

from __future__ import annotations

import ast
import functools
import inspect
import re
import sys
import types
from dataclasses import dataclass
from typing import Any

from gymnasium.envs.registration import EnvSpec

from muster.introspection import module_name, public_name, type_name
from muster.pickling.kinds import Kind
from muster.pickling.main_module import MAIN_NAMES
from muster.pickling.user_call import MAKE_VEC, UserCall
from muster.pickling.walk import METHODS, Edge, is_importable

# They only lead to other objects.
_HOLDERS = (
    *(dict, list, tuple, set, frozenset, type(None), functools.partial, EnvSpec),
    *(types.FunctionType, *METHODS, types.CellType, staticmethod, classmethod, property),
)
_ASSIGNABLE_IN = (dict, list, functools.partial, EnvSpec)
_ASSIGNABLE = re.compile(r'[A-Za-z_]\w*(\[-?\w+\]|\["[^"\\\n]*"\]|\.keywords|\.kwargs)*')

_BUILD = "Build it in the worker instead"
_FUNCTION = "muster.lazy(function), with a function of a module that builds it"


@dataclass(frozen=True)
class Remedy:
    """The way out, in words and as code: lines joined by newlines, empty where the words say all."""

    lead: str
    code: str = ""


class Obstacle:
    """An object that cannot travel.

    trail: path and object from the user's argument to it.  kind: what is known about it.
    """

    def __init__(self, trail: list[Edge], kind: Kind | None) -> None:
        self.trail = trail
        self.kind = kind

    def argument(self) -> Edge:
        """The user's argument that holds the object, or its element where the argument is a list."""
        path, value = self.trail[0]
        return self.trail[type(value) in (list, tuple) and len(self.trail) > 1 and path.isidentifier()]

    def to_owner(self) -> list[Edge]:
        """The trail to the object to build in the worker: the outermost that is more than a container or a function.

        The object itself where a class on the way holds it, which has to travel, or where a function is called.
        """
        root_path, root = self.trail[0]
        at = next((i for i, (_, value) in enumerate(self.trail) if not _holds(value)), len(self.trail) - 1)
        owner = self.trail[at][1]
        is_called = owner is root and callable(root) and not _is_value(root_path)
        return self.trail if is_called or any(value is type(owner) for _, value in self.trail) else self.trail[: at + 1]


def remedy_for(one: Obstacle, call: UserCall = MAKE_VEC, *, running: bool = False) -> Remedy:
    """The remedy for an object that cannot travel. call: the user's.  running: its envs run already."""
    if one.kind is not None and one.kind.instead:
        return Remedy(one.kind.instead)
    trail = one.to_owner()
    builder, arguments = _builder_of(trail[-1][1], one.kind if len(trail) == len(one.trail) else None)
    value = f"muster.lazy({builder}{', ' * bool(arguments)}{arguments or ''})"
    lead, words = _BUILD, f"{_BUILD}: set {trail[-1][0]} to {_FUNCTION}"
    place = "" if running else _place(trail)
    if not place:
        name, (argument, held) = _argument_name(trail), one.argument()
        if callable(held) and not running:
            place, value, what = argument, f"functools.partial({argument}, {name}={value})", argument
        else:
            (place, value), what = call.argument(name, value), "the env"
        lead = f"{_BUILD}. Make {name} an argument of {what}, and hand it over"
        words = f"{lead} as {_FUNCTION}"
    if not builder:
        return Remedy(words)
    modules = _modules_in(value) | ({"gymnasium"} if type(trail[0][1]) is EnvSpec else set())
    lacks = "with its arguments, " if arguments is None else ""
    imports = [f"import {module}" for module in sorted(modules)]
    return Remedy(lead, "\n".join([*imports, f"{place} = {value}   # {lacks}before {call.name}"]))


def shown_type(value: Any) -> str:
    """The object's class, for messages. Classes of Muster's own are not named: users do not know them."""
    return "an object of Muster's" if _is_own(type(value)) else type_name(value)


def _holds(value: Any) -> bool:
    return type(value) in _HOLDERS or issubclass(type(value), type)


def _is_value(path: str) -> bool:
    return path.endswith('"]')


def _place(trail: list[Edge]) -> str:
    """The left side of an assignment to the end of the trail; empty where no assignment reaches that."""
    (root_path, root), (path, owner) = trail[0], trail[-1]
    if not _ASSIGNABLE.fullmatch(path) or any(type(value) not in _ASSIGNABLE_IN for _, value in trail[:-1]):
        return ""
    if owner is root and callable(root) and not _is_value(path):
        return ""
    return f'gymnasium.spec("{root.id}"){path.removeprefix(root_path)}' if type(root) is EnvSpec else path


def _argument_name(trail: list[Edge]) -> str:
    """The variable or key at the end of the trail, else the name of the object's class, in small letters.

    ``factory.<closure>.server`` and ``factory.keywords["server"]`` become ``server``.
    """
    path, owner = trail[-1]
    last = re.split(r"[.\[]", path)[-1].strip('"]')
    is_named = len(trail) > 1 or _is_value(path)
    if is_named and last.isidentifier() and not last.startswith("_"):
        return last
    return type(owner).__name__.lower().strip("_")


def _builder_of(value: Any, kind: Kind | None) -> tuple[str, str | None]:
    """The code of what builds an object like `value`, and of its arguments, see `Kind`."""
    made = type(value)
    if kind is not None:
        return kind.builder, kind.arguments
    if _holds(value) or _is_own(made):
        return "", None
    if module_name(made) in MAIN_NAMES:
        is_public = not any(part.startswith(("_", "<")) for part in made.__qualname__.split("."))
        name = made.__qualname__ if is_public else ""
    else:
        name = (is_importable(made) and public_name(made)) or ""
    try:
        return name, None if inspect.signature(made).parameters else ""
    except (TypeError, ValueError):  # of a class made by C code, the signature may not be known
        return name, None


def _is_own(kind: type) -> bool:
    return module_name(kind).partition(".")[0] == __name__.partition(".")[0]


def _modules_in(code: str) -> set[str]:
    named = (ast.unparse(node.value) for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Attribute))
    modules = {name for name in named if name in sys.modules}
    return {name for name in modules if not any(other.startswith(f"{name}.") for other in modules)}
