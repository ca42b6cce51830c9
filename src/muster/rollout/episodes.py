"""Trajectories and episodes of a rollout, computed once it is complete."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from muster.rollout.fields import Array
from muster.rollout.storage import Storage


class Episodes(NamedTuple):
    """The K episodes that ended in a batch, by time, then env.

    returns: float64 ``[K]``, the sum of rewards; for a group of agents ``[K, A]``.  lengths: int64 ``[K]``, env steps.
    env_ids: int64 ``[K]``.  Episodes cut by ``max_frames_per_traj`` count; those lost with a worker do not.
    """

    returns: npt.NDArray[np.float64]
    lengths: npt.NDArray[np.int64]
    env_ids: npt.NDArray[np.int64]

    @property
    def means(self) -> npt.NDArray[np.float64]:
        """The return of each episode, float64 ``[K]``; with agents the mean over all of an env's."""
        return self.returns if self.returns.ndim == 1 else self.returns.mean(-1)


class TrajectoryCounter:
    """Numbers trajectories across batches: those that start together by env, later ones by time, then env."""

    def __init__(self, num_envs: int) -> None:
        self.next_id = 0
        self._current = np.zeros(num_envs, np.int64)

    def count(self, begins: Array, first_env: int = 0) -> npt.NDArray[np.int64]:
        """Ids, int64 ``[T, N]``, for N of the envs. begins: bool ``[T, N]``, the row is the first of its trajectory."""
        current = self._current[first_env : first_env + begins.shape[1]]
        ids = np.where(begins, np.cumsum(begins.ravel()).reshape(begins.shape) - 1 + self.next_id, -1)
        self.next_id += int(begins.sum())
        ids[0] = np.where(begins[0], ids[0], current)
        # Ids of an env only grow, so the last one that began is the largest so far.
        np.maximum.accumulate(ids, axis=0, out=ids)
        current[:] = ids[-1]
        return ids


class EpisodeCounter:
    """Adds up returns and lengths across batches."""

    def __init__(self, num_envs: int) -> None:
        self._returns = np.zeros(num_envs)
        self._lengths = np.zeros(num_envs, np.int64)

    def count(self, storage: Storage, first_env: int = 0) -> Episodes:
        """The episodes that end in a storage of N of the envs. Masked rows count for nothing."""
        T, N, mask = storage.T, storage.N, storage.mask
        rewards = storage.episode_rewards()
        agents = rewards.shape[2:]
        if self._returns.shape[1:] != agents:
            self._returns = np.zeros((len(self._lengths), *agents))
        own = slice(first_env, first_env + N)
        # Env by env, so that an episode's rows are neighbours: segments of one flat array.
        flat = np.where(mask.reshape(T, N, *[1] * len(agents)), rewards, 0.0).astype(np.float64)
        flat = flat.swapaxes(0, 1).reshape(N * T, *agents)
        firsts = storage.begins.T.copy()
        firsts[:, 0] = True
        starts = np.flatnonzero(firsts)
        returns = np.add.reduceat(flat, starts)
        lengths = np.add.reduceat(mask.T.ravel().astype(np.int64), starts)
        goes_on = ~storage.begins[0]
        first_segments = np.searchsorted(starts, np.arange(N) * T)[goes_on]
        returns[first_segments] += self._returns[own][goes_on]
        lengths[first_segments] += self._lengths[own][goes_on]
        last_segments = np.searchsorted(starts, np.arange(1, N + 1) * T) - 1
        self._returns[own], self._lengths[own] = returns[last_segments], lengths[last_segments]

        ends = np.flatnonzero(((storage.terminated | storage.truncated) & mask).T)
        ends = ends[np.lexsort((ends // T, ends % T))]
        segments = np.searchsorted(starts, ends, side="right") - 1
        return Episodes(returns[segments], lengths[segments], ends // T + first_env)
