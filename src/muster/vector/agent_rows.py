"""The vector env beneath a `MultiAgentVectorEnv`: its observations are rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from muster.envs.layout import (
    FLAGS,
    RowNode,
)
from muster.spaces.tree import Array
from muster.transport.infos import InfoReader, Infos, merge
from muster.vector.vector_env import Assembled, VectorEnv

# Key in the infos of a same_step batch: the last rows of ended episodes, from which final_obs and final_info are made.
FINAL_ROWS = "final_rows"


class RowVectorEnv(VectorEnv):
    """The vector env beneath: an env's observation is a row that holds everything one step says of its agents."""

    def __init__(self, assembled: Assembled) -> None:
        super().__init__(assembled)
        assert isinstance(self._obs, RowNode)
        self.layout = self._obs.layout
        self._flags_index = self._obs.children[FLAGS].leaves[0].index

    def flags(self) -> Array:
        """The flags in the last rows, bool ``[N, 4, agents]``, in the order of `FLAG_NAMES`."""
        self._caller.bring_home()
        return self._backend.slab.obs.arrays[self._flags_index]

    def _add_finals(self, infos: Infos, ids: Array, objects: Sequence[Any], reader: InfoReader) -> None:
        ended = self._records["has_final"][ids].copy()
        if not ended.any():
            return

        def take(array: Array) -> Array:
            taken = np.zeros((len(ids), *array.shape[1:]), array.dtype)
            taken[ended] = array[ids[ended]]
            return taken

        infos["final_info"] = {}
        for row in np.flatnonzero(ended).tolist():
            merge(infos, {"final_info": reader.final(int(ids[row]), objects[row])}, row, len(ids))
        infos["_final_info"] = ended
        infos["_final_obs"] = ended.copy()
        infos[FINAL_ROWS] = self._obs.batch(self._backend.slab.final_obs, take, [])
