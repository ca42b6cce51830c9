"""Calls to envs that run already, as messages name them, and as a function that each env can be called with instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from muster.pickling.user_call import UserCall

Write = Callable[[Any], str]


@dataclass(frozen=True)
class Running:
    """A call to envs that run already.

    parts: what it sends, by the names that messages use.  act: writes the statement that does the same in one env, by
    a function that writes any of the values as code; None where no such function can stand in for the call.
    call: the user's call that has made the envs.
    """

    parts: Mapping[str, Any]
    act: Callable[[Write], str] | None
    call: UserCall


def running_call(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], call: UserCall) -> Running:
    """The call of a method, by its name, or of a function; a function with a method `running` describes itself."""
    if hasattr(function, "running"):
        described: Running = function.running(call)
        return described
    parts = {"the function": function} | {f"args[{i}]": one for i, one in enumerate(args)}
    parts |= {f'kwargs["{key}"]': one for key, one in kwargs.items()}

    def act(write: Write) -> str:
        written = _arguments(args, kwargs, write)
        if isinstance(function, str):
            return f"return env.get_wrapper_attr({function!r})({written})"
        return f"return {write(function)}(env, env_index{', ' * bool(written)}{written})"

    return Running(parts, act, call)


def calling(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], call: UserCall) -> Running:
    """The call of the method `name`, whose arguments messages name as those of ``env_method``."""
    parts = {f"method_args[{i}]": one for i, one in enumerate(args)}
    parts |= {f'method_kwargs["{key}"]': one for key, one in kwargs.items()}
    method = f"return env.get_wrapper_attr({name!r})"
    return Running(parts, lambda write: f"{method}({_arguments(args, kwargs, write)})", call)


def setting(name: str, values: Mapping[int, Any], call: UserCall) -> Running:
    """The setting of an attribute to a value for each env."""

    def act(write: Write) -> str:
        written = {env: write(value) for env, value in values.items()}
        first = next(iter(written.values()))
        if len(set(written.values())) > 1:
            first = f"{{{', '.join(f'{env}: {code}' for env, code in written.items())}}}[env_index]"
        return f"env.set_wrapper_attr({name!r}, {first})"

    return Running({f"values[{env}]": value for env, value in values.items()}, act, call)


def resetting(options: Any, call: UserCall) -> Running:
    """A reset with options."""
    return Running({"options": options}, None, call)


def _arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any], write: Write) -> str:
    return ", ".join([*map(write, args), *(f"{key}={write(one)}" for key, one in kwargs.items())])
