"""The functions that drop-ins hand to vector env classes, as far as recipes need to know what these functions do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from muster.pickling import UserCall


@dataclass(frozen=True)
class EnvFunction:
    """A function of Muster's own that builds an env by ``build(**arguments)``.

    name: of the env, for messages.  labels: as for `Recipe`.  call: the user's call that has made this function.
    env_index: of the `num_envs` that the call asks for.
    """

    build: Callable[..., Any]
    arguments: Mapping[str, Any]
    name: str
    labels: tuple[str, str]
    call: UserCall
    env_index: int
    num_envs: int

    def words(self, outer: UserCall) -> UserCall:
        """The words for an env of this function in `outer`: what builds it is said as in the call that has made it."""
        made = self.call
        return replace(
            outer,
            name=made.name,
            factory=made.factory,
            kwargs=made.kwargs,
            num_envs=made.num_envs,
            by_function=made.by_function,
        )
