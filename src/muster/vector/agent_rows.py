"""The vector env beneath a `MultiAgentVectorEnv`: its envs' observations are rows, which it splits by group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from muster._core import FLAG_NAMES, split_agents
from muster.envs.layout import (
    ALIVE,
    FLAGS,
    HAS_MASKS,
    MASKS,
    OBS,
    REWARDS,
    SHARED,
    STATE,
    TERMINATED,
    TRUNCATED,
    RowNode,
)
from muster.errors import CannotTravel, EnvError
from muster.spaces.tree import Array
from muster.transport.infos import InfoReader, Infos, merge
from muster.vector.results import AgentBatch, Batch, Bools, ByGroup, Rewards, Rows
from muster.vector.vector_env import Assembled, VectorEnv

# Key in the infos of a same_step batch: the last rows of ended episodes, from which final_obs and final_info are made.
_FINAL_ROWS = "final_rows"


class RowVectorEnv(VectorEnv):
    """The vector env beneath: an env's observation is a row that holds everything one step says of its agents.

    Its methods return observations and rewards by group, and in the infos everything else that rows hold.
    """

    def __init__(self, assembled: Assembled) -> None:
        super().__init__(assembled)
        assert isinstance(self._obs, RowNode)
        self.layout = self._obs.layout
        self._slots = self.layout.slots()
        self._bounds = [(name, slot.start, slot.stop) for name, slot in self._slots.items()]

    def recv(self, min_envs: int | None = None, timeout: float | None = None, *, _copies: bool | None = None) -> Any:
        return AgentBatch._make(super().recv(min_envs, timeout, _copies=_copies))

    def _read(self, copies: bool, reader: InfoReader | None) -> Rows:
        try:
            return self._split_rows(super()._read(copies, reader), copies)
        except (EnvError, CannotTravel) as error:
            if isinstance(error.batch, Batch):
                error.batch = AgentBatch._make(self._split_rows((*error.batch, 0), copies)[:6])
            raise

    def _all_after_reset(self, ids: Array, infos: Infos, copies: bool) -> tuple[Any, Infos]:
        rows, infos = super()._all_after_reset(ids, infos, copies)
        obs, _, infos = self._by_group(rows, infos, None, copies)
        return obs, infos

    def _split_rows(self, rows: Rows, copies: bool) -> Rows:
        ids, obs, _, terminated, truncated, infos, unusual = rows
        by_group, rewards, infos = self._by_group(obs, infos, truncated, copies)
        return ids, by_group, rewards, terminated, truncated, infos, unusual

    def _by_group(
        self, rows: Any, infos: Infos, truncated: Bools | None, copies: bool
    ) -> tuple[ByGroup, Rewards, Infos]:
        rewards, flags = rows[REWARDS], rows[FLAGS]
        if not copies:  # only observations are views, as from `VectorEnv`
            rewards, flags = rewards.copy(), flags.copy()
        if infos:
            final = infos.pop(_FINAL_ROWS, None)
            if truncated is not None and "_restarted" in infos and (lost := infos["_restarted"] & truncated).any():
                if final is None:
                    rewards, flags = _cut_off(rewards, flags, lost)
                else:
                    final = dict(enumerate(final))
                    final[REWARDS], final[FLAGS] = _cut_off(final[REWARDS], final[FLAGS], lost)
            if final is not None:
                over = infos["_final_obs"]
                rewards = np.where(over[:, None], final[REWARDS], rewards)
                flags = flags.copy()
                flags[over, TERMINATED:] = final[FLAGS][over, TERMINATED:]
                infos["final_obs"] = self._obs_by_group(final)
                _, about = self._split(final[REWARDS], final[FLAGS])
                infos["final_info"] |= self._about_agents(final, about)
        by_group, about = self._split(rewards, flags)
        infos |= self._about_agents(rows, about)
        return self._obs_by_group(rows), by_group, infos

    def _split(self, rewards: Array, flags: Array) -> tuple[Rewards, Infos]:
        """Rewards by group, and infos with the flags by group."""
        return split_agents(rewards, flags, self._bounds, FLAG_NAMES)

    def _obs_by_group(self, rows: Any) -> ByGroup:
        obs = dict(zip(self._slots, rows[OBS], strict=True))
        if rows[SHARED]:
            obs["shared"] = rows[SHARED]
        return obs

    def _about_agents(self, rows: Any, about: Infos) -> Infos:
        """`about`, with the other parts of a row that belong into infos: action masks and the state."""
        if any_true(rows[HAS_MASKS]):
            about["action_mask"] = dict(zip(self.layout.mask_shapes, rows[MASKS], strict=True))
        if self.layout.state_space is not None:
            about["state"], about["_state"] = rows[STATE], np.ones(len(rows[REWARDS]), np.bool_)
        return about

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
        infos[_FINAL_ROWS] = self._obs.batch(self._backend.slab.final_obs, take, [])


def _cut_off(rewards: Array, flags: Array, lost: Bools) -> tuple[Array, Array]:
    """Copies of `rewards` and `flags` in which the envs `lost` truncate all agents that were left.

    lost: bool ``[n]``, the envs that were restarted. Their rows repeat the last ones, so their rewards become 0.
    """
    rewards, flags = rewards.copy(), flags.copy()
    left = flags[lost, ALIVE] & ~flags[lost, TERMINATED] & ~flags[lost, TRUNCATED]
    rewards[lost], flags[lost] = 0, False
    flags[lost, ALIVE] = flags[lost, TRUNCATED] = left
    return rewards, flags


def any_true(flags: Bools) -> bool:
    """Whether any flag is True; ``flags.any()`` takes five times as long for a few flags."""
    return 1 in flags.tobytes()
