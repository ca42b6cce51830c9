"""Random actions of single agents, of those that the masks of their last rows allow."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from muster.backends.base import Backend
from muster.spaces.masks import MASK, obey
from muster.transport.infos import InfoColumns


def sample_actions(envs: Any, backend: Backend, columns: InfoColumns) -> Any:
    """Random actions for a `VectorEnv`, see there. columns: those of its infos."""
    actions, space, seen = envs.action_space.sample(), envs.single_action_space, envs.single_observation_space
    if isinstance(space, spaces.Discrete):
        ids = backend.settled()
        if isinstance(seen, spaces.Dict) and MASK in seen.spaces:
            last = dict(zip(ids.tolist(), backend.obs_again(ids, copies=False)[MASK], strict=True))
        else:
            last = columns.latest(ids, MASK)
        masks = {env: mask for env, mask in last.items() if np.shape(mask) == (space.n,)}
        if rows := [*masks]:
            actions[rows] = obey(actions[rows], space.start, [*masks.values()], envs.action_space.np_random)
    return actions
