"""The smallest change, as code, that keeps objects from having to travel."""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gymnasium.envs.registration import EnvSpec

from muster.lazy_values import Lazy
from muster.pickling.kind_facts import Kind
from muster.pickling.public_names import ARGUMENTS, build_of
from muster.pickling.running_calls import Running
from muster.pickling.user_call import UserCall
from muster.pickling.walk import METHODS, Edge
from muster.pickling.written_code import Scope, Writer, as_call, parameter_of, user_scope, with_imports, with_parameters

_HOLDERS = (
    *(dict, list, tuple, set, frozenset, type(None), functools.partial, EnvSpec),
    *(types.FunctionType, *METHODS, types.CellType, staticmethod, classmethod, property),
)
# A path that code can assign to, and the beginning of one: an argument's value by its name.
_SUBSCRIPTS = re.compile(r'[A-Za-z_]\w*(\["[^"\\\n]*"\]|\[-?\w+\])+')
_KEYWORD = re.compile(r'.*\["[^"\\\n]*"\]')

_UNNAMED = ("cell_contents", "__self__", "__func__")

BUILD = "Build it in the worker instead"
MAKE = "Make it in a context that can start fresh processes"
_FUNCTION = "muster.lazy(function), with a function of a module that builds it"


@dataclass(frozen=True)
class Remedy:
    """What to do, in words, and the code of it: lines joined by newlines; empty where the words say all."""

    lead: str
    code: str


class Obstacle:
    """An object that cannot travel.

    trail: path and object from the user's argument to it.  kind: what is known about it.
    owner, path: the object that has to be built in its place, since it holds the other, and its path.
    by_class: whether the owner's class holds it, so that the class cannot travel either.
    """

    def __init__(self, trail: list[Edge], kind: Kind | None) -> None:
        self.trail = trail
        self.kind = kind
        self.path, self.owner = next(((path, value) for path, value in trail if not _holds(value)), trail[-1])
        self.known = kind if self.owner is trail[-1][1] else None
        self.by_class = any(value is type(self.owner) for _, value in trail)

    def build(self, writer: Writer) -> str | None:
        """The arguments of the ``muster.lazy`` that builds the owner; None where they are not known."""
        if type(self.owner) is Lazy or self.by_class or (_holds(self.owner) and self.owner is not self.trail[0][1]):
            return None
        return build_of(self.owner, self.known, writer)


def remedy_for(one: Obstacle, together: Sequence[Obstacle], call: UserCall | Running) -> Remedy:
    """The remedy for one object that cannot travel.

    together: all that cannot travel in the same argument, that one among them: where one piece of code holds several of
    them, the remedy is for all of these.
    """
    scope = user_scope()
    root_path, root = one.trail[0]
    if not isinstance(call, Running) and one.known is not None and one.known.made_anew:
        return Remedy(MAKE, with_imports(_made_anew(one, one.known.made_anew, call, scope), scope))
    writer = Writer(scope, {}, [one.trail])
    build = one.build(writer)
    held_by_class = next((other for other in together if other.owner is one.owner and other.by_class), None)
    if build is None or held_by_class is not None:
        return Remedy(f"{BUILD}: {_in_words(held_by_class or one)}", "")
    anew = [other for other in together if other.known is not None and other.known.made_anew]
    builds = {
        id(other.owner): made
        for other in (*together, one)
        if other not in anew and (made := other.build(writer)) is not None
    }
    builds.setdefault(id(one.owner), build)
    trails = [other.trail for other in (*together, one) if id(other.owner) in builds]
    coded = {key: made.removesuffix(ARGUMENTS) for key, made in builds.items()}
    if isinstance(call, Running):
        writer = Writer(scope, {key: as_call(made) for key, made in coded.items()}, trails)
        code = _for_running(one, build.removesuffix(ARGUMENTS), call, writer)
    else:
        writer = Writer(scope, {key: f"muster.lazy({made})" for key, made in coded.items()}, trails)
        lazy = f"muster.lazy({build.removesuffix(ARGUMENTS)})"
        before = f"   # before {call.name}"
        if type(root) is EnvSpec:
            code = f'gymnasium.spec("{root.id}").kwargs{one.path.partition(".kwargs")[2]} = {lazy}{before}'
        elif _KEYWORD.fullmatch(root_path):
            assigned = _for_kwargs(one, lazy, writer)
            code = assigned and assigned + before
        else:
            code = _for_function(one, lazy, writer, scope)
    if code is None:
        return Remedy(f"{BUILD}: {_in_words(one, build)}", "")
    lacking = [made.removesuffix(ARGUMENTS) for made in builds.values() if made.endswith(ARGUMENTS)]
    notes = [f"# {made} takes arguments of its own, which belong after it" for made in lacking if made in code]
    return Remedy(BUILD, with_imports("\n".join([*dict.fromkeys(notes), code]), scope))


def _holds(value: Any) -> bool:
    """Whether `value` only leads to other objects."""
    return type(value) in _HOLDERS or issubclass(type(value), type)


def _made_anew(one: Obstacle, code: str, call: UserCall, scope: Scope) -> str:
    """The lines that make an object of multiprocessing in another context, and hand over that one."""
    root_path, root = one.trail[0]
    before = f"   # before {call.name}"
    if _KEYWORD.fullmatch(root_path) and _assignable(one.trail, one.path):
        return f"{one.path} = {code}{before}"
    variable = Writer(scope, {}, []).variable(one.owner)
    if one.owner is root and variable is None:  # the value of an argument
        return f"{code}   # in the place of {root_path}"
    # Made in a line of its own, and not in a partial of a list: its envs would no longer share one object.
    name = variable or _argument_name(one)
    line = f"{name} = {code}{before}"
    writer = Writer(scope, {id(one.owner): name}, [one.trail])
    written = None if variable is not None else writer.write(root)
    if written is None:
        return line
    return "\n".join([line, *writer.definitions, f"{written}   # in the place of {_place(root_path, root, scope)}"])


