"""Envs that exist already, given where functions that build them are expected: a copy of each travels, if it can."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from torchrl.envs import EnvBase, TransformedEnv

from muster.errors import CannotTravel, ConfigError
from muster.introspection import type_name
from muster.pickling import Culprit, find_culprits, is_plain
from muster.recipes.existing_env import find_existing_env
from muster.recipes.sources import factory_example

_SHOWN = 3


def given(env: EnvBase, **kwargs: Any) -> EnvBase:
    """The env that a user has handed over in the place of a function. Raises ConfigError."""
    if kwargs:
        raise ConfigError("create_env_kwargs must be empty if envs are passed in the place of functions")
    return env


def explained(fns: Sequence[Any], label: str) -> CannotTravel | None:
    """The error for the first env among `fns`, or in one of them, that exists already and cannot travel; None for none.

    label: the name of function `{}` in messages.
    """
    for i, fn in enumerate(fns):
        held = (label.format(i), fn) if isinstance(fn, EnvBase) else find_existing_env(fn, label.format(i))
        if held is None or not isinstance(held[1], EnvBase):
            continue
        path, env = held
        blocking = [culprit for culprit in find_culprits(env, path, limit_s=1.0) if culprit.severity == "blocks"]
        if blocking:
            return CannotTravel(
                f"{path} is an env that exists already ({type_name(env)}), and cannot be sent to a worker:"
                f"{''.join(map(_line, blocking[:_SHOWN]))}\n"
                f"Every env is built where it runs; hand over a function that builds it:\n"
                f"{factory_example(constructor(env))}"
            )
    return None


def constructor(env: EnvBase) -> str:
    """The code that builds an env like `env`, as far as it shows."""
    if isinstance(env, TransformedEnv):
        return f"{type(env).__name__}({constructor(env.base_env)}, ...)"
    takes = inspect.signature(type(env).__init__).parameters
    kwargs = {name: value for name, value in getattr(env, "_constructor_kwargs", {}).items() if name in takes}
    written = [f"{name}={value!r}" if is_plain(value) else f"{name}=..." for name, value in kwargs.items()]
    return f"{type(env).__name__}({', '.join(written) or '...'})"


def _line(culprit: Culprit) -> str:
    return f"\n  {culprit.path}: {culprit.type}: {culprit.reason}"
