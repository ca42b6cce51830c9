"""The memory of one rollout: arrays ``[T+1, N, ...]``, written in place as the envs step, and the batch over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict, UnbatchedTensor  # type: ignore[import-untyped]  # ships no types
from torch import Tensor

from muster.errors import UsageError
from muster.rollout.env_side import StepRows
from muster.rollout.fields import Array, Field, Key

_NAMES = ["time", None]
Allocate = Callable[[int, Field], Array]


class Final(NamedTuple):
    """The observation that ended an episode of env `env` with step `time`; one array for each observation field."""

    time: int
    env: int
    leaves: list[Array]


class Loss(NamedTuple):
    """The failure of env `env` in step `time`, for `reason`; the env was replaced."""

    time: int
    env: int
    reason: str


class Storage:
    """The arrays of one rollout of T steps of N envs.

    observations: for each observation field ``[T+1, N, ...]``; row T is what follows the last action.
    next_observations: for each observation field ``[T, N, ...]``, what follows each action: the final observation
        where an episode ended. Empty with ``compact``.
    rewards: for each reward field ``[T, N, ...]``: rewards, and the ends of single agents.
    outputs: by key what the policy provided, ``[T, N, ...]`` tensors.
    terminated, truncated, mask, begins: bool ``[T, N]``; begins: the row is the first of a trajectory.

    allocate: returns the memory of a field, ``[rows, N, ...]``; called in a fixed order. None: new arrays.
    """

    FLAGS = tuple(Field((name,), (), np.dtype(np.bool_)) for name in ("terminated", "truncated", "mask", "begins"))

    def __init__(
        self,
        T: int,
        N: int,
        observation_fields: Sequence[Field],
        reward_fields: Sequence[Field],
        *,
        compact: bool,
        allocate: Allocate | None = None,
    ) -> None:
        new = allocate or (lambda rows, field: np.empty((rows, N, *field.shape), field.dtype))
        self.T, self.N = T, N
        self.compact = compact
        self._observation_fields = observation_fields
        self._reward_fields = reward_fields
        self.observations = [new(T + 1, field) for field in observation_fields]
        self.next_observations = [] if compact else [new(T, field) for field in observation_fields]
        self.rewards = [new(T, field) for field in reward_fields]
        self.terminated, self.truncated, self.mask, self.begins = (new(T, field) for field in self.FLAGS)
        if allocate is None:
            self.clear_flags()
        self.outputs: dict[Key, Tensor] = {}
        self.finals: list[Final] = []
        self.losses: list[Loss] = []

    def add_output(self, key: Key, like: Tensor) -> Tensor:
        """New memory ``[T, N, ...]`` for the policy's output under `key`; `like`: one step's output for some envs."""
        self.outputs[key] = torch.empty((self.T, self.N, *like.shape[1:]), dtype=like.dtype)
        return self.outputs[key]

    def clear_flags(self) -> None:
        """Clears all flags: a row ends nothing, begins nothing and is not masked until it is written."""
        for flags in (self.terminated, self.truncated, self.begins):
            flags[:] = False
        self.mask[:] = True

    def blank(self, part: slice) -> None:
        """Masks all rows of the envs `part`, which were lost, and sets their numbers to 0.

        The episodes of these envs and of their agents end truncated with row 0.
        """
        for flags in (self.terminated, self.truncated, self.begins, self.mask):
            flags[:, part] = False
        for array in (*self.observations, *self.next_observations, *self.rewards):
            array[:, part] = 0
        self.truncated[0, part] = True
        for array, field in zip(self.rewards, self._reward_fields, strict=True):
            if field.key[-1] in ("truncated", "done"):
                array[0, part] = True
        for tensor in self.outputs.values():
            tensor[:, part] = 0

    def episode_rewards(self) -> Array:
        """The rewards that returns sum up: ``[T, N]``; with agents ``[T, N, agents]``, all groups side by side."""
        parts = [
            array for array, field in zip(self.rewards, self._reward_fields, strict=True) if field.key[-1] == "reward"
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)

    def leave_out(self, since: int) -> None:
        """Masks the rows from `since` on, which were never stepped, and sets their numbers to 0."""
        self.mask[since:] = False
        for array in (*(rows[1:] for rows in self.observations), *self.next_observations, *self.rewards):
            array[since:] = 0
        for tensor in self.outputs.values():
            tensor[since:] = 0

    def write(self, t: int, part: slice | Array, rows: StepRows) -> None:
        """Writes step t of the envs `part`, a slice or their ids."""
        for array, value in zip(self.observations, rows.observations, strict=True):
            array[t + 1, part] = value
        for array, value in zip(self.next_observations, rows.observations, strict=False):
            array[t, part] = value
        for array, value in zip(self.rewards, rows.rewards, strict=True):
            array[t, part] = value
        self.terminated[t, part] = rows.terminated
        self.truncated[t, part] = rows.truncated

    def write_final(self, final: Final) -> None:
        """Writes the final observation of an episode whose env has been reset already."""
        if self.compact:
            self.finals.append(final)
        for array, leaf in zip(self.next_observations, final.leaves, strict=False):
            array[final.time, final.env] = leaf

    def write_loss(self, loss: Loss) -> None:
        """Masks the row in which an env failed, and keeps the reason."""
        self.losses.append(loss)
        self.mask[loss.time, loss.env] = False

    def to_batch(self, traj_ids: Array) -> TensorDict:
        """The batch ``[T, N]``, on the memory of this storage. traj_ids: int64 ``[T, N]``.

        Keys: the observation fields and the policy's outputs at the root; under "next" the reward fields, the flags
        and, without ``compact``, the next observations; under "collector" all that is the collector's own.
        """
        shape = (self.T, self.N)
        done = self.terminated | self.truncated
        values: dict[Key, Any] = {}
        for i, field in enumerate(self._observation_fields):
            values[field.key] = torch.from_numpy(self.observations[i][: self.T])
            if not self.compact:
                values["next", *field.key] = torch.from_numpy(self.next_observations[i])
        for field, array in zip(self._reward_fields, self.rewards, strict=True):
            values["next", *field.key] = torch.from_numpy(array).unsqueeze(-1)
        for name, flags in (("terminated", self.terminated), ("truncated", self.truncated), ("done", done)):
            values["next", name] = torch.from_numpy(flags).unsqueeze(-1)
        values |= self.outputs  # keys that the policy provides under "next" join those of the env
        values["collector", "traj_ids"] = torch.from_numpy(traj_ids)
        values["collector", "mask"] = torch.from_numpy(self.mask)
        if self.compact:
            values |= self._sparse()
        return TensorDict(values, batch_size=shape, names=_NAMES)

    def _sparse(self) -> dict[Key, Any]:
        values: dict[Key, Any] = {}
        for i, field in enumerate(self._observation_fields):
            leaves = [np.asarray(one.leaves[i]) for one in self.finals]
            rows = np.stack(leaves) if leaves else np.empty((0, *field.shape), field.dtype)
            values["collector", "final", *field.key] = UnbatchedTensor(torch.from_numpy(rows))
            values["collector", "last", *field.key] = UnbatchedTensor(torch.from_numpy(self.observations[i][self.T]))
        where = np.array([(one.time, one.env) for one in self.finals], np.int64).reshape(-1, 2)
        values["collector", "final_at"] = UnbatchedTensor(torch.from_numpy(where))
        return values


def next_observations(batch: TensorDict) -> TensorDict:
    """The observations after each action of a ``compact`` batch ``[T, N]``, final ones included: ``[T, N]``.

    Raises UsageError for a batch that is not a whole one from ``Collector(compact=True)``.
    """
    last = batch.get(("collector", "last"), None)
    if last is None or batch.batch_dims != 2:
        raise UsageError(
            "next_observations: expected a whole batch [T, N] of a collector with compact=True; other batches hold "
            '("next", "observation") already'
        )
    at = batch["collector", "final_at"].unbind(-1)
    values: dict[Key, Tensor] = {}
    for key in last.keys(include_nested=True, leaves_only=True):
        key = key if isinstance(key, tuple) else (key,)
        rows = torch.cat([batch[key][1:], last[key].unsqueeze(0)])
        rows[at] = batch[("collector", "final", *key)]
        values[key] = rows
    return TensorDict(values, batch_size=batch.batch_size, names=_NAMES)
