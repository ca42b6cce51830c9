"""Infos of a vector env as one dict for each env."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from muster.spec import Array
from muster.transport.infos import InfoReader, Infos

_ROWS, _FINALS = "info_rows", "finals_by_env"
# Of these dtypes an env's own number nearly always is Python's.
_PYTHON_DTYPES = (np.dtype(np.int64), np.dtype(np.float64), np.dtype(np.bool_))


def _unmerged(infos: dict[str, Any], num_envs: int) -> list[dict[str, Any]]:
    """One info for each env, with the keys that it gave itself. `infos`: as Gymnasium's vector envs return them."""
    rows: list[dict[str, Any]] = [{} for _ in range(num_envs)]
    for key, column in infos.items():
        given = infos.get(f"_{key}")
        if not isinstance(given, np.ndarray):
            continue  # a mask, whose own key has been dealt with
        values = _unmerged(column, num_envs) if isinstance(column, dict) else column
        for env in np.flatnonzero(given).tolist():
            rows[env][key] = values[env]
    return rows


class RowReader(InfoReader):
    """Reads infos as one dict for each env, which no other env's values have changed; numbers are Python's own.

    Take them out with `info_rows` and `rows_and_finals`. NumPy scalars of int64, float64 and bool become Python's, too.
    """

    def read_plain(self, ids: Array) -> Infos | None:
        plan = self._plan_for(ids)
        if plan.columns is None:
            return None
        rows: list[Infos] = [{} for _ in range(len(ids))]
        givers = np.flatnonzero(plan.given).tolist()
        for key, _, column in plan.columns:
            column = column[ids]
            values = column.tolist() if column.ndim == 1 and column.dtype in _PYTHON_DTYPES else column
            for row in givers:
                rows[row][key] = values[row]
        return {_ROWS: rows}

    def read(self, ids: Array, objects: Sequence[Iterator[Any]]) -> Infos:
        plain = self.read_plain(ids)
        return plain or {_ROWS: [self.single(env, 0, given) for env, given in zip(ids.tolist(), objects, strict=True)]}

    def _number(self, value: Any) -> Any:
        return value.item() if value.dtype in _PYTHON_DTYPES else value


def finals_by_env(finals: dict[int, tuple[Any, Infos]]) -> Infos:
    """Final observations and infos by env, in the form that `rows_and_finals` takes apart."""
    return {_FINALS: finals}


def info_rows(infos: Infos, num_envs: int) -> list[Infos]:
    """One info for each env, with the keys that it gave itself.

    infos: as `RowReader` reads them, or as Gymnasium's vector envs return them.
    """
    rows: list[Infos] | None = infos.get(_ROWS)
    return _unmerged(infos, num_envs) if rows is None else rows


def rows_and_finals(infos: Infos, num_envs: int) -> tuple[list[Infos], dict[int, tuple[Any, Infos]]]:
    """One info for each env, and by env the observation and the info of the step that ended its episode."""
    if _FINALS in infos or _ROWS in infos:
        return infos.get(_ROWS) or [{} for _ in range(num_envs)], infos.get(_FINALS, {})
    about_finals = ("final_obs", "_final_obs", "final_info", "_final_info")
    rows = _unmerged({key: column for key, column in infos.items() if key not in about_finals}, num_envs)
    ended = np.flatnonzero(infos.get("_final_obs", ())).tolist()
    final_rows = _unmerged(infos.get("final_info", {}), num_envs)
    return rows, {env: (infos["final_obs"][env], final_rows[env]) for env in ended}
