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
        return _Limited(env, self.permits)


class _Limited(gymnasium.Wrapper[Any, Any, Any, Any]):
    def __init__(self, env: Any, permits: AbstractContextManager[Any]) -> None:
        super().__init__(env)
        self._permits = permits

    def reset(self, **arguments: Any) -> Any:
        with self._permits:
            return self.env.reset(**arguments)

    def step(self, action: Any) -> Any:
        with self._permits:
            return self.env.step(action)
