"""Trajectories and episodes of a rollout, computed once it is complete."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from muster.rollout.fields import Array


class Episodes(NamedTuple):
    """The K episodes that ended in a batch, by time, then env.

    returns: float64 ``[K]``, the sum of rewards; for a group of agents ``[K, A]``.  lengths: int64 ``[K]``, env steps.
    env_ids: int64 ``[K]``.  Episodes cut by ``max_frames_per_traj`` count; those lost with a worker do not.
    """

    returns: npt.NDArray[np.float64]
    lengths: npt.NDArray[np.int64]
    env_ids: npt.NDArray[np.int64]


class TrajectoryCounter:
    """Numbers trajectories across batches: those that start together by env, later ones by time, then env."""

    def __init__(self, num_envs: int) -> None:
        self.next_id = 0
        self._current = np.zeros(num_envs, np.int64)

    def count(self, begins: Array) -> npt.NDArray[np.int64]:
        """int64 ``[T, N]``; begins: bool ``[T, N]``, the row is the first of its trajectory."""
        ids = np.where(begins, np.cumsum(begins.ravel()).reshape(begins.shape) - 1 + self.next_id, -1)
        self.next_id += int(begins.sum())
        ids[0] = np.where(begins[0], ids[0], self._current)
        # Ids of an env only grow, so the last one that began is the largest so far.
        np.maximum.accumulate(ids, axis=0, out=ids)
        self._current = ids[-1].copy()
        return ids


class EpisodeCounter:
    """Adds up returns and lengths across batches."""

    def __init__(self, num_envs: int) -> None:
        self._returns = np.zeros(num_envs)
        self._lengths = np.zeros(num_envs, np.int64)

    def count(self, rewards: Array, begins: Array, done: Array, mask: Array) -> Episodes:
        """rewards: ``[T, N]`` or ``[T, N, A]``; begins, done, mask: bool ``[T, N]``. Masked rows count for nothing."""
        T, N = done.shape
        agents = rewards.shape[2:]
        if self._returns.shape != (N, *agents):
            self._returns = np.zeros((N, *agents))
        # Env by env, so that an episode's rows are neighbours: segments of one flat array.
        flat = np.where(mask.reshape(T, N, *[1] * len(agents)), rewards, 0.0).astype(np.float64)
        flat = flat.swapaxes(0, 1).reshape(N * T, *agents)
        firsts = begins.T.copy()
        firsts[:, 0] = True
        starts = np.flatnonzero(firsts)
        returns = np.add.reduceat(flat, starts)
        lengths = np.add.reduceat(mask.T.ravel().astype(np.int64), starts)
        goes_on = ~begins[0]
        first_segments = np.searchsorted(starts, np.arange(N) * T)[goes_on]
        returns[first_segments] += self._returns[goes_on]
        lengths[first_segments] += self._lengths[goes_on]
        last_segments = np.searchsorted(starts, np.arange(1, N + 1) * T) - 1
        self._returns, self._lengths = returns[last_segments], lengths[last_segments]

        ends = np.flatnonzero((done & mask).T)
        ends = ends[np.lexsort((ends // T, ends % T))]
        segments = np.searchsorted(starts, ends, side="right") - 1
        return Episodes(returns[segments], lengths[segments], ends // T)
