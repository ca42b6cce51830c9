"""Code for remedies, in the names of the user's own scope: values written out, functions with one more parameter."""

from __future__ import annotations

import ast
import builtins
import functools
import itertools
import linecache
import sys
import types
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from muster.introspection import class_name, is_users, public_name
from muster.lazy_values import Lazy
from muster.pickling.walk import Edge, is_bound, is_importable

_SCALARS = (type(None), bool, int, float, complex, str, bytes)
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType)
_MOST_CHARACTERS = 200
_MOST_ITEMS = 20
_ALIASES = {"np": "numpy"}
_PARTS_OF_CLASSES = (types.FunctionType, staticmethod, classmethod, property)
AS_IT_IS = "  # its body stays as it is"


class Scope(dict[str, Any]):
    """The variables that some code sees. code: its qualified name."""

    def __init__(self, variables: Mapping[str, Any], code: str) -> None:
        super().__init__(variables)
        self.code = code


def user_scope() -> Scope:
    """The scope of the user's innermost code."""
    frame = sys._getframe(1)
    while not is_users(frame) and frame.f_back is not None:
        frame = frame.f_back
    return Scope({**frame.f_globals, **frame.f_locals}, frame.f_code.co_qualname)


class Writer:
    """Writes values as code. scope: see `user_scope`.

    built: by the id of each object that cannot travel, the code in its place.  trails: the ways to these objects.
    """

    def __init__(self, scope: Mapping[str, Any], built: Mapping[int, str], trails: Sequence[Sequence[Edge]]) -> None:
        self._scope = scope
        self._built = built
        self._trails = trails
        self._on_trails = {id(value) for trail in trails for _, value in trail}
        self.definitions: list[str] = []  # lines that have to be changed in the user's code

    def write(self, value: Any) -> str | None:
        """The code for `value`; None where it is not known."""
        if id(value) in self._built:
            return self._built[id(value)]
        if id(value) not in self._on_trails and (name := self.variable(value)) is not None:
            return name
        kind = type(value)
        if kind in _SCALARS:
            return repr(value) if len(repr(value)) <= _MOST_CHARACTERS else None
        if kind in (list, tuple, dict) and len(value) > _MOST_ITEMS:
            return None
        if kind in (list, tuple):
            items = self._all([self.write(item) for item in value])
            if items is None:
                return None
            return f"[{', '.join(items)}]" if kind is list else f"({', '.join(items)}{',' * (len(items) == 1)})"
        if kind is dict:
            keys, values = self._all(map(self.write, value)), self._all(map(self.write, value.values()))
            if keys is None or values is None:
                return None
            return f"{{{', '.join(f'{key}: {one}' for key, one in zip(keys, values, strict=True))}}}"
        if kind is functools.partial:
            return self._call("functools.partial", value.func, value.args, value.keywords)
        if kind is Lazy:
            return self._call("muster.lazy", value.fn, value.args, value.kwargs)
        if is_bound(value):
            owner = self.write(value.__self__)
            call = f"lambda *args, owner, **kwargs: owner.{value.__name__}(*args, **kwargs)"
            return None if owner is None else f"functools.partial({call}, owner={owner})"
        return self._function(value) if isinstance(value, (type, *_FUNCTIONS)) else None

    def name_of(self, definition: Any) -> str:
        """The name of a class or function in the user's code: with its module, if it can be imported from there."""
        if (name := self.variable(definition)) is not None:
            return name
        if not is_importable(definition):
            return str(definition.__name__)
        parts = (public_name(definition) or class_name(definition)).split(".")
        for count in range(len(parts) - 1, 0, -1):  # by what the user has imported, as np.random.Generator
            module = ".".join(parts[:count])
            for name in (parts[count - 1], *(alias for alias, known in _ALIASES.items() if known == module)):
                if self._scope.get(name, self) is sys.modules.get(module):
                    return ".".join([name, *parts[count:]])
        return ".".join(parts)

    def variable(self, value: Any) -> str | None:
        """The user's variable for `value`; None where there is none.

        What can be imported has its own name: another variable, such as a loop's, may mean something else by then.
        """
        if type(value) in _SCALARS:
            return None
        names = [name for name, known in self._scope.items() if known is value and name.isidentifier()]
        own = next((name for name in names if name == getattr(value, "__name__", None)), None)
        if own is not None:
            return own
        is_code = isinstance(value, (type, *_FUNCTIONS))
        return None if is_code and not is_bound(value) and is_importable(value) else next(iter(names), None)

    @staticmethod
    def _all(written: Any) -> list[str] | None:
        parts = list(written)
        return None if any(part is None for part in parts) else parts

    def _call(self, function: str, *called: Any) -> str | None:
        first, args, kwargs = called
        written = self._all(map(self.write, (first, *args, *kwargs.values())))
        if written is None:
            return None
        names = [""] * (1 + len(args)) + [f"{key}=" for key in kwargs]
        return f"{function}({', '.join(name + code for name, code in zip(names, written, strict=True))})"

    def _function(self, value: Any) -> str | None:
        if id(value) not in self._on_trails and (is_importable(value) or isinstance(value, type)):
            return self.name_of(value)
        if isinstance(value, type):
            return self._class(value)
        if type(value) is not types.FunctionType:
            return None
        if id(value) not in self._on_trails:
            as_it_is = with_parameters(value, ())
            return None if as_it_is is None else as_it_is[1]
        held = self._held_by(value)
        arguments = {name: self.write(one) for name, one in held.items()}
        if not held or None in arguments.values():
            return None
        written = with_parameters(value, held)
        if written is None:
            return None
        definition, name = written
        return self._with_arguments(definition, name, arguments)

    def _class(self, kind: type) -> str | None:
        """A function that makes an instance, with the class in it, for a class that holds one of the objects."""
        head = class_head(kind)
        held = self._held_by_class(kind)
        if head is None or held is None:
            return None
        arguments = {name: self.write(one) for name, one in held.items()}
        if None in arguments.values():
            return None
        name = f"make_{kind.__name__.strip('_').lower()}"
        parameters = ", ".join(["*args", *held, "**kwargs"])
        definition = f"def {name}({parameters}):\n    {head} {AS_IT_IS}\n    return {kind.__name__}(*args, **kwargs)"
        return self._with_arguments(definition, name, arguments)

    def _with_arguments(self, definition: str, name: str, arguments: Mapping[str, str | None]) -> str:
        if definition and definition not in self.definitions:
            self.definitions.append(definition)
        written = "".join(f", {key}={code}" for key, code in arguments.items())
        return f"functools.partial({name}{written})" if written else name

    def _held_by_class(self, kind: type) -> dict[str, Any] | None:
        """What the class's body takes from around it that leads to one of the objects, by its name there.

        What the body makes itself is not among it. None where it is held by a base class.
        """
        held = {}
        for trail in self._trails:
            at = next((i for i, (_, value) in enumerate(trail) if value is kind), None)
            if at is None:
                continue
            for (path, _), (longer, one) in itertools.pairwise(trail[at:]):
                part = longer[len(path) :]
                if part.startswith(".__bases__"):
                    return None
                if type(one) in _PARTS_OF_CLASSES:
                    continue
                if part.startswith((".<closure>.", ".<global>.")):
                    held[part.rpartition(".")[2]] = one
                elif (name := self.variable(one)) is not None:  # an attribute, or the default value of an argument
                    held[name] = one
                break
        return held

    def _held_by(self, function: Any) -> dict[str, Any]:
        """What the function takes from around it that leads to one of the objects, by its name there."""
        held = {}
        for trail in self._trails:
            for (path, value), (longer, one) in itertools.pairwise(trail):
                if value is not function:
                    continue
                part = longer[len(path) :]
                held[parameter_of(function, part) or part.rpartition(".")[2]] = one
        return held


