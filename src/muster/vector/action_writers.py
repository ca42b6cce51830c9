"""Writers for the actions that the core does not write itself: into the slab, or as objects into the mail."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gymnasium import spaces
from gymnasium.vector.utils import iterate

from muster.backends.base import Backend
from muster.errors import ActionError
from muster.spaces.tree import Array, Node, Space


class ActionWriter:
    """Casts actions where the kind of number is kept (bool to int to float), and raises ActionError for others.

    actions: the tree of one env's actions.  batched: the space of all envs' actions.
    """

    in_core = True  # whether the core may write batches that fit

    def __init__(self, actions: Node, batched: Space, backend: Backend) -> None:
        self._actions = actions
        self._batched = batched
        self._backend = backend

    def write(self, actions: Any, ids: Array) -> bool:
        """Writes the actions of envs `ids`, and mails what has no place in the slab.

        Returns True if the actions are mailed as provided, one object for each env. Raises ActionError before anything
        is written.
        """
        objects: list[list[Any]] = [[] for _ in ids]
        self._actions.write_batch(actions, self._backend.slab.actions, ids, len(ids), objects)
        if self._actions.has_objects:
            self._backend.put_actions(ids, objects)
        return False


class LenientWriter(ActionWriter):
    """Leaves actions that do not fit into the slab to the envs: each receives its own as provided, as in Gymnasium."""

    def write(self, actions: Any, ids: Array) -> bool:
        try:
            return super().write(actions, ids)
        except ActionError:
            provided = self._taken_apart(actions)
            if len(provided) != len(ids):
                raise
            return self._mail(provided, ids)

    def _taken_apart(self, actions: Any) -> Sequence[Any]:
        """The action of each env, as Gymnasium splits a batch; [] if Gymnasium cannot split it."""
        try:
            return list(iterate(self._batched, actions))
        except (TypeError, ValueError, KeyError, IndexError):
            return []

    def _mail(self, provided: Sequence[Any], ids: Array) -> bool:
        self._backend.put_actions(ids, [[action] for action in provided])
        return True


class OneByOneWriter(LenientWriter):
    """Takes a sequence with one action for each env, as Stable-Baselines3 does, even where actions are dicts or tuples.

    ignores_surplus: more actions than envs are no error.
    """

    def __init__(self, actions: Node, batched: Space, backend: Backend, *, ignores_surplus: bool = False) -> None:
        super().__init__(actions, batched, backend)
        self.in_core = not isinstance(actions.space, (spaces.Dict, spaces.Tuple))
        self._ignores_surplus = ignores_surplus

    def write(self, actions: Any, ids: Array) -> bool:
        if self.in_core:
            return super().write(actions, ids)
        provided = self._taken_apart(actions)
        if len(provided) != len(ids):
            raise ActionError(f"expected {len(ids)} actions, one for each env, got {len(provided)}")
        return self._mail(provided, ids)

    def _taken_apart(self, actions: Any) -> Sequence[Any]:
        provided = list(actions)
        return provided[: self._backend.slab.plan.num_envs] if self._ignores_surplus else provided
