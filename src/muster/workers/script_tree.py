"""What a script sets up at its top level for the modules that it imports, as its syntax tree shows.

Classes, functions and globals of a script travel to workers. What it assigns into other modules does not: a patched
class, an old name of NumPy's, an alias in ``sys.modules``, an entry in a library's registry.
"""

from __future__ import annotations

import ast
import builtins
import functools
import os
import sys
import tokenize
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from muster.introspection import attributes_of

# Not counted: workers have these as the caller has them, or they concern this process's terminal alone, or how fast and
# in which colours something is done.
_NOT_COUNTED = (
    *("os.environ", "sys.path", "sys.argv", "warnings.filters", "gymnasium.registry"),
    "gymnasium.envs.registration.registry",
    *("sys.stdin", "sys.stdout", "sys.stderr", "sys.excepthook", "sys.displayhook", "sys.ps1", "sys.ps2"),
    *("sys.tracebacklimit", "sys.dont_write_bytecode", "torch.backends"),
)
_CONTAINERS = (dict, list, set, deque)
# Methods of containers that change them.
_CHANGING = (
    *("__setitem__", "__delitem__", "add", "append", "appendleft", "clear", "discard", "extend", "extendleft"),
    *("insert", "pop", "popitem", "popleft", "remove", "setdefault", "update"),
)
_SHOWN_CHARACTERS = 80


@dataclass(frozen=True)
class Effect:
    """A statement that assigns into an imported module: its line and its code."""

    line: int
    code: str


@dataclass(frozen=True)
class ScriptTree:
    """The facts of one script. guarded: the lines that only the main program runs.

    effects: what its top level assigns into imported modules elsewhere, in order.
    """

    guarded: tuple[range, ...]
    effects: tuple[Effect, ...]

    def may_run_again(self, line: int | None) -> bool:
        """Whether another process may run the script's top level for what was begun in `line`; None: not known where.

        It may where the script has a main guard, and the line stands under it: else that process would begin the same.
        """
        return bool(self.guarded) and (line is None or any(line in lines for lines in self.guarded))


def read_script(path: str) -> ScriptTree | None:
    """The tree of the script `path`, which this process runs as its main program; None where it cannot be read."""
    try:
        return _read(path, os.stat(path).st_mtime_ns)
    except (OSError, SyntaxError, ValueError, RecursionError):  # not a file, or no source
        return None


@functools.lru_cache(maxsize=8)
def _read(path: str, changed_ns: int) -> ScriptTree:
    with tokenize.open(path) as file:
        source = file.read()
    reader = _Reader(vars(sys.modules["__main__"]))
    reader.read(ast.parse(source).body)
    lines = source.splitlines()
    effects = tuple(Effect(line, _shown(lines[line - 1])) for line in dict.fromkeys(reader.lines))
    return ScriptTree(tuple(reader.guarded), effects)


def _shown(line: str) -> str:
    code = line.strip()
    return code if len(code) <= _SHOWN_CHARACTERS else code[: _SHOWN_CHARACTERS - 4] + " ..."