def parameter_of(function: Any, part: str) -> str:
    """The parameter of `function` whose default value is at ``.<default>[0]``; empty where `part` is another place."""
    if type(function) is not types.FunctionType or not part.startswith(".<default>["):
        return ""
    positional = function.__code__.co_varnames[: function.__code__.co_argcount]
    return positional[len(positional) - len(function.__defaults__ or ()) + int(part[len(".<default>[") : -1])]


def with_parameters(function: Any, names: Collection[str]) -> tuple[str, str] | None:
    """A function's code with `names` as keyword parameters: its new first line and its name; a lambda whole, with "".

    None where its source is not known.
    """
    node = _source_of(function)
    if node is None:
        return None
    arguments = node.args
    given = arguments.posonlyargs + arguments.args
    without_default = len(given) - len(arguments.defaults)
    defaults = dict(zip((one.arg for one in given[without_default:]), arguments.defaults, strict=True))
    arguments.args = [one for one in arguments.args if one.arg not in names]
    arguments.defaults = [default for name, default in defaults.items() if name not in names]
    kept = [
        (one, default)
        for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if one.arg not in names
    ]
    arguments.kwonlyargs = [one for one, _ in kept] + [ast.arg(name) for name in names]
    arguments.kw_defaults = [default for _, default in kept] + [None] * len(names)
    if isinstance(node, ast.Lambda):
        code = ast.unparse(node)
        return None if "\n" in code or len(code) > _MOST_CHARACTERS else ("", code)
    return f"def {node.name}({ast.unparse(arguments)}): {AS_IT_IS}", node.name


