"""The vector env of rows beneath a multi-agent one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from muster.envs.layout import (
    FLAGS,
    AgentLayout,
    layout_difference,
)
from muster.errors import SpecMismatch
from muster.spaces.tree import Array, Node
from muster.transport.infos import Infos, merge
from muster.vector.vector_env import VectorEnv
from muster.workers.env_facts import EnvFacts

# What a same_step batch holds of ended episodes, on its way to final_obs and final_info.
FINAL_ROWS = "final_rows"


class RowVectorEnv(VectorEnv):
    """The vector env underneath: its observations are rows of all that is said of the agents."""

    layout: AgentLayout

    def flags(self) -> Array:
        """bool ``[N, 4, agents]``, of the last rows."""
        self._caller.bring_home()
        return self._backend.slab.obs.arrays[self._flags_index]

    def _trees(self, facts: EnvFacts, lenient: bool) -> tuple[Node, Node]:
        assert facts.agents is not None
        self.layout = facts.agents
        rows = self.layout.row_tree()
        self._flags_index = next(rows.children[FLAGS].leaves()).index
        return rows, self.layout.action_tree()

    def _set_spaces(self, facts: Sequence[EnvFacts], observation_mode: str) -> None:
        first = facts[0].agents
        for env, other in enumerate(facts[1:], 1):
            if found := layout_difference(first, other.agents):
                raise SpecMismatch(f"env {env} differs from env 0: {found}", env_index=env)
        super()._set_spaces(facts, observation_mode)

    def _add_finals(self, infos: Infos, ids: Array, objects: Sequence[Any]) -> None:
        ended = self._records["has_final"][ids].copy()
        if not ended.any():
            return

        def take(array: Array) -> Array:
            taken = np.zeros((len(ids), *array.shape[1:]), array.dtype)
            taken[ended] = array[ids[ended]]
            return taken

        infos["final_info"] = {}
        for row in np.flatnonzero(ended).tolist():
            merge(infos, {"final_info": self._infos.final(int(ids[row]), objects[row])}, row, len(ids))
        infos["_final_info"] = ended
        infos["_final_obs"] = ended.copy()
        infos[FINAL_ROWS] = self._obs.batch(self._backend.slab.final_obs, take, [])