class _Reader:
    """Follows the statements that run where the script is not the main program. namespace: the script's globals.

    imported: by each name that is bound to a module, or to something in one, the dotted name of that.
    """

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        self.guarded: list[range] = []
        self.lines: list[int] = []
        self._namespace = namespace
        self._imported: dict[str, str] = {}
        self._bound: set[str] = set()
        self._has_star = False
        self._functions: dict[str, ast.FunctionDef] = {}
        self._entered: set[tuple[str, frozenset[tuple[str, str | None]]]] = set()

    def read(self, body: Sequence[ast.AST]) -> None:
        for node in body:
            self._statement(node)

    def _statement(self, node: ast.AST) -> None:
        match node:
            case ast.Import(names):
                for alias in names:
                    self._import(alias.asname or alias.name.partition(".")[0], alias.name if alias.asname else None)
            case ast.ImportFrom(module, names):
                self._has_star |= any(alias.name == "*" for alias in names)
                for alias in names:
                    self._import(alias.asname or alias.name, f"{module}.{alias.name}")
            case ast.FunctionDef():
                self._bind(node.name)
                self._functions[node.name] = node
                self._expressions([*node.decorator_list, *node.args.defaults])
            case ast.AsyncFunctionDef():
                self._bind(node.name)
            case ast.If(test, body, orelse) if (guards := _guards(test)) is not None:
                under, elsewhere = (body, orelse) if guards else (orelse, body)
                if under:
                    self.guarded.append(range(under[0].lineno, (under[-1].end_lineno or under[-1].lineno) + 1))
                self.read(elsewhere)
            case ast.Assign(targets, value):
                self._expressions([value, *targets])
                for target in targets:
                    self._assign(target, value)
            case ast.AnnAssign(target, _, value) if value is not None:
                self._expressions([value, target])
                self._assign(target, value)
            case ast.AugAssign(ast.Name() as target) if isinstance(self._value(target), _CONTAINERS):
                self._note(target, target)
                self._children(node)
            case ast.For(ast.Name(name), ast.Tuple(elements) | ast.List(elements)):
                self._children(node)
                for element in elements:  # its first run has read the body with a name that is bound to nothing
                    if (dotted := self._dotted(element)) is not None:
                        self._import(name, dotted)
                        self.read(node.body)
                        break
            case ast.ClassDef(name):
                self._bind(name)
                self._children(node)
            case _:
                self._children(node)

    def _children(self, node: ast.AST) -> None:
        """Reads the statements and the expressions in a compound statement, a handler or a case, in order."""
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                self._expressions([child])
            elif isinstance(child, ast.withitem):
                self._expressions([child.context_expr, *([child.optional_vars] if child.optional_vars else [])])
            else:
                self._statement(child)

    def _expressions(self, nodes: Sequence[ast.expr]) -> None:
        for one in (part for node in nodes for part in _run_at_once(node)):
            if isinstance(one, ast.Call):
                self._call(one)
            elif isinstance(one, (ast.Attribute, ast.Subscript)) and not isinstance(one.ctx, ast.Load):
                self._note(one, one)
            elif isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store):
                self._bind(one.id)

    def _call(self, call: ast.Call) -> None:
        match call.func:
            case ast.Name("setattr" | "delattr") if call.args:
                self._note(call.args[0], call)
            case ast.Name(name) if name in self._functions:
                self._enter(self._functions[name], call)
            case ast.Attribute(held, method) if method in _CHANGING and isinstance(self._value(held), _CONTAINERS):
                self._note(held, call)

    def _enter(self, function: ast.FunctionDef, call: ast.Call) -> None:
        """Reads the body of a function of the script that its top level calls, once for the same arguments."""
        arguments = function.args
        names = [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        values = dict(zip(names, call.args, strict=False)) | {one.arg: one.value for one in call.keywords if one.arg}
        passed = {name: self._dotted(value) for name, value in values.items()}
        if (key := (function.name, frozenset(passed.items()))) in self._entered:
            return
        self._entered.add(key)
        imported, bound = dict(self._imported), set(self._bound)
        for name in names:
            self._bind(name)
        for name, dotted in passed.items():
            if dotted is not None:
                self._import(name, dotted)
        self.read(function.body)
        self._imported, self._bound = imported, bound

    def _import(self, name: str, dotted: str | None) -> None:
        self._imported[name] = dotted or name
        self._bound.add(name)

    def _bind(self, name: str) -> None:
        self._imported.pop(name, None)
        self._bound.add(name)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        """Notes where a name becomes another name of something imported: ``Robot = robotlib.Robot``."""
        if isinstance(target, ast.Name) and (dotted := self._dotted(value)) is not None:
            self._import(target.id, dotted)

    def _note(self, target: ast.expr, at: ast.expr) -> None:
        dotted = self._dotted(target)
        if dotted is not None and _counts(dotted):
            self.lines.append(at.lineno)

    def _dotted(self, node: ast.expr) -> str | None:
        """The dotted name of an attribute or element of something imported; None for anything else."""
        match node:
            case ast.Name(name) if name in self._imported:
                return self._imported[name]
            case ast.Name(name) if self._has_star and name not in self._bound and not hasattr(builtins, name):
                return f"*.{name}"
            case ast.Attribute(held, name):
                dotted = self._dotted(held)
                return None if dotted is None else f"{dotted}.{name}"
            case ast.Subscript(held):
                return self._dotted(held)
            case ast.Call(ast.Name("getattr" | "vars"), [held, *_]):
                return self._dotted(held)
            case ast.Call(function, [ast.Constant(str() as name), *_]) if self._imports(function):
                return name
        return None

    def _imports(self, function: ast.expr) -> bool:
        if isinstance(function, ast.Name) and function.id == "__import__":
            return True
        return self._dotted(function) == "importlib.import_module"

    def _value(self, node: ast.expr) -> Any:
        """The object that an expression names now, found without running code of it; None where that is not known."""
        match node:
            case ast.Name(name) if name in self._imported:
                return self._namespace.get(name, sys.modules.get(self._imported[name]))
            case ast.Name(name):
                return self._namespace.get(name)
            case ast.Attribute(held, name):
                value = self._value(held)
                if isinstance(value, type):
                    return next((vars(base)[name] for base in value.__mro__ if name in vars(base)), None)
                return attributes_of(value).get(name)
            case ast.Subscript(held, ast.Constant(key)):
                value = self._value(held)
                return value.get(key) if type(value) is dict else None
        return None


def _run_at_once(node: ast.expr) -> Iterator[ast.AST]:
    """The parts of an expression, without the bodies of functions in it."""
    yield node
    if not isinstance(node, ast.Lambda):
        for child in ast.iter_child_nodes(node):
            yield from _run_at_once(child)  # type: ignore[arg-type]  # parts of expressions that are none are harmless


def _guards(test: ast.expr) -> bool | None:
    """Whether a condition is true in the main program alone; False: everywhere else; None: it does not ask for that."""
    match test:
        case ast.BoolOp(ast.And(), values):
            return True if any(_guards(one) for one in values) else None
        case ast.Compare(ast.Name("__name__"), [comparison], [ast.Constant("__main__")]) | ast.Compare(
            ast.Constant("__main__"), [comparison], [ast.Name("__name__")]
        ):
            return {ast.Eq: True, ast.NotEq: False}.get(type(comparison))
    return None


def _counts(dotted: str) -> bool:
    if dotted.startswith("matplotlib.") and "rcParams" in dotted.split("."):
        return False
    return not any(dotted == one or dotted.startswith(f"{one}.") for one in _NOT_COUNTED)
