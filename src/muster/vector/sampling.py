"""Random actions of single agents, of those that the masks of their last rows allow."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces

from muster.backends.base import Backend
from muster.spaces.masks import MASK, obey, require_obeyable, unusable, usable
from muster.transport.infos import InfoColumns


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
