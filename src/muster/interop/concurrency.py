"""The limit on the number of envs that execute at once, for Gymnasium's ``max_concurrency``."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import gymnasium


@dataclass(frozen=True)
class LimitConcurrency:
    """A wrapper for recipes: each env executes ``step`` and ``reset`` only while it holds the semaphore."""

    permits: AbstractContextManager[Any]

    @classmethod
    def to(cls, count: int, context: str | None) -> LimitConcurrency:
        """At most `count` of the envs that share this object. context: how their workers start."""
        return cls(get_context(context or "forkserver").BoundedSemaphore(count))

    def __call__(self, env: Any) -> Any:
        return (LimitedEnv if isinstance(env, gymnasium.Env) else LimitedObject)(env, self.permits)


class LimitedEnv(gymnasium.Wrapper[Any, Any, Any, Any]):
    """An env that steps and resets only while it holds a permit. It shows itself as the env that it wraps."""

    def __init__(self, env: Any, permits: AbstractContextManager[Any]) -> None:
        super().__init__(env)
        self._permits = permits

    def __str__(self) -> str:
        return str(self.env)

    __repr__ = __str__

    def reset(self, **arguments: Any) -> Any:
        """The env's reset, once there is a permit."""
        with self._permits:
            return self.env.reset(**arguments)

    def step(self, action: Any) -> Any:
        """The env's step, once there is a permit."""
        with self._permits:
            return self.env.step(action)


class LimitedObject:
    """As LimitedEnv, for an object that has an env's methods, but not Gymnasium's class. All else is the object's."""

    def __init__(self, env: Any, permits: AbstractContextManager[Any]) -> None:
        vars(self).update(_env=env, _permits=permits)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_env"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._env, name, value)

    def __str__(self) -> str:
        return str(self._env)

    def reset(self, **arguments: Any) -> Any:
        """The object's reset, once there is a permit."""
        with self._permits:
            return self._env.reset(**arguments)

    def step(self, action: Any) -> Any:
        """The object's step, once there is a permit."""
        with self._permits:
            return self._env.step(action)
