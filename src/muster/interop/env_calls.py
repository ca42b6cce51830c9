"""The calls that `muster.interop.sb3` sends to workers. Imports no SB3, which loads torch: workers may not need it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import gymnasium

from muster.envs.attributes import get_attribute
from muster.hosts.questions import EnvCall
from muster.pickling import named_arguments


@dataclass(frozen=True)
class OnSome:
    """Calls `act` on the envs `indices` only; returns None for the others."""

    indices: Collection[int]
    act: EnvCall

    def __call__(self, env: Any, index: int) -> Any:
        return self.act(env, index) if index in self.indices else None

    def sent_parts(self) -> dict[str, Any]:
        """The parts of this call, by the names that messages use."""
        return self.act.sent_parts() if hasattr(self.act, "sent_parts") else {"the function": self.act}


def has_attribute(env: Any, index: int, name: str) -> bool:
    """Returns whether the env has the attribute `name`; the value stays in the worker."""
    try:
        get_attribute(env, name)
    except AttributeError:
        return False
    return True


def get_named(env: Any, index: int, name: str) -> Any:
    """The attribute `name`, looked up through wrappers."""
    return get_attribute(env, name)


@dataclass(frozen=True)
class SetAttribute:
    """Sets the attribute `name` of the outermost wrapper, as SB3 does."""

    name: str
    value: Any

    def __call__(self, env: Any, index: int) -> None:
        setattr(env, self.name, self.value)

    def sent_parts(self) -> dict[str, Any]:
        """As for `OnSome`."""
        return {"value": self.value}


@dataclass(frozen=True)
class CallMethod:
    """Calls the method `name`, looked up through wrappers, and returns its result."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None

    def __call__(self, env: Any, index: int) -> Any:
        return get_attribute(env, self.name)(*self.args, **(self.kwargs or {}))

    def sent_parts(self) -> dict[str, Any]:
        """As for `OnSome`."""
        return named_arguments(self.args, self.kwargs or {}, "method_")


def is_wrapped(env: Any, index: int, wrapper: type) -> bool:
    """Looks for an instance of the class `wrapper` among the env's wrappers."""
    while isinstance(env, gymnasium.Wrapper):
        if isinstance(env, wrapper):
            return True
        env = env.env
    return False


def of_gymnasium(env: Any) -> Any:
    """`env`, or SB3's wrapper around an env of OpenAI Gym."""
    if isinstance(env, gymnasium.Env):
        return env
    from stable_baselines3.common.vec_env.patch_gym import _patch_env

    return _patch_env(env)