def _in_words(one: Obstacle, build: str | None = None) -> str:
    """What to do where it cannot be written as code."""
    root_path, root = one.trail[0]
    if one.known is not None and one.known.instead:
        return one.known.instead
    if (into_a_module := _into_a_module(one.trail)) is not None:
        return into_a_module
    if build is None and _assignable(one.trail, one.path) and one.owner is one.trail[-1][1]:
        return f"set {one.path} to {_FUNCTION}"
    if not callable(root):
        return f"replace {root_path} by {_FUNCTION} and all that it holds"
    name = _argument_name(one)
    lazy = _FUNCTION if build is None else f"muster.lazy({build.removesuffix(ARGUMENTS)})"
    return (
        f"write a function that does what {root_path} does, but takes {name} as an argument, and replace {root_path} "
        f"by functools.partial of this function with {name}={lazy}"
    )


def _into_a_module(trail: list[Edge]) -> str | None:
    """What to do about a class that uses something of its script's; None where no class does."""
    at = next((i for i in reversed(range(len(trail) - 1)) if issubclass(type(trail[i][1]), type)), None)
    if at is None:
        return None
    inside = trail[-1][0][len(trail[at][0]) :]
    if "<closure>" in inside:
        return None
    used = re.search(r"<global>\.(\w+)", inside)
    moved = f"class {trail[at][1].__name__}" + (f" and {used[1]}" if used else "")
    return f"move {moved} into a module, and import the class from there: every worker then makes its own"


def _for_kwargs(one: Obstacle, lazy: str, writer: Writer) -> str | None:
    """The assignment for ``env_kwargs["server"]``, ``env_kwargs[3]["server"]``, or something in what these hold."""
    if not _holds(one.owner) and _assignable(one.trail, one.path):
        return f"{one.path} = {lazy}"
    for place, value in reversed(one.trail):
        if _assignable(one.trail, place) and (code := writer.write(value)) is not None:
            return "\n".join([*writer.definitions, f"{place} = {code}"])
    return None


def _for_function(one: Obstacle, lazy: str, writer: Writer, scope: Scope) -> str | None:
    """The expression in the place of a factory, an env function or a wrapper."""
    root_path, root = one.trail[0]
    if one.owner is root and not callable(root):  # the value of an argument
        code: str | None = lazy
    elif one.owner is root:
        code = f"functools.partial(lambda *args, owner, **kwargs: owner(*args, **kwargs), owner={lazy})"
    else:
        code = writer.write(root)
    if code is None:
        return None
    return "\n".join([*writer.definitions, f"{code}   # in the place of {_place(root_path, root, scope)}"])


def _place(path: str, value: Any, scope: Scope) -> str:
    """The place in the user's code of the expression that gives `value`."""
    outer, inside, name = getattr(value, "__qualname__", "").rpartition(".<locals>.")
    if type(value) is not types.FunctionType or not inside or outer == scope.code or scope.get(name) is value:
        return path
    return f"{'the lambda' if name == '<lambda>' else name} in {outer}"


def _for_running(one: Obstacle, build: str, call: Running, writer: Writer) -> str | None:
    """The function to call in every env, instead of sending the object."""
    root_path, root = one.trail[0]
    if call.act is None:
        name = _argument_name(one) if len(one.trail) == 1 else _last_name(one.trail[1][0], one.owner)
        return f"{call.call.lazily(name, build)}, and not in {root_path}"
    if root_path == "the function" and type(root) is types.FunctionType and len(one.trail) > 1:
        return _for_called_function(one.trail, root, build, call, writer)
    unknown = []

    def write(value: Any) -> str:
        written = writer.write(value)
        unknown.extend([value] * (written is None))
        return written or ""

    statement = call.act(write)
    return None if unknown else f"def act(env, env_index):\n    {statement}\n{call.call.acts}"


def _for_called_function(trail: list[Edge], function: Any, build: str, call: Running, writer: Writer) -> str | None:
    name, value = trail[1][0].rpartition(".")[2], trail[1][1]
    made = writer.write(value) or as_call(build)
    written = with_parameters(function, [name])
    if written is None:
        return None
    if written[0]:
        return f"{name} = {made}   # as the first line of {function.__name__}"
    return (
        f"def act(env, env_index):\n    {name} = {made}\n    return ({written[1]})(env, env_index, {name}={name})\n"
        f"{call.call.acts}"
    )


def _assignable(trail: Sequence[Edge], path: str) -> bool:
    """Whether code can assign to `path`: all that holds it are dicts and lists."""
    holders = [value for place, value in trail if len(place) < len(path)]
    return bool(_SUBSCRIPTS.fullmatch(path)) and all(type(holder) in (dict, list) for holder in holders)


def _argument_name(one: Obstacle) -> str:
    """The name of the argument for the owner: the parameter, variable or key at the end of its path, else its class."""
    at = next(i for i, (path, _) in enumerate(one.trail) if path == one.path)
    holder_path, holder = one.trail[max(at - 1, 0)]
    return parameter_of(holder, one.path[len(holder_path) :]) or _last_name(one.path, one.owner)


def _last_name(path: str, owner: Any) -> str:
    """The variable or key at the end of `path`, else the owner's class.

    ``factory.<closure>.server`` and ``factory.keywords["server"]`` become ``server``.
    """
    last = re.split(r"[.\[]", path)[-1].strip('"]')
    return last if last.isidentifier() and last not in _UNNAMED else type(owner).__name__.lower().strip("_")
