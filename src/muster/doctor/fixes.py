"""Changes to a `make_vec` call by which envs run at once: each has its own port, file or folder, or they take turns."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gymnasium.envs.registration import _find_spec, load_env_creator

from muster.doctor.held import PORTS, Held
from muster.lazy_values import Lazy
from muster.recipes.gymnasium_ids import MakeGym
from muster.recipes.recipe import Recipe

_MOST_FIXES = 4
# One server may listen on so many ports above that which it is given.
_PORTS_OF_ONE = 10
_OF_THE_SYSTEM = ("PWD", "OLDPWD", "TMPDIR", "HOME")
_INDEX = "muster.get_worker_info().unique_index"


@dataclass(frozen=True)
class Fix:
    """Changes to a `make_vec` call that keep envs out of each other's way, as code.

    arguments: of the env, by name.  variables: of each worker's environment, by name; `i` is the worker.
    in_turns: whether one is built after the other.
    """

    arguments: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    in_turns: bool = False

    def __str__(self) -> str:
        arguments = ", ".join(f"{name!r}: {code}" for name, code in self.arguments.items())
        shown = [f"env_kwargs={{{arguments}}}"] * bool(arguments) + self.options()
        return f"muster.make_vec(..., {', '.join(shown)})"

    def options(self) -> list[str]:
        """Its options of `make_vec`, without the env's arguments."""
        variables = ", ".join(f'"{name}": {code}' for name, code in self.variables.items())
        turns = ["max_concurrent_starts=1"] * self.in_turns
        return [f"worker_env=lambda i: {{{variables}}}"] * bool(variables) + turns

    def apply(self, recipe: Recipe) -> tuple[Recipe, dict[str, Any]]:
        """The recipe with its arguments, and its options of `make_vec`, as values."""
        known = {"muster": sys.modules["muster"], "tempfile": tempfile, "__name__": "__main__"}
        values = {name: eval(code, dict(known)) for name, code in self.arguments.items()}
        return replace(recipe, kwargs={**recipe.kwargs, **values}), eval(f"dict({', '.join(self.options())})", known)


NO_FIX, TURNS = Fix(), Fix(in_turns=True)


def arguments_of(recipe: Recipe) -> dict[str, int | str]:
    """The env's arguments that are numbers, text or paths: defaults, those of a spec, and those that the user gives.

    Imports the module of an id.
    """
    entry_point: Any = recipe.factory
    given = recipe.kwargs
    if isinstance(entry_point, MakeGym):
        spec = _find_spec(entry_point.target) if isinstance(entry_point.target, str) else entry_point.target
        entry_point, given = spec.entry_point, {**spec.kwargs, **given}
    if isinstance(entry_point, str):
        entry_point = load_env_creator(entry_point)
    defaults: dict[str, Any] = {}
    with contextlib.suppress(TypeError, ValueError):  # builtins without a signature
        defaults = {one.name: one.default for one in inspect.signature(entry_point).parameters.values()}
    every: dict[str, Any] = {**defaults, **given}
    paths = {name for name, one in every.items() if type(one) is not Lazy and isinstance(one, os.PathLike)}
    plain = {name: os.fspath(one) if name in paths else one for name, one in every.items()}
    return {name: value for name, value in plain.items() if type(value) in (int, str)}


def fixes_for(
    wanted: Sequence[Held], arguments: Mapping[str, int | str], arguments_alone: bool
) -> Iterator[tuple[Fix, list[Held]]]:
    """Fixes to try, those of arguments first, each with what it is to give each env of its own."""
    ports = {kind: [int(one.name) for one in wanted if one.kind == kind] for kind in PORTS}
    ways = {one: list(_ways(one, ports.get(one.kind, ()), arguments, arguments_alone)) for one in wanted}
    fixable = {one: found for one, found in ways.items() if found}
    for turn in range(min(_MOST_FIXES, max(map(len, fixable.values()), default=0))):
        chosen = [found[min(turn, len(found) - 1)] for found in fixable.values()]
        kinds = ({name: code for of, name, code in chosen if of == kind} for kind in ("argument", "variable"))
        yield Fix(next(kinds), next(kinds)), list(fixable)


def _ways(
    one: Held, ports: Sequence[int], arguments: Mapping[str, int | str], arguments_alone: bool
) -> Iterator[tuple[str, str, str]]:
    """Ways to give each env its own: "argument" or "variable", with its name and code."""
    for name, value in arguments.items():
        if (code := _code(one, value, ports, _INDEX)) is not None:
            is_folder = one.kind not in PORTS and os.path.isdir(value)
            yield "argument", name, f"muster.lazy({'tempfile.mkdtemp' if is_folder else f'lambda: {code}'})"
    if arguments_alone:
        return
    for name, text in os.environ.items():
        if name not in _OF_THE_SYSTEM and (code := _code(one, text, ports, "i")) is not None:
            yield "variable", name, code
    if one.name.startswith("/") and one.kind != "device":
        for name, folder in (("TMPDIR", tempfile.gettempdir()), ("HOME", os.path.expanduser("~"))):
            if one.name.startswith(f"{folder.rstrip('/')}/"):
                yield "variable", name, "tempfile.mkdtemp()"


def _code(one: Held, value: int | str, ports: Sequence[int], index: str) -> str | None:
    """Code that gives each env another value like that of an argument; None where that does not name the thing.

    ports: all of its kind that both want.  index: code for the env's.
    """
    if one.kind in PORTS:
        return _code_of_port(int(one.name), value, ports, index)
    if isinstance(value, int) or len(value) < 2:
        return None
    path, whole = one.name.lstrip("@"), os.path.abspath(value)
    # The journal of a database begins with its name.
    if not path.startswith(whole) and value.lstrip("/") not in os.path.basename(path):
        return None
    root, suffix = os.path.splitext(value)
    number = re.search(r"\d+$", root) if one.kind == "device" else None
    if number is not None:  # the next one of its kind
        return _f_string(root[: number.start()], f"{int(number[0])} + {index}".removeprefix("0 + "), suffix)
    return _f_string(f"{root}-", index, suffix)


def _code_of_port(port: int, value: int | str, ports: Sequence[int], index: str) -> str | None:
    for number in re.finditer(r"\d+", text := str(value)):
        first = int(number[0])
        if 0 <= port - first <= _PORTS_OF_ONE:
            apart = 1 + max(one - first for one in ports if one - first <= _PORTS_OF_ONE)
            code = f"{first} + {index}" if apart == 1 else f"{first} + {apart} * {index}"
            return code if isinstance(value, int) else _f_string(text[: number.start()], code, text[number.end() :])
    return None


def _f_string(before: str, code: str, after: str) -> str:
    before, after = (
        json.dumps(text, ensure_ascii=False)[1:-1].replace("{", "{{").replace("}", "}}") for text in (before, after)
    )
    return f'f"{before}{{{code}}}{after}"'
