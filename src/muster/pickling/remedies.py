"""The smallest change, as code, that keeps an object from having to travel."""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gymnasium.envs.registration import EnvSpec

from muster.lazy_values import Lazy
from muster.pickling.kinds import Kind
from muster.pickling.running_calls import Running
from muster.pickling.user_call import UserCall
from muster.pickling.walk import Edge
from muster.pickling.written_code import Scope, Writer, as_call, user_scope, with_imports, with_parameters

_HOLDERS = (
    *(dict, list, tuple, set, frozenset, type(None), functools.partial),
    *(types.FunctionType, types.MethodType, types.CellType, type, EnvSpec),
)
# A path that code can assign to, and the beginning of one: an argument's value by its name.
_SUBSCRIPTS = re.compile(r'[A-Za-z_]\w*(\["[^"\\\n]*"\]|\[-?\w+\])+')
_KEYWORD = re.compile(r'.*\["[^"\\\n]*"\]')

BUILD = "Build it in the worker instead"
MAKE = "Make it in a context that can start fresh processes"


@dataclass(frozen=True)
class Remedy:
    """What to do, in words, and the code of it: lines joined by newlines."""

    lead: str
    code: str


def remedy_for(trail: list[Edge], kind: Kind | None, call: UserCall | Running) -> Remedy:
    """The remedy for one object that cannot travel.

    trail: path and object from the user's argument to the culprit.  kind: what is known about the culprit.
    """
    scope = user_scope()
    root_path, root = trail[0]
    path, owner = next(((path, value) for path, value in trail if type(value) not in _HOLDERS), trail[-1])
    known = kind if owner is trail[-1][1] else None
    writer = Writer(scope, {}, [trail])
    build = known.lazy if known is not None else f"{writer.name_of(type(owner))}, ..."
    if isinstance(call, Running):
        return Remedy(BUILD, with_imports(_for_running(trail, owner, build, call, scope), scope))
    before = f"   # before {call.name}"
    if known is not None and known.made_anew:
        # Not written into a partial of a list: its envs would no longer share one object.
        place = path if _KEYWORD.fullmatch(root_path) and _assignable(trail, path) else _name_of(path, owner, scope)
        return Remedy(MAKE, with_imports(f"{place} = {known.made_anew}{before}", scope))
    if type(owner) is Lazy or (type(owner) in _HOLDERS and owner is not root):
        code = "muster.lazy(a_function_of_a_module, ...)   # one that builds all that it uses"
        return Remedy(BUILD, code)
    writer = Writer(scope, {id(owner): build}, [trail])
    if type(root) is EnvSpec:
        code = f'gymnasium.spec("{root.id}").kwargs{path.partition(".kwargs")[2]} = muster.lazy({build}){before}'
    elif _KEYWORD.fullmatch(root_path):
        code = _for_kwargs(trail, path, owner, build, writer) + before
    else:
        code = _for_function(trail, path, owner, build, writer, scope)
    return Remedy(BUILD, with_imports(code, scope))


def _for_kwargs(trail: list[Edge], path: str, owner: Any, build: str, writer: Writer) -> str:
    """The assignment for ``env_kwargs["server"]``, ``env_kwargs[3]["server"]``, or something in what these hold."""
    root_path = trail[0][0]
    if type(owner) not in _HOLDERS and _assignable(trail, path):
        return f"{path} = muster.lazy({build})"
    for place, value in reversed(trail):
        if _assignable(trail, place) and (code := writer.write(value)) is not None:
            return "\n".join([*writer.definitions, f"{place} = {code}"])
    key = root_path[root_path.rindex("[") + 2 : -2]
    name = f"make_{key}" if key.isidentifier() else "make_it"
    return f"def {name}():\n    ...   # what builds it, with all that it needs\n{root_path} = muster.lazy({name})"


def _for_function(trail: list[Edge], path: str, owner: Any, build: str, writer: Writer, scope: Scope) -> str:
    """The expression in the place of a factory, an env function or a wrapper."""
    root_path, root = trail[0]
    if owner is root and not callable(root):  # the value of an argument
        code: str | None = f"muster.lazy({build})"
    elif owner is root:
        code = f"functools.partial(lambda *args, owner: owner(*args), owner=muster.lazy({build}))"
    else:
        code = writer.write(root)
    if code is not None:
        return "\n".join([*writer.definitions, f"{code}   # in the place of {_place(root_path, root, scope)}"])
    name = _argument_name(path, owner)
    return (
        f"def made(*args, {name}):\n    ...   # what {root_path} did, with {name} as an argument\n"
        f"functools.partial(made, {name}=muster.lazy({build}))   # in the place of {root_path}"
    )


def _place(path: str, value: Any, scope: Scope) -> str:
    """The place in the user's code of the expression that gives `value`."""
    outer, inside, name = getattr(value, "__qualname__", "").rpartition(".<locals>.")
    if type(value) is not types.FunctionType or not inside or outer == scope.code or scope.get(name) is value:
        return path
    return f"{'the lambda' if name == '<lambda>' else name} in {outer}"


def _for_running(trail: list[Edge], owner: Any, build: str, call: Running, scope: Mapping[str, Any]) -> str:
    """The function to call in every env, instead of sending the object."""
    root_path, root = trail[0]
    writer = Writer(scope, {id(owner): build}, [trail])
    writer.lazily = False
    if call.act is None:
        name = _argument_name(trail[min(1, len(trail) - 1)][0], owner)
        return f"{call.call.lazily(name, build)}, and not in {root_path}"
    if root_path == "the function" and type(root) is types.FunctionType and len(trail) > 1:
        return _for_called_function(trail, root, build, call, writer)
    statement = call.act(lambda value: writer.write(value) or "...")
    return f"def act(env, env_index):\n    {statement}\n{call.call.acts}"


def _for_called_function(trail: list[Edge], function: Any, build: str, call: Running, writer: Writer) -> str:
    name, value = trail[1][0].rpartition(".")[2], trail[1][1]
    made = writer.write(value) or as_call(build)
    written = with_parameters(function, [name])
    if written is not None and written[0]:
        return f"{name} = {made}   # as the first line of {function.__name__}"
    called = f"({written[1]})(env, env_index, {name}={name})" if written is not None else "..."
    return f"def act(env, env_index):\n    {name} = {made}\n    return {called}\n{call.call.acts}"


def _assignable(trail: Sequence[Edge], path: str) -> bool:
    """Whether code can assign to `path`: all that holds it are dicts and lists."""
    holders = [value for place, value in trail if len(place) < len(path)]
    return bool(_SUBSCRIPTS.fullmatch(path)) and all(type(holder) in (dict, list) for holder in holders)


def _name_of(path: str, owner: Any, scope: Mapping[str, Any]) -> str:
    """The user's variable for `owner`, else the name at the end of its path."""
    return next((name for name, value in scope.items() if value is owner), _argument_name(path, owner))


def _argument_name(path: str, owner: Any) -> str:
    """The name of the argument for `owner`: the variable or key at the end of `path`, else the owner's class.

    ``factory.<closure>.server`` and ``factory.keywords["server"]`` become ``server``.
    """
    last = re.split(r"[.\[]", path)[-1].strip('"]')
    return last if last.isidentifier() and last not in ("cell_contents",) else type(owner).__name__.lower().strip("_")
