"""The memory of one rollout, written in place as the envs step, and the batch over it.

Memory is ordered env by env, as batches ``[N, T]`` are, so that a batch lies on it as it is. What works step by step
sees the same arrays with time first, ``[T, N, ...]``.
"""

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

_NAMES = [None, "time"]
Figures = dict[tuple[str, str], float | str]
"""By name and agent, "" for the env itself: numbers of infos, and the class of what is none."""
LastInfos = dict[tuple[int, int], Figures]
"""The `figures_in` last infos, by the step and the env of episodes that may have ended there."""
Allocate = Callable[[tuple[int, ...], Field], Array]


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

    observations: for each observation field ``[T, N, ...]``, what each action is for.
    last: for each observation field ``[N, ...]``, what follows the last action.
    next_observations: for each observation field ``[T, N, ...]``, what follows each action: the final observation
        where an episode ended. Empty with ``compact``.
    rewards: for each reward field ``[T, N, ...]``: rewards, and the ends of single agents.
    outputs: by key what the policy provided, ``[T, N, ...]`` tensors.
    terminated, truncated, mask, begins: bool ``[T, N]``; begins: the row is the first of a trajectory.

    allocate: returns the memory of a field, ``[N, *lead, ...]``; called in a fixed order. None: new arrays.
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

        def rows(field: Field) -> Array:
            own = np.empty((N, T, *field.shape), field.dtype) if allocate is None else allocate((T,), field)
            return own.swapaxes(0, 1)

        def rows_and_last(field: Field) -> tuple[Array, Array]:
            if allocate is not None:
                return rows(field), allocate((), field)
            # As one array, so that all arrays are together no more than twice the largest: glibc then keeps their
            # memory for the next storage. Given back to the kernel, it would cost a page fault for each page again.
            both = np.empty((N * (T + 1), *field.shape), field.dtype)
            return both[: N * T].reshape(N, T, *field.shape).swapaxes(0, 1), both[N * T :]

        self.T, self.N = T, N
        self.compact = compact
        self._observation_fields = observation_fields
        self._reward_fields = reward_fields
        observed = [rows_and_last(field) for field in observation_fields]
        self.observations, self.last = [one[0] for one in observed], [one[1] for one in observed]
        self.next_observations = [] if compact else [rows(field) for field in observation_fields]
        self.rewards = [rows(field) for field in reward_fields]
        self.terminated, self.truncated, self.mask, self.begins = (rows(field) for field in self.FLAGS)
        if allocate is None:
            self.clear_flags()
        self.outputs: dict[Key, Tensor] = {}
        self.finals: list[Final] = []
        self.losses: list[Loss] = []
        self.infos: LastInfos = {}

    def add_output(self, key: Key, like: Tensor) -> Tensor:
        """Memory ``[T, N, ...]`` for the policy's output under `key`, new where there is none yet.

        like: one step's output for some envs.
        """
        if key not in self.outputs:
            self.outputs[key] = torch.empty((self.N, self.T, *like.shape[1:]), dtype=like.dtype).transpose(0, 1)
        return self.outputs[key]

    def observations_before(self, t: int) -> list[Array]:
        """For each observation field ``[N, ...]`` what step t acts on; t = T: what follows the last action."""
        return [rows[t] for rows in self.observations] if t < self.T else self.last

    def columns(self) -> list[Array]:
        """All arrays ``[N, ...]`` that `compact` leaves, env first: one env's part of each is one run of memory."""
        flags = self.terminated, self.truncated, self.mask, self.begins
        outputs = [rows.numpy() for rows in self.outputs.values()]
        rows = (*self.observations, *self.rewards, *flags, *outputs)
        return [*(one.swapaxes(0, 1) for one in rows), *self.last]

    def write_columns(self, part: slice, columns: Sequence[Array]) -> None:
        """Writes those of the envs `part`. What follows each action is what the next is for, until `add_ends`."""
        for own, column in zip(self.columns(), columns, strict=True):
            own[part] = column
        for after, rows, last in zip(self.next_observations, self.observations, self.last, strict=False):
            after[:-1, part], after[-1, part] = rows[1:, part], last[part]

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
        for row in self.last:
            row[part] = 0
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
        for row in self.last:
            row[:] = 0
        for tensor in self.outputs.values():
            tensor[since:] = 0

    def write(self, t: int, part: slice | Array, rows: StepRows) -> None:
        """Writes step t of the envs `part`, a slice or their ids."""
        if (after := t + 1) < self.T:
            for array, value in zip(self.observations, rows.observations, strict=True):
                array[after, part] = value
        else:
            for row, value in zip(self.last, rows.observations, strict=True):
                row[part] = value
        for array, value in zip(self.next_observations, rows.observations, strict=False):
            array[t, part] = value
        for array, value in zip(self.rewards, rows.rewards, strict=True):
            array[t, part] = value
        self.terminated[t, part] = rows.terminated
        self.truncated[t, part] = rows.truncated

    def write_final(self, final: Final) -> None:
        """Writes the final observation of an episode. Its env has been reset already."""
        if self.compact:
            self.finals.append(final)
        for array, leaf in zip(self.next_observations, final.leaves, strict=False):
            array[final.time, final.env] = leaf

    def write_loss(self, loss: Loss) -> None:
        """Masks the row in which an env failed, and keeps the reason."""
        self.losses.append(loss)
        self.mask[loss.time, loss.env] = False

    def add_ends(self, finals: list[Final], losses: list[Loss], infos: LastInfos, first_env: int) -> None:
        """Adds the ends of episodes of envs from `first_env` on, which others count from 0."""
        for one in finals:
            self.write_final(Final(one.time, first_env + one.env, one.leaves))
        self.losses += [Loss(one.time, first_env + one.env, one.reason) for one in losses]
        self.infos |= {(time, first_env + env): figures for (time, env), figures in infos.items()}

    def to_batch(self, traj_ids: Array) -> TensorDict:
        """The batch ``[N, T]``, on the memory of this storage. traj_ids: int64 ``[T, N]``.

        Keys: the observation fields and the policy's outputs at the root; under "next" the reward fields, the flags
        and, without ``compact``, the next observations; under "collector" all that is the collector's own.
        """
        values: dict[Key, Any] = {}
        for i, field in enumerate(self._observation_fields):
            values[field.key] = _env_first(self.observations[i])
            if not self.compact:
                values["next", *field.key] = _env_first(self.next_observations[i])
        for field, array in zip(self._reward_fields, self.rewards, strict=True):
            values["next", *field.key] = _env_first(array).unsqueeze(-1)
        terminated, truncated = _env_first(self.terminated), _env_first(self.truncated)
        for name, flags in (("terminated", terminated), ("truncated", truncated), ("done", terminated | truncated)):
            values["next", name] = flags.unsqueeze(-1)
        # Keys that the policy provides under "next" join those of the env.
        values |= {key: rows.transpose(0, 1) for key, rows in self.outputs.items()}
        values["collector", "traj_ids"] = _env_first(traj_ids).contiguous()
        values["collector", "mask"] = _env_first(self.mask)
        if self.compact:
            values |= self._sparse()
        return TensorDict(values, batch_size=(self.N, self.T), names=_NAMES)

    def _sparse(self) -> dict[Key, Any]:
        values: dict[Key, Any] = {}
        for i, field in enumerate(self._observation_fields):
            leaves = [one.leaves[i] for one in self.finals]
            rows = np.array(leaves, field.dtype).reshape(len(leaves), *field.shape)
            values["collector", "final", *field.key] = UnbatchedTensor(torch.from_numpy(rows))
            values["collector", "last", *field.key] = UnbatchedTensor(torch.from_numpy(self.last[i]))
        where = np.array([(one.env, one.time) for one in self.finals], np.int64).reshape(-1, 2)
        values["collector", "final_at"] = UnbatchedTensor(torch.from_numpy(where))
        return values


