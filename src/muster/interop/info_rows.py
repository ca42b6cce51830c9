"""Infos of a vector env as one dict for each env."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from muster.spaces.tree import Array
from muster.transport.infos import InfoColumns, InfoReader, Infos

_ROWS, _FINALS = "info_rows", "finals_by_env"
# An env's number of one of these dtypes nearly always was a Python number before it was stored in a column.
_PYTHON_DTYPES = (np.dtype(np.int64), np.dtype(np.float64), np.dtype(np.bool_))


class RowReader(InfoReader):
    """Reads infos as one dict for each env, which the values of other envs cannot change; numbers are Python's own.

    `info_rows` and `finals_by_env` return the dicts. NumPy scalars of int64, float64 and bool become Python's, too.
    """

    in_core = False

    def __init__(self, columns: InfoColumns) -> None:
        super().__init__(columns, _pythons_own)

    def read_plain(self, ids: Array) -> Infos | None:
        plan = self.columns.plan_for(ids)
        if plan.columns is None:
            return None
        rows: list[Infos] = [{} for _ in range(len(ids))]
        with_infos = np.flatnonzero(plan.provided).tolist()
        for key, _, column in plan.columns:
            column = column[ids]
            values = column.tolist() if column.ndim == 1 and column.dtype in _PYTHON_DTYPES else column
            for row in with_infos:
                rows[row][key] = values[row]
        return {_ROWS: rows}

    def read(self, ids: Array, objects: Sequence[Iterator[Any]]) -> Infos:
        plain = self.read_plain(ids)
        return plain or {_ROWS: [self.last(env, rest) for env, rest in zip(ids.tolist(), objects, strict=True)]}

    def add(self, infos: Infos, info: Infos, row: int, count: int) -> None:
        infos.setdefault(_ROWS, [{} for _ in range(count)])[row] |= info
        if row in (finals := finals_by_env(infos)):
            finals[row][1].update(info)

    def add_final(self, infos: Infos, obs: Any, info: Infos, row: int, count: int) -> None:
        infos.setdefault(_FINALS, {})[row] = obs, info


def _pythons_own(value: Any) -> Any:
    return value.item() if value.dtype in _PYTHON_DTYPES else value


def info_rows(infos: Infos, num_envs: int) -> list[Infos]:
    """One info for each env, with the keys that the env itself provided. infos: as `RowReader` reads them."""
    rows: list[Infos] | None = infos.get(_ROWS)
    return [{} for _ in range(num_envs)] if rows is None else rows


def finals_by_env(infos: Infos) -> dict[int, tuple[Any, Infos]]:
    """The observation and info of each step that ended an episode, by env. infos: as `RowReader` reads them."""
    finals: dict[int, tuple[Any, Infos]] = infos.get(_FINALS, {})
    return finals
