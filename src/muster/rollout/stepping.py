"""The loop: T steps of all envs into a storage, with episodes that end, are cut or are lost on the way."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode

from muster.errors import ConfigError, ReplayDiffers, UsageError
from muster.hosts.env_states import EnvState
from muster.rollout.env_side import EnvSide, StepRows
from muster.rollout.episodes import figures_in
from muster.rollout.fields import Array
from muster.rollout.policies import Actor
from muster.rollout.storage import Figures, Final, Loss, Storage
from muster.vector.multi_agent import any_true

_STATE = ("state", "begins", "resets", "frames", "figures", "memory")  # of an env


class Stepping:
    """Carries the envs' state from one storage to the next.

    parts: the envs that one actor acts for at a time: all, or with `overlap` two halves that take turns, the envs of
    one stepping while the actor computes for the other.  names: of figures in last infos, see `figures_in`.
    """

    def __init__(self, envs: EnvSide, *, overlap: bool, max_frames_per_traj: int | None, names: Sequence[str]) -> None:
        if overlap and (envs.num_envs < 2 or not envs.takes_turns):
            raise ConfigError(
                "overlap=True needs a muster.VectorEnv of at least 2 envs, got a "
                f"{type(envs.envs).__name__} of {envs.num_envs}"
            )
        N = envs.num_envs
        self.parts = [slice(0, N // 2), slice(N // 2, N)] if overlap else [slice(0, N)]
        self._envs = envs
        self._max_frames = max_frames_per_traj
        self._names, self._figures = names, dict[int, Figures]()  # by env those of its agents that have ended
        self._next_step = envs.autoreset_mode is AutoresetMode.NEXT_STEP
        self._ids = np.arange(N)
        self._rows: list[Array] | None = None  # the observations that the next actions are for
        self._seeded = True
        self._begins = np.ones(N, np.bool_)  # the next row is a trajectory's first
        self._resets = np.zeros(N, np.bool_)  # the next row is an env's reset (next_step)
        self._quiet = False  # no row begins anything, and none is a reset
        self._frames = np.zeros(N, np.int64)  # of the current trajectory
        self._owed = [0] * len(self.parts)  # envs of each part that still have to answer
        self._at = [0] * len(self.parts)  # the step that they answer for

    def start_afresh(self, *, seeded: bool = False) -> None:
        """Makes the next storage start with new episodes in all envs; `seeded`: with new seeds, too."""
        self._rows = None
        self._seeded = self._seeded or seeded

    def start(self, actors: Sequence[Actor], seeds: Sequence[int] | None) -> list[Array]:
        """The observations before the next storage's first step; resets the envs where they have to start afresh."""
        if self._rows is not None:
            return self._rows
        self._figures.clear()
        self._envs.drop_pending()
        self._owed = [0] * len(self.parts)
        rows = self._envs.reset(seeds if self._seeded else None)
        self._seeded = False
        self._begins[:] = True
        self._resets[:] = False
        self._quiet = False
        self._frames[:] = 0
        for part, actor in zip(self.parts, actors, strict=False):
            actor.forget(self._begins[part] if len(actors) > 1 else self._begins)
        self._rows = rows
        return rows

    def env_states(self, actors: Sequence[Actor]) -> list[dict[str, Any]] | None:
        """For each env all that it goes on from, as plain data; None where the next storage starts new episodes."""
        if not getattr(self._envs.envs, "replayable", False):
            raise UsageError("states of envs need a vector env that keeps them: make_vec(..., replayable=True)")
        if self._rows is None:
            return None
        states = self._envs.envs.get_states()
        figures = [[[*key, value] for key, value in self._figures.get(env, {}).items()] for env in range(len(states))]
        memories = [one for actor in actors for one in actor.memories()]
        columns = states, self._begins.tolist(), self._resets.tolist(), self._frames.tolist(), figures, memories
        return [dict(zip(_STATE, own, strict=True)) for own in zip(*columns, strict=True)]

    def load_env_states(self, states: Sequence[Mapping[str, Any]], actors: Sequence[Actor]) -> ReplayDiffers | None:
        """Goes on from `states`, packed. Returns the error where envs differ, which have begun new episodes."""
        self._envs.drop_pending()
        kept = [EnvState.from_bytes(one["state"].numpy().tobytes()) for one in states]
        rows, differs = self._envs.set_states(kept)
        anew = self._envs.envs.episode_lengths != [one.steps for one in kept]
        self._begins, self._resets, self._frames = (np.array([one[name] for one in states]) for name in _STATE[1:4])
        self._begins[anew], self._resets[anew], self._frames[anew] = True, False, 0
        self._figures = {
            env: {(name, agent): value for name, agent, value in one["figures"]}
            for env, one in enumerate(states)
            if one["figures"] and not anew[env]
        }
        for actor, part in zip(actors, self.parts, strict=True):
            actor.recall([one["memory"] for one in states[part]])
            actor.forget(self._begins[part])
        self._owed, self._seeded, self._quiet = [0] * len(self.parts), False, False
        self._rows = [row.copy() for row in rows]
        return differs

    def fill(
        self,
        storage: Storage,
        actors: Sequence[Actor],
        seeds: Sequence[int] | None,
        stop: Array | None = None,
        *,
        until_end: bool = False,
    ) -> int:
        """Takes T steps of all envs, or fewer once ``stop[0]`` is not 0; returns their number.

        actors: one for each part, or one for all.  until_end: whether to end with the first episode that ends.
        """
        rows = self.start(actors, seeds)
        self._rows = None  # after an error the envs' state is unknown
        for first, row in zip(storage.observations_before(0), rows, strict=True):
            first[:] = row
        for actor in actors:
            actor.begin(storage)
        steps = storage.T
        if len(actors) == 1:
            steps = self._step_all(storage, actors[0], stop, until_end)
        else:
            self._take_turns(storage, actors)
        self._rows = [row.copy() for row in storage.observations_before(steps)]
        return steps

    def _step_all(self, storage: Storage, actor: Actor, stop: Array | None, until_end: bool) -> int:
        everything = slice(0, storage.N)
        for t in range(storage.T):
            if stop is not None and t and stop[0]:
                return t
            rows = self._envs.step(actor.act(t))
            self._write(storage, t, everything, rows)
            begins = self._close_row(storage, t, everything)
            if begins is not None:
                actor.forget(begins)
                if until_end and begins.any():
                    return t + 1
        return storage.T

    def _take_turns(self, storage: Storage, actors: Sequence[Actor]) -> None:
        for t in range(storage.T + 1):
            for i, (part, actor) in enumerate(zip(self.parts, actors, strict=True)):
                if t:
                    self._await(storage, i)
                    begins = self._close_row(storage, t - 1, part)
                    if begins is not None:
                        actor.forget(begins)
                if t < storage.T:
                    self._envs.send(actor.act(t), self._ids[part])
                    self._owed[i], self._at[i] = part.stop - part.start, t

    def _await(self, storage: Storage, i: int) -> None:
        """Waits until part i has answered; answers of the other part go into their own rows."""
        while self._owed[i]:
            ids, rows = self._envs.recv(self._owed[i])
            for k, part in enumerate(self.parts):
                mine = (ids >= part.start) & (ids < part.stop)
                if mine.all():
                    self._write(storage, self._at[k], ids, rows)
                elif mine.any():
                    self._write(storage, self._at[k], ids[mine], rows.select(mine))
                self._owed[k] -= int(mine.sum())

    def _write(self, storage: Storage, t: int, where: slice | Array, rows: StepRows) -> None:
        storage.write(t, where, rows)
        if not rows.infos:
            return
        ids = self._ids[where]
        noted = last = ended = rows.terminated | rows.truncated
        if self._max_frames is not None:
            noted = last = ended | (self._frames[ids] + 1 >= self._max_frames)
        if "agent_infos" in rows.infos and self._envs.has_agents:  # an agent's last info may come before its env's
            flags = (rows.infos[name].values() for name in ("agent_terminated", "agent_truncated"))
            noted = np.logical_or.reduce([last, *(one.any(-1) for one in itertools.chain(*flags))])
        for row, env in zip(np.flatnonzero(noted).tolist(), ids[noted].tolist(), strict=True):
            leaves = self._envs.final(rows.infos, row) if ended[row] else None
            if leaves is not None:
                storage.write_final(Final(t, env, leaves))
            infos = rows.infos if self._next_step or not ended[row] else rows.infos.get("final_info", {})
            held = self._figures.setdefault(env, {})
            held |= figures_in(infos, row, self._names, of_agents=self._envs.has_agents)
            if last[row]:
                storage.infos[t, env] = self._figures.pop(env)
        if "restarted" in rows.infos:
            for row in np.flatnonzero(rows.infos["_restarted"]).tolist():
                storage.write_loss(Loss(t, int(ids[row]), rows.infos["restarted"][row]))

    def _close_row(self, storage: Storage, t: int, part: slice) -> Array | None:
        """Records the meaning of row t of `part` for later rows; returns the envs that begin a trajectory with row t+1.

        Returns bool ``[n]``, or None where there is no such env.
        """
        if self._quiet and not (any_true(storage.terminated[t]) or any_true(storage.truncated[t])):
            return None
        begins = self._begins[part]
        if any_true(begins):
            storage.begins[t, part] = begins
            begins[:] = False
        ended = storage.terminated[t, part] | storage.truncated[t, part]
        if self._next_step:
            resets = self._resets[part]
            storage.mask[t, part] &= ~resets
            begins |= resets
            resets[:] = ended
        else:
            begins |= ended
        if self._max_frames is not None:
            self._cut(storage, t, part, ended, self._max_frames)
        else:
            self._quiet = not (any_true(self._begins) or any_true(self._resets))
        return begins.copy() if any_true(begins) else None

    def _cut(self, storage: Storage, t: int, part: slice, ended: Array, max_frames: int) -> None:
        """Ends trajectories of `max_frames_per_traj` frames: truncated, and reset at once."""
        frames, begins = self._frames[part], self._begins[part]
        frames += 1
        cut = (frames >= max_frames) & ~ended & ~begins
        frames[begins | ended] = 0
        if not cut.any():
            return
        for k in range(len(self.parts)):
            self._await(storage, k)
        ids = self._ids[part][cut]
        for env in ids.tolist():
            if storage.compact:
                storage.write_final(Final(t, env, [row[env].copy() for row in storage.observations_before(t + 1)]))
        storage.truncated[t, ids] = True
        before, after = storage.observations_before(t), storage.observations_before(t + 1)
        self._envs.mark_cut(before, after, [rows[t] for rows in storage.rewards], ids)
        mask = np.zeros(storage.N, np.bool_)
        mask[ids] = True
        for row, rows in zip(storage.observations_before(t + 1), self._envs.reset(None, mask), strict=True):
            row[ids] = rows[ids]
        begins[cut] = True
        frames[cut] = 0
