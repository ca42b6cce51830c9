"""What a script sets up at its top level for the modules that it imports, as its syntax tree shows.

Classes, functions and globals of a script travel to workers. What it assigns into other modules does not: a patched
class, an old name of NumPy's, an alias in ``sys.modules``, an entry in a library's registry.
"""

from __future__ import annotations

import ast
import functools
import os
import sys
import tokenize
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from muster.workers.script_names import Meaning, Names

# Not counted: workers have these as the caller has them, or they concern this process's terminal alone, or how fast and
# in which colours something is done.
_NOT_COUNTED = (
    *("os.environ", "sys.path", "sys.argv", "warnings.filters", "gymnasium.registry"),
    *("gymnasium.envs.registration.registry", "__main__"),
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
# Bounds for functions that call themselves, and for loops over many names.
_MOST_DEEP, _MOST_CALLS, _MOST_ELEMENTS = 12, 500, 8


@dataclass(frozen=True)
class Effect:
    """A statement that assigns into an imported module: its line and its code."""

    line: int
    code: str


@dataclass(frozen=True)
class ScriptTree:
    """The facts of one script. guarded: the lines that only the main program runs.

    effects: what its top level assigns into imported modules elsewhere, in order.  names: those that it binds there.
    """

    guarded: tuple[range, ...]
    effects: tuple[Effect, ...]
    names: frozenset[str]

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
    return ScriptTree(tuple(reader.guarded), effects, reader.names.bound())


def _shown(line: str) -> str:
    code = line.strip()
    return code if len(code) <= _SHOWN_CHARACTERS else code[: _SHOWN_CHARACTERS - 4] + " ..."


class _Reader:
    """Follows the statements that run where the script is not the main program. namespace: the script's globals.

    guarded, lines, names: see `ScriptTree`; lines are those of effects.
    """

    def __init__(self, namespace: Mapping[str, Any]) -> None:
        self.guarded: list[range] = []
        self.lines: list[int] = []
        self.names = Names(namespace)
        self._entered: set[tuple[Any, ...]] = set()
        self._depth = 0

    def read(self, body: Sequence[ast.AST]) -> None:
        for node in body:
            self._statement(node)

    def _statement(self, node: ast.AST) -> None:
        match node:
            case ast.Import(names):
                for alias in names:
                    name = alias.name if alias.asname else alias.name.partition(".")[0]
                    self.names.bind(alias.asname or name, name)
            case ast.ImportFrom(module, names):
                self.names.has_star |= any(alias.name == "*" for alias in names)
                for alias in names:
                    self.names.bind(alias.asname or alias.name, f"{module}.{alias.name}")
            case ast.FunctionDef():
                self._define(node, [*node.args.defaults, *(one for one in node.args.kw_defaults if one)])
            case ast.ClassDef():
                self._define(node, [*node.bases, *(one.value for one in node.keywords)])
            case ast.AsyncFunctionDef():
                self.names.bind(node.name)
            case ast.If(test, body, orelse) if (guards := _guards(test)) is not None:
                under, elsewhere = (body, orelse) if guards else (orelse, body)
                if under:
                    self.guarded.append(range(under[0].lineno, (under[-1].end_lineno or under[-1].lineno) + 1))
                self.read(elsewhere)
            case ast.Assign(targets, value):
                self._assign(targets, value)
            case ast.AnnAssign(target, _, value) if value is not None:
                self._assign([target], value)
            case ast.AugAssign(ast.Name() as target) if self._is_container(target):
                self._note(target, target)
                self._children(node)
            case ast.For(target, row):
                elements = self.names.meaning(row)
                self._children(node)  # with a name that stands for nothing
                for element in elements[:_MOST_ELEMENTS] if isinstance(elements, tuple) else ():
                    if element is not None:
                        self.names.bind_all(target, element)
                        self.read(node.body)
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
                self.names.bind(one.id)
            elif isinstance(one, ast.NamedExpr):
                self.names.bind(one.target.id, self.names.meaning(one.value))

    def _define(self, node: ast.FunctionDef | ast.ClassDef, parts: Sequence[ast.expr]) -> None:
        """Reads what a definition runs: `parts` of it, the body of a class, and decorators of the script."""
        self._expressions([*node.decorator_list, *parts])
        if isinstance(node, ast.ClassDef):
            with self.names.scope():
                self.read(node.body)
        self.names.bind(node.name, node)
        for decorator in reversed(node.decorator_list):
            self._enter(self.names.meaning(decorator), [node])

    def _assign(self, targets: Sequence[ast.expr], value: ast.expr) -> None:
        self._expressions([value])
        meaning = self.names.meaning(value)
        self._expressions(targets)
        for target in targets:
            self.names.bind_all(target, meaning)

    def _call(self, call: ast.Call) -> None:
        match call.func:
            case ast.Name("setattr" | "delattr") if call.args:
                self._note(call.args[0], call)
            case ast.Attribute(held, "start") if isinstance(patcher := self.names.meaning(held), ast.Call):
                for replaced in patcher.args[:1]:
                    self._note(replaced, call)
            case ast.Attribute(held, method) if method in _CHANGING and self._is_container(held):
                self._note(held, call)
            case function:
                given: list[Meaning] = self._receiver(function)
                for one in call.args:
                    if isinstance(one, ast.Starred):
                        row = self.names.meaning(one.value)
                        given += row if isinstance(row, tuple) else ()
                    else:
                        given.append(self.names.meaning(one))
                named = {one.arg: self.names.meaning(one.value) for one in call.keywords if one.arg}
                self._enter(self.names.meaning(function), given, named)

    def _receiver(self, function: ast.expr) -> list[Meaning]:
        """What a method of the script's own is called with by itself."""
        if not isinstance(function, ast.Attribute) or not isinstance(
            owner := self.names.meaning(function.value), ast.ClassDef
        ):
            return []
        method = self.names.method(owner, function.attr)
        kinds = {one.id for one in method.decorator_list if isinstance(one, ast.Name)} if method is not None else set()
        by_class = isinstance(function.value, ast.Name) and function.value.id == owner.name
        return [] if "staticmethod" in kinds or (by_class and "classmethod" not in kinds) else [owner]

    def _enter(self, callee: Meaning, given: Sequence[Meaning], named: Mapping[str, Meaning] | None = None) -> None:
        """Reads the body of a function of the script that its top level calls, once for the same arguments."""
        if isinstance(callee, ast.ClassDef):
            callee, given = self.names.method(callee, "__init__"), [callee, *given]
        if not isinstance(callee, (ast.FunctionDef, ast.Lambda)):
            return
        parameters = callee.args
        names = [one.arg for one in (*parameters.posonlyargs, *parameters.args)]
        passed: dict[str, Meaning] = dict.fromkeys(one.arg for one in parameters.kwonlyargs)
        with_default = zip(parameters.kwonlyargs, parameters.kw_defaults, strict=True)
        passed |= {one.arg: self.names.meaning(default) for one, default in with_default if default is not None}
        passed |= dict.fromkeys(names)
        passed |= zip(reversed(names), map(self.names.meaning, reversed(parameters.defaults)), strict=False)
        passed |= zip(names, given, strict=False)
        passed |= {name: meaning for name, meaning in (named or {}).items() if name in passed}
        if parameters.vararg is not None:
            passed[parameters.vararg.arg] = tuple(given[len(names) :])
        key = callee, tuple(passed.items())
        if key in self._entered or len(self._entered) >= _MOST_CALLS or self._depth >= _MOST_DEEP:
            return
        self._entered.add(key)
        self._depth += 1
        with self.names.scope():
            for name, meaning in passed.items():
                self.names.bind(name, meaning)
            if isinstance(callee, ast.Lambda):
                self._expressions([callee.body])
            else:
                self.read(callee.body)
        self._depth -= 1

    def _is_container(self, node: ast.expr) -> bool:
        return isinstance(self.names.value(node), _CONTAINERS)

    def _note(self, target: ast.expr, at: ast.expr) -> None:
        """Notes that `target` is changed; a patcher may name it in a string."""
        dotted = target.value if isinstance(target, ast.Constant) else self.names.dotted(target)
        if isinstance(dotted, str) and _counts(dotted):
            self.lines.append(at.lineno)


def _run_at_once(node: ast.expr) -> Iterator[ast.AST]:
    """The parts of an expression, inner ones first, without the bodies of functions in it."""
    if not isinstance(node, ast.Lambda):
        for child in ast.iter_child_nodes(node):
            yield from _run_at_once(child)  # type: ignore[arg-type]  # parts of expressions that are none are harmless
    yield node


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
