"""Trajectories and episodes of a rollout, computed once it is complete."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from muster.introspection import type_name
from muster.rollout.fields import Array
from muster.rollout.storage import Figures, Storage

EPISODE_INFO = ("is_success",)  # what Stable-Baselines3 reads


class Episodes(NamedTuple):
    """The K episodes that ended in a batch, by time, then env.

    returns: float64 ``[K]``, the sum of rewards; for a group of agents ``[K, A]``.  lengths: int64 ``[K]``, env steps.
    env_ids: int64 ``[K]``.  Episodes cut by ``max_frames_per_traj`` count; those lost with a worker do not.
    infos: by the names of ``episode_info`` float64 ``[K]``, the number in the episode's last info, nan where it has
    none; with agents the mean over the last infos that have one.
    """

    returns: npt.NDArray[np.float64]
    lengths: npt.NDArray[np.int64]
    env_ids: npt.NDArray[np.int64]
    infos: Mapping[str, npt.NDArray[np.float64]] = {}

    def __repr__(self) -> str:
        """In a line the mean and the deviation of the returns, and the mean of the lengths."""
        if self.lengths.size == 0:
            return f"<{type(self).__name__}: none>"
        named = {"return": f"{self.means.mean():.4g} +- {self.means.std():.2g}", "length": f"{self.lengths.mean():.4g}"}
        named |= {name: f"{one:.3g}" for name, one in self.figures.items()}
        found = ", ".join(f"{name} {one}" for name, one in named.items())
        return f"<{type(self).__name__}: {self.lengths.size} episodes, means: {found}>"

    @property
    def means(self) -> npt.NDArray[np.float64]:
        """The return of each episode, float64 ``[K]``; with agents the mean over all of an env's."""
        return self.returns if self.returns.ndim == 1 else self.returns.mean(-1)

    @property
    def figures(self) -> dict[str, float]:
        """The means of `infos` over the episodes that have a number; that of "is_success" is ``success_rate``."""
        return {reported(name): float(np.nanmean(one)) for name, one in self.infos.items() if not np.isnan(one).all()}


def reported(name: str) -> str:
    """The name of the reported mean of a figure of last infos."""
    return "success_rate" if name == "is_success" else name


def figures_in(infos: Mapping[str, Any], row: int, names: Sequence[str], *, of_agents: bool) -> Figures:
    """The figures of the info of `row` under `names`, without None; with `of_agents` those of its agents, too."""
    parts = {"": infos, **(infos.get("agent_infos", {}) if of_agents else {})}
    held = {
        (name, agent): part[name] if isinstance(part[name], dict) else part[name][row]
        for agent, part in parts.items()
        for name in (names if isinstance(part, dict) else ())
        if name in part and part.get(f"_{name}", {row: True})[row]  # other libraries' vector envs may have no "_name"
    }
    return {key: _number(value) for key, value in held.items() if value is not None}


def _number(value: Any) -> float | str:
    with suppress(Exception):  # of an object of the env's
        array = np.asarray(float(value) if isinstance(value, int) else value)
        if array.size == 1 and array.dtype.kind in "biuf":
            return float(array.item())
        return f"{type_name(value)} of shape {array.shape}" if array.ndim else type_name(value)
    return type_name(value)


class TrajectoryCounter:
    """Numbers trajectories across batches: those that start together by env, later ones by time, then env."""

    def __init__(self, num_envs: int) -> None:
        self.next_id = 0
        self._current = np.zeros(num_envs, np.int64)

    def state(self) -> dict[str, Any]:
        """The numbers to go on from, where envs go on, too."""
        return {"traj_ids": torch.from_numpy(self._current.copy())}

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`."""
        self._current[:] = state["traj_ids"].numpy()

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
    """Adds up returns and lengths across batches, and finds the figures of `names` in last infos.

    notes: what the user has to know of these names, each once, since the last `count`.
    """

    def __init__(self, num_envs: int, names: Sequence[str]) -> None:
        self._returns = np.zeros(num_envs)
        self._lengths = np.zeros(num_envs, np.int64)
        self._names, self._unsaid, self.notes = names, {*names}, list[str]()

    def state(self) -> dict[str, Any]:
        """The sums of episodes that have not ended, where envs go on."""
        return {"returns": torch.from_numpy(self._returns.copy()), "lengths": torch.from_numpy(self._lengths.copy())}

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on from `state`."""
        returns, self._lengths[:] = state["returns"].numpy(), state["lengths"].numpy()
        self._returns = returns.reshape(len(self._lengths), *returns.shape[1:]).copy()

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
        infos = self._infos([storage.infos.get((at % T, at // T), {}) for at in ends.tolist()])
        return Episodes(returns[segments], lengths[segments], ends // T + first_env, infos)

    def _infos(self, figures: Sequence[Figures]) -> dict[str, npt.NDArray[np.float64]]:
        """By name the numbers of the K episodes that ended, ``[K]``."""
        infos, self.notes = dict[str, npt.NDArray[np.float64]](), []
        for name in self._names:
            found = [[one for (of, _), one in own.items() if of == name] for own in figures]
            numbers = [[one for one in some if not isinstance(one, str)] for some in found]
            infos[name] = np.array([sum(some) / len(some) if some else math.nan for some in numbers])
            if figures and name in self._unsaid and (any(found) or name not in EPISODE_INFO):
                self._unsaid.discard(name)
                if kinds := [one for some in found for one in some if isinstance(one, str)]:
                    self.notes.append(f"{name!r} is neither number nor flag, but {kinds[0]}: it is left out")
                elif not any(found):
                    self.notes.append(f"no last info of an episode has {name!r} so far; it is left out until one does")
        return infos