def _source_of(function: Any) -> ast.Lambda | ast.FunctionDef | None:
    """A fresh syntax tree of the function, found by its place in its file."""
    code = function.__code__
    lines = linecache.getlines(code.co_filename, function.__globals__)
    try:
        tree = ast.parse("".join(lines))
    except (SyntaxError, ValueError):
        return None
    # The smallest node that holds all of the code; columns distinguish the lambdas of one line.
    places = [
        (line, column)
        for line, _, column, end in code.co_positions()
        if line is not None and column is not None and end
    ]
    found: list[ast.Lambda | ast.FunctionDef] = []
    for node in ast.walk(tree):
        start: Any
        end: Any
        if isinstance(node, ast.Lambda) and code.co_name == "<lambda>":
            start = end = node.body
        elif isinstance(node, ast.FunctionDef) and code.co_name == node.name:
            start, end = node.body[0], node.body[-1]
        else:
            continue
        first, last = (start.lineno, start.col_offset), (end.end_lineno, end.end_col_offset)
        if all(first <= place <= last for place in places if place > (code.co_firstlineno, 0)):
            found.append(node)
    return found[-1] if found and places else None


def class_head(kind: type) -> str | None:
    """The first line of the class's definition; None where its source is not known."""
    codes = [value.__code__ for value in vars(kind).values() if type(value) is types.FunctionType]
    module = sys.modules.get(kind.__module__)
    file = codes[0].co_filename if codes else getattr(module, "__file__", None) or ""
    try:
        tree = ast.parse("".join(linecache.getlines(file, getattr(module, "__dict__", None))))
    except (SyntaxError, ValueError):
        return None
    line = codes[0].co_firstlineno if codes else None
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and node.name == kind.__name__
        and (line is None or node.lineno <= line <= (node.end_lineno or 0))
    ]
    if not found:
        return None
    arguments = [ast.unparse(one) for one in (*found[-1].bases, *found[-1].keywords)]
    return f"class {kind.__name__}({', '.join(arguments)}):" if arguments else f"class {kind.__name__}:"


def as_call(build: str) -> str:
    """The call for the arguments of a ``muster.lazy``."""
    function, _, arguments = build.partition(", ")
    return f"({function})({arguments})" if function.startswith("lambda") else f"{function}({arguments})"


def with_imports(code: str, scope: Mapping[str, Any]) -> str:
    """`code` after the imports that it needs and that `scope` does not have."""
    try:
        tree = ast.parse(code.replace(AS_IT_IS, "..."))
    except SyntaxError:
        return code
    bound = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    bound |= {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    lines = []
    for node in ast.walk(tree):
        names = _dotted(node)
        if not names or names[0] in scope or names[0] in bound or hasattr(builtins, names[0]):
            continue
        if names[0] in _ALIASES:
            lines.append(f"import {_ALIASES[names[0]]} as {names[0]}")
        elif names[0] in sys.modules or names[0] == "muster":
            module = next(
                (".".join(names[:i]) for i in range(len(names), 1, -1) if ".".join(names[:i]) in sys.modules), ""
            )
            lines.append(f"import {module or names[0]}")
    needed = [line for line in dict.fromkeys(lines) if not any(other.startswith(f"{line}.") for other in lines)]
    return "\n".join([*sorted(needed), code])


def _dotted(node: ast.AST) -> list[str]:
    """``["a", "b"]`` for the code ``a.b``; [] for anything else."""
    if isinstance(node, ast.Attribute):
        inner = _dotted(node.value)
        return [*inner, node.attr] if inner else []
    return [node.id] if isinstance(node, ast.Name) else []
