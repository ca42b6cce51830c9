"""The smallest change, as code, that keeps an object from having to travel."""

from __future__ import annotations

import functools
import re
import types
from typing import Any

from gymnasium.envs.registration import EnvSpec

from muster.introspection import class_name
from muster.lazy_values import Lazy
from muster.pickling.kinds import Kind
from muster.pickling.walk import Edge, is_importable

_HOLDERS = (
    *(dict, list, tuple, set, frozenset, type(None), functools.partial),
    *(types.FunctionType, types.MethodType, types.CellType, type, EnvSpec),
)
# A path that code can assign to.
_SUBSCRIPTS = re.compile(r'env_kwargs(\["[^"\\\n]*"\]|\[-?\w+\])*')


def remedy_for(trail: list[Edge], kind: Kind | None) -> str:
    """Code to write instead, lines joined by newlines.

    trail: path and object from the argument of ``make_vec`` to the culprit.  kind: what is known about the culprit.
    """
    root_path, root = trail[0]
    path, owner = next(((path, value) for path, value in trail if type(value) not in _HOLDERS), trail[-1])
    build = kind.lazy if kind is not None and owner is trail[-1][1] else f"{_class_name(type(owner))}, ..."
    if root_path.startswith(("args[", "kwargs[", "values[", "options", "the function")):
        return _for_running(root_path, _as_call(build))
    if type(owner) is Lazy or (type(owner) in _HOLDERS and owner is not root):
        return "muster.lazy(a_function_of_a_module, ...)   # one that builds all that it uses"
    if root_path.startswith("env_kwargs"):
        holders = [value for place, value in trail if len(place) < len(path)]
        can_be_set = _SUBSCRIPTS.fullmatch(path) and all(type(holder) in (dict, list) for holder in holders)
        named = type(owner) not in _HOLDERS and (can_be_set or owner is root)
        return _for_kwargs(path if named else None, root_path, build)
    if root_path.startswith("wrappers"):
        return f"def wrap(env):\n    return MyWrapper(env, {_as_call(build)})\nmuster.make_vec(..., wrappers=[wrap])"
    if owner is root or path.endswith("__self__"):
        return "def make_env():\n    return MyEnv(...)   # and all that it needs\nmuster.make_vec(make_env, ...)"
    name = _argument_name(path, owner)
    if type(root) is EnvSpec:
        kwargs = f'env_kwargs={{"{name}": muster.lazy({build})}}'
        return f'muster.make_vec("{root.id}", {kwargs})   # and not in the kwargs of the spec'
    return (
        f"def make_env({name}):\n    ...   # what it did, with {name} as an argument\n"
        f'muster.make_vec(make_env, env_kwargs={{"{name}": muster.lazy({build})}})'
    )


def _for_kwargs(path: str | None, root_path: str, build: str) -> str:
    """The remedy for ``env_kwargs["server"]``, ``env_kwargs[3]["server"]``, or something in a dict or list in these.

    path: the path of what is to be built in the worker; None where no assignment can put it there.
    """
    if path is not None and path != root_path:
        return f"{path} = muster.lazy({build})   # before make_vec"
    key = root_path[root_path.rindex("[") + 1 : -1]
    function = ""
    if path is None:
        build = f"make_{key[1:-1]}" if key[1:-1].isidentifier() else "make_it"
        function = f"def {build}():\n    ...   # what builds it, with all that it needs\n"
    one = f"{{{key}: muster.lazy({build})}}"
    kwargs = one if root_path.count("[") == 1 else f"[..., {one}, ...]"
    return f"{function}muster.make_vec(..., env_kwargs={kwargs})"


def _for_running(root_path: str, build: str) -> str:
    """The remedy for what is sent to envs that run already."""
    if root_path == "options":
        return 'muster.make_vec(..., env_kwargs={"name": muster.lazy(...)})   # or options of numbers and strings'
    use = f'env.set_wrapper_attr("name", {build})' if root_path.startswith("values[") else f"return env.method({build})"
    return f"def act(env, env_index):\n    {use}\nenvs.call(act)"


def _class_name(kind: type) -> str:
    """The name of a class in code: with its module, if it can be imported from there."""
    return class_name(kind) if is_importable(kind) else kind.__name__


def _as_call(build: str) -> str:
    function, _, arguments = build.partition(", ")
    return f"({function})({arguments})" if function.startswith("lambda") else f"{function}({arguments})"


def _argument_name(path: str, owner: Any) -> str:
    """The name of the argument for `owner`: the variable or key at the end of `path`, else the owner's class.

    ``factory.<closure>.server`` and ``factory.keywords["server"]`` become ``server``.
    """
    last = re.split(r"[.\[]", path)[-1].strip('"]')
    return last if last.isidentifier() and last not in ("cell_contents",) else type(owner).__name__.lower().strip("_")
