"""The calls that `muster.interop.sb3` sends to workers. Imports no SB3, which loads torch: workers may not need it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import gymnasium

from muster.envs.attributes import get_attribute
from muster.pickling import UserCall
from muster.pickling.running_calls import Running, calling, running_call
from muster.workers.options import EnvCall


@dataclass(frozen=True)
class OnSome:
    """Calls `act` on the envs `indices` only; returns None for the others."""

    indices: Collection[int]
    act: EnvCall

    def __call__(self, env: Any, index: int) -> Any:
        return self.act(env, index) if index in self.indices else None

    def running(self, call: UserCall) -> Running:
        """This call, for messages."""
        whole = running_call(self.act, (), {}, call)
        act, chosen = whole.act, sorted(self.indices)
        return replace(whole, act=None if act is None else lambda write: f"if env_index in {chosen}: {act(write)}")


@dataclass(frozen=True)
class GetAttribute:
    """Returns the attribute `name`, looked up through wrappers."""

    name: str

    def __call__(self, env: Any, index: int) -> Any:
        return get_attribute(env, self.name)


@dataclass(frozen=True)
class HasAttribute:
    """Whether the env has the attribute `name`; the attribute's value stays in the worker."""

    name: str

    def __call__(self, env: Any, index: int) -> bool:
        try:
            get_attribute(env, self.name)
        except AttributeError:
            return False
        return True


@dataclass(frozen=True)
class SetAttribute:
    """Sets the attribute `name` of the outermost wrapper, as SB3 does."""

    name: str
    value: Any

    def __call__(self, env: Any, index: int) -> None:
        setattr(env, self.name, self.value)

    def running(self, call: UserCall) -> Running:
        """This call, for messages."""
        return Running({"value": self.value}, lambda write: f"setattr(env, {self.name!r}, {write(self.value)})", call)


@dataclass(frozen=True)
class CallMethod:
    """Calls the method `name`, looked up through wrappers, and returns its result."""

    name: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] | None = None

    def __call__(self, env: Any, index: int) -> Any:
        return get_attribute(env, self.name)(*self.args, **(self.kwargs or {}))

    def running(self, call: UserCall) -> Running:
        """This call, for messages."""
        return calling(self.name, self.args, self.kwargs or {}, call)


@dataclass(frozen=True)
class IsWrapped:
    """Whether one of the env's wrappers is an instance of the class `wrapper`."""

    wrapper: type

    def __call__(self, env: Any, index: int) -> bool:
        while isinstance(env, gymnasium.Wrapper):
            if isinstance(env, self.wrapper):
                return True
            env = env.env
        return False


def of_gymnasium(env: Any) -> Any:
    """`env`, or SB3's wrapper around an env of OpenAI Gym."""
    if isinstance(env, gymnasium.Env):
        return env
    from stable_baselines3.common.vec_env.patch_gym import _patch_env

    return _patch_env(env)