def _env_first(rows: Array) -> Tensor:
    """The tensor ``[N, T, ...]`` of rows ``[T, N, ...]``."""
    return torch.from_numpy(rows.swapaxes(0, 1))


def next_observations(batch: TensorDict) -> TensorDict:
    """The observations after each action of a ``compact`` batch ``[N, T]``, final ones included: ``[N, T]``.

    batch: as ``Collector(compact=True)`` yields it, whole. Raises UsageError for others.

    >>> import muster
    >>> from muster.rollout import next_observations
    >>> with muster.Collector("CartPole-v1", None, num_envs=2, frames_per_batch=16, compact=True) as collector:
    ...     following = next_observations(collector.rollout())
    >>> following["observation"].shape
    torch.Size([2, 8, 4])
    """
    last = batch.get(("collector", "last"), None)
    if last is None or batch.batch_dims != 2:
        raise UsageError(
            "next_observations: expected a whole batch [N, T] of a collector with compact=True; other batches hold "
            '("next", "observation") already'
        )
    at = batch["collector", "final_at"].unbind(-1)
    values: dict[Key, Tensor] = {}
    for key in last.keys(include_nested=True, leaves_only=True):
        key = key if isinstance(key, tuple) else (key,)
        rows = torch.cat([batch[key][:, 1:], last[key].unsqueeze(1)], 1)
        rows[at] = batch[("collector", "final", *key)]
        values[key] = rows
    return TensorDict(values, batch_size=batch.batch_size, names=_NAMES)
