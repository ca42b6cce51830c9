"""The limit on the number of envs that execute at once, for Gymnasium's ``max_concurrency``.

Envs of a limit have one semaphore in their recipes, which workers receive when they start. A worker that dies while it
holds a permit never gives it back: so a limit is for vector envs alone that end with the first worker that dies.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any


class Permitted:
    """What a stepper needs of an env: its ``step`` and ``reset``, each executed only while there is a permit for it.

    Nobody else gets to see this object: calls and attributes are for the env itself.
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
