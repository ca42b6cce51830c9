"""Writers for the actions that the core does not write itself, into the slab or the mail; and random actions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import iterate

from muster.backends.base import Backend
from muster.envs.layout import ACTING, FLAGS, RowNode
from muster.errors import ActionError
from muster.spaces.masks import MASK, obey, require_obeyable, unusable, usable
from muster.spaces.tree import Array, Space, SpaceNode
from muster.transport.infos import InfoColumns
from muster.vector.results import Bools


class ActionWriter:
    """Casts actions where the kind of number is kept (bool to int to float), and raises ActionError for others.

    actions: the tree of one env's actions.  batched: the space of all envs' actions.
    """

    in_core = True  # whether the core may write batches that fit

    def __init__(self, actions: SpaceNode, batched: Space, backend: Backend) -> None:
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
        self._backend.put_actions(ids, [[action] for action in provided], as_provided=True)
        return True


class OneByOneWriter(LenientWriter):
    """Takes a sequence with one action for each env, as Stable-Baselines3 does, even where actions are dicts or tuples.

    ignores_surplus: more actions than envs are no error.
    """

    def __init__(self, actions: SpaceNode, batched: Space, backend: Backend, *, ignores_surplus: bool = False) -> None:
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


class AgentsWriter(ActionWriter):
    """Ignores the actions of agents that are not acting, whatever they are."""

    def write(self, actions: Any, ids: Array) -> bool:
        try:
            return super().write(actions, ids)
        except ActionError:
            allowed = self._ignoring_idle(actions, ids)
            if allowed is None:
                raise
            return super().write(allowed, ids)

    def _ignoring_idle(self, actions: Any, ids: Array) -> dict[str, Any] | None:
        """`actions` with allowed values for agents that do not act; None where the actions are no batch."""
        slab = self._backend.slab
        rows = slab.plan.obs
        assert isinstance(rows, RowNode)
        slots = rows.layout.slots()
        if not isinstance(actions, Mapping) or set(actions) != set(slots):
            return None
        self._backend.caller.bring_home()
        acting = slab.obs.arrays[rows.children[FLAGS].leaves[0].index][ids, ACTING]
        try:
            return {
                name: _without_idle(rows.layout.action_spaces[name], actions[name], acting[:, slot])
                for name, slot in slots.items()
            }
        except (ValueError, TypeError, RuntimeError):  # NumPy and others may raise any of these for arbitrary objects
            return None


def _without_idle(space: spaces.Space[Any], actions: Any, acting: Bools) -> Any:
    """`actions`, ``[n, A, ...]`` of `space`, with allowed values where `acting` ``[n, A]`` is False.

    Raises ActionError where `actions` is no such batch.
    """
    if isinstance(space, spaces.Dict):
        if not isinstance(actions, Mapping) or set(actions) != set(space.spaces):
            raise ActionError("other keys")
        return {key: _without_idle(one, actions[key], acting) for key, one in space.items()}
    if isinstance(space, spaces.Tuple):
        if not isinstance(actions, (tuple, list)):
            raise ActionError("no tuple")
        return tuple(_without_idle(one, part, acting) for one, part in zip(space.spaces, actions, strict=True))
    if not isinstance(space, (spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        return actions
    actions, shape = np.asarray(actions), space.shape or ()
    if actions.shape != (*acting.shape, *shape) or actions.dtype.kind not in "iub":
        raise ActionError("another shape, or no integers")
    if actions.dtype == np.uint64:  # which together with int64 would become floats
        actions = actions.astype(np.int64)
    allowed = 0 if isinstance(space, spaces.MultiBinary) else space.start
    return np.where(acting.reshape(*acting.shape, *(1 for _ in shape)), actions, allowed)


def sample_actions(envs: Any, backend: Backend, columns: InfoColumns) -> Any:
    """Random actions for a `VectorEnv`, see there. columns: those of its infos."""
    actions: Any = envs.action_space.sample()
    space, seen = envs.single_action_space, envs.single_observation_space
    last: dict[int, Any]
    ids = backend.settled()
    require_obeyable(seen, space)
    if isinstance(seen, spaces.Dict) and MASK in seen.spaces:
        rows = backend.obs_again(ids, copies=False)[MASK]
        last = dict(zip(ids.tolist(), rows if isinstance(rows, np.ndarray) else [rows] * len(ids), strict=True))
    else:
        last = columns.latest(ids, MASK)
    for env, mask in last.items():
        if mask is None:
            raise unusable(mask, space, of=f"the action mask of env {env}, in its info,")
    masks = [usable(mask, space, of=f"the action mask of env {env}") for env, mask in last.items()]
    if masks:
        actions[[*last]] = obey(actions[[*last]], space, masks, envs.action_space.np_random)
    return actions
