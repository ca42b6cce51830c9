"""The objects that a stepper steps in the place of an env."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any


class Permitted:
    """An env's ``step`` and ``reset`` for a stepper, each executed only while there is a permit for it.

    For the limit on the number of envs that execute at once, Gymnasium's ``max_concurrency``: envs of a limit have one
    semaphore in their recipes. A worker that dies while it holds a permit never gives it back: so a limit is for vector
    envs alone that end with the first worker that dies. Calls and attributes are for the env itself.
    """

    def __init__(self, env: Any, permits: AbstractContextManager[Any]) -> None:
        self._env = env
        self._permits = permits

    def reset(self, **arguments: Any) -> Any:
        """The env's reset, once there is a permit."""
        with self._permits:
            return self._env.reset(**arguments)

    def step(self, action: Any) -> Any:
        """The env's step, once there is a permit."""
        with self._permits:
            return self._env.step(action)


class NotBuiltAgain:
    """An env that could not be built again, and refuses all for that reason."""

    def __init__(self, error: BaseException) -> None:
        self._error = error

    def reset(self, *_: Any, **__: Any) -> Any:
        raise self._error

    step = reset
