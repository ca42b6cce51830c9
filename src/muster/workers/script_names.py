"""What the names of a script stand for, as far as its syntax tree shows, and what they name in this process."""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import sys
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from muster.introspection import attributes_of

# Replace something until they are stopped, from their `start` on.
_PATCHERS = ("mock.patch", "mock.patch.dict", "mock.patch.multiple", "mock.patch.object")

Meaning: TypeAlias = "str | ast.ClassDef | ast.FunctionDef | ast.Lambda | ast.Call | tuple[Meaning, ...] | None"
"""What an expression stands for: something imported, by its dotted name; a class of the script, or an object of it; a
function of the script; a call that makes a patcher; or some of these in a row. None: anything else."""


class Names:
    """The names that are bound where a script is being read. namespace: the script's globals."""

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        self.has_star = False
        self._namespace = namespace
        self._meanings: dict[str, Meaning] = {}

    @contextlib.contextmanager
    def scope(self) -> Iterator[None]:
        """Names that are bound in it stand for what they did before, afterwards."""
        before = dict(self._meanings)
        yield
        self._meanings = before

    def bound(self) -> frozenset[str]:
        """All names that are bound now."""
        return frozenset(self._meanings)

    def bind(self, name: str, meaning: Meaning = None) -> None:
        self._meanings[name] = meaning

    def bind_all(self, target: ast.expr, meaning: Meaning) -> None:
        """Binds a name, or the names of a tuple: ``robot, arm = robotlib.Robot, robotlib.Arm``."""
        match target, meaning:
            case ast.Name(name), _:
                self.bind(name, meaning)
            case ((ast.Tuple(targets) | ast.List(targets)), tuple()) if len(targets) == len(meaning):
                for one, its_meaning in zip(targets, meaning, strict=True):
                    self.bind_all(one, its_meaning)

    def meaning(self, node: ast.expr) -> Meaning:
        """What an expression stands for, see `Meaning`."""
        if (dotted := self.dotted(node)) is not None:
            return dotted
        match node:
            case ast.Name(name):
                return self._meanings.get(name)
            case ast.Lambda():
                return node
            case ast.NamedExpr(_, value):
                return self.meaning(value)
            case ast.Tuple(elements) | ast.List(elements) | ast.Set(elements):
                row = tuple(self.meaning(one) for one in elements)
                return row if any(one is not None for one in row) else None
            case ast.Call(function):
                if (self.dotted(function) or "").removeprefix("unittest.") in _PATCHERS:
                    return node
                made = self.meaning(function)
                return made if isinstance(made, ast.ClassDef) else None
            case ast.Attribute(held, name) if isinstance(owner := self.meaning(held), ast.ClassDef):
                return self.method(owner, name)
        return None

    def method(self, owner: ast.ClassDef, name: str) -> ast.FunctionDef | None:
        """The method of a class of the script, or of those that it derives from; None where they have none."""
        owners = [owner]
        for one in owners:
            for part in one.body:
                if isinstance(part, ast.FunctionDef) and part.name == name:
                    return part
            bases = map(self.meaning, one.bases)
            owners += [base for base in bases if isinstance(base, ast.ClassDef) and base not in owners]
        return None

    def dotted(self, node: ast.expr) -> str | None:
        """The dotted name of an attribute or element of something imported; None for anything else."""
        match node:
            case ast.Name(name) if isinstance(meaning := self._meanings.get(name), str):
                return meaning
            case ast.Name(name) if self.has_star and name not in self._meanings and not hasattr(builtins, name):
                return f"*.{name}"
            case ast.Attribute(held, name):
                dotted = self.dotted(held)
                return None if dotted is None else f"{dotted}.{name}"
            case ast.Subscript(held) | ast.NamedExpr(_, held) | ast.Call(ast.Name("getattr" | "vars"), [held, *_]):
                return self.dotted(held)
            case ast.Call(function, [ast.Constant(str() as name), *_]) if self._imports(function):
                return name
        return None

    def _imports(self, function: ast.expr) -> bool:
        if isinstance(function, ast.Name) and function.id == "__import__":
            return True
        return self.dotted(function) == "importlib.import_module"

    def value(self, node: ast.expr) -> Any:
        """The object that an expression names now, found without running code of it; None where that is not known."""
        match node:
            case ast.Name(name):
                if name not in self._namespace and isinstance(meaning := self._meanings.get(name), str):
                    return _found(meaning)
                return self._namespace.get(name)
            case ast.Attribute(held, "__dict__") | ast.Call(ast.Name("vars"), [held]):
                return attributes_of(self.value(held))
            case ast.Attribute(held, name):
                return _attribute(self.value(held), name)
            case ast.Subscript(held, ast.Constant(key)):
                value = self.value(held)
                return value.get(key) if type(value) is dict else None
        return None


def _found(dotted: str) -> Any:
    """The object of that dotted name."""
    parts = dotted.split(".")
    modules = [n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in sys.modules]
    if not modules:
        return None
    return functools.reduce(_attribute, parts[modules[0] :], sys.modules[".".join(parts[: modules[0]])])


def _attribute(value: Any, name: str) -> Any:
    if isinstance(value, type):
        return next((vars(base)[name] for base in value.__mro__ if name in vars(base)), None)
    return attributes_of(value).get(name)
