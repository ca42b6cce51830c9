"""Infos in Gymnasium's form, made from the columns that workers store them in.

``infos[key]`` holds one value per env and ``infos["_" + key]`` reports which envs provided one. Envs nearly always
agree in the layout of their infos, or have none after a reset; then each key is one copy out of the slab. Infos that
differ are merged env by env.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from muster._core import Caller, InfoKind, InfoRow, InfoSchema, gather_columns
from muster.spaces.tree import Array
from muster.transport.slab import Slab

_MAX_PLANS = 4096

Infos = dict[str, Any]
Column = tuple[str, int, int, tuple[int, ...], int, Any]  # key, kind, dtype number, shape, offset, children


class ReadPlan(NamedTuple):
    """The columns to read for the infos of some envs with known schemas.

    columns: for each key the key itself, the key of its mask, and the values in the slab ``[num_envs, ...]``; None
    where the infos are not the same plain columns in all envs.  provided: bool ``[n]``, which envs provided an info.
    kinds: the `InfoKind` of each column.
    """

    columns: list[tuple[str, str, Array]] | None
    provided: npt.NDArray[np.bool_]
    kinds: tuple[int, ...] = ()


class InfoColumns:
    """The infos in one slab, and their layouts; several readers may share it.

    fetch_schemas(host, at): returns what the host's worker has mailed behind `at`, tuples of schemas, and its end.
    """

    def __init__(self, slab: Slab, caller: Caller, fetch_schemas: Callable[[int, int], tuple[list[Any], int]]) -> None:
        self._slab = slab
        self._caller = caller
        self._host_of = np.array([caller.host_of(env) for env in range(slab.plan.num_envs)])
        self._fetch_schemas = fetch_schemas
        self._schemas: list[tuple[Any, ...]] = [()] * slab.plan.num_hosts
        self._schemas_end = [0] * slab.plan.num_hosts
        self._last_schemas = slab.records["info_schema"]
        self._final_schemas = slab.records["final_schema"]
        self._plans: dict[tuple[bytes, bytes], ReadPlan] = {}
        self._views: dict[tuple[int, tuple[int, ...], int, int], Array] = {}

    def forget(self, host: int) -> None:
        """Forgets the schemas of a worker that has died: its replacement numbers its own."""
        self._schemas[host], self._schemas_end[host] = (), 0
        self._plans.clear()
        self._caller.forget_infos()

    def gather(self, ids: Array) -> Infos | None:
        """Copies of the columns for the envs `ids` ``[n]``, where all of these have the same plain ones; else None.

        From then on the core gathers them for steps of all envs, as long as the layouts stay the same.
        """
        plan = self.plan_for(ids)
        if plan.columns is None:
            return None
        everything = len(ids) == len(self._host_of)
        if everything:
            self._caller.expect_infos(self._last_schemas.tobytes(), plan.columns, plan.provided)
        return gather_columns(plan.columns, None if everything else ids, plan.provided)

    def plan_for(self, ids: Array) -> ReadPlan:
        """The columns to read for the last infos of the envs `ids` ``[n]``."""
        everything = len(ids) == len(self._host_of)
        schemas = self._last_schemas if everything else self._last_schemas[ids]
        key = (schemas.tobytes(), b"" if everything else ids.tobytes())
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            plan = self._plans[key] = self._plan(ids, schemas)
        return plan

    def single(self, env: int, which: int, objects: Iterator[Any]) -> Infos:
        """The info of one env, in memory of its own, with the types that the env gave.

        which: the info's number in `InfoRow`.  objects: the rest of the env's mail, in order.
        """
        schema = int((self._final_schemas if which == InfoRow.FINAL else self._last_schemas)[env])
        if schema == InfoSchema.EMPTY:
            return {}
        if schema == InfoSchema.PICKLED:
            info: Infos = next(objects)
            return info
        return self._decode(self._columns(int(self._host_of[env]), schema), env, which, objects)

    def latest(self, ids: Array, key: str) -> dict[int, Array | None]:
        """The values of `key` in the last infos of the envs `ids`, by env; none of these owes an answer.

        None stands for what the mail has carried: it is no array or number.
        """
        found: dict[int, Array | None] = {}
        for env in ids[self._last_schemas[ids] >= InfoSchema.FIRST].tolist():
            known, at = self._schemas[self._host_of[env]], self._last_schemas[env] - InfoSchema.FIRST
            for column in known[at] if at < len(known) else ():  # those of a worker that died are forgotten
                if column[0] == key:
                    sent = column[1] in (InfoKind.DICT, InfoKind.OBJECT)
                    found[env] = None if sent else self._column(column, InfoRow.STEP)[env]
        return found

    def _plan(self, ids: Array, schemas: Array) -> ReadPlan:
        provided = schemas != InfoSchema.EMPTY
        pairs = set(zip(self._host_of[ids[provided]].tolist(), schemas[provided].tolist(), strict=True))
        if any(schema < InfoSchema.FIRST for _, schema in pairs):
            return ReadPlan(None, provided)
        layouts = {self._columns(host, schema) for host, schema in pairs}
        layout = layouts.pop() if layouts else ()
        if layouts or any(column[1] in (InfoKind.DICT, InfoKind.OBJECT) for column in layout):
            return ReadPlan(None, provided)
        columns = [(column[0], f"_{column[0]}", self._column(column, InfoRow.STEP)) for column in layout]
        return ReadPlan(columns, provided, tuple(column[1] for column in layout))

    def _columns(self, host: int, schema: int) -> tuple[Column, ...]:
        if schema - InfoSchema.FIRST >= len(self._schemas[host]):
            more, self._schemas_end[host] = self._fetch_schemas(host, self._schemas_end[host])
            self._schemas[host] += tuple(itertools.chain.from_iterable(more))
        columns: tuple[Column, ...] = self._schemas[host][schema - InfoSchema.FIRST]
        return columns

    def _column(self, column: Column, which: int) -> Array:
        _, _, number, shape, offset, _ = column
        view = self._views.get((number, shape, offset, which))
        if view is None:
            dtype = np.dtype(_DTYPES[number])
            end = offset + math.prod(shape) * dtype.itemsize
            rows = self._slab.info_bytes[:, which, offset:end].view(dtype)
            view = self._views[number, shape, offset, which] = rows.reshape(len(rows), *shape)
        return view

    def _decode(self, columns: tuple[Column, ...], env: int, which: int, objects: Iterator[Any]) -> Infos:
        info: Infos = {}
        for column in columns:
            key, kind, *_, children = column
            if kind == InfoKind.OBJECT:
                info[key] = next(objects)
            elif kind == InfoKind.DICT:
                info[key] = self._decode(children, env, which, objects)
            else:
                (info[key],) = split(self._column(column, which)[env : env + 1].copy(), kind)
        return info


def split(column: Array, kind: int) -> Array | list[Any]:
    """The values in a column ``[n, ...]`` of the `InfoKind` `kind`, with the types that envs gave. Arrays are views."""
    if kind == InfoKind.ARRAY and column.ndim == 1:
        return [column[row, ...] for row in range(len(column))]
    return column if kind in (InfoKind.ARRAY, InfoKind.SCALAR) else column.tolist()


class InfoReader:
    """Reads infos in Gymnasium's form."""

    in_core = True  # whether the core may read infos in this reader's place

    def __init__(self, columns: InfoColumns) -> None:
        self.columns = columns

    def read_plain(self, ids: Array) -> Infos | None:
        """The infos of a step of envs `ids` ``[n]``, where all envs have the same plain columns; else None."""
        return self.columns.gather(ids)

    def read(self, ids: Array, objects: Sequence[Iterator[Any]]) -> Infos:
        """The infos of a step of envs `ids` ``[n]``. objects: for each env the rest of its mail, in order."""
        infos = self.read_plain(ids)
        if infos is None:
            infos = {}
            for row, env in enumerate(ids):
                merge(infos, self.last(int(env), objects[row]), row, len(ids))
        return infos

    def add(self, infos: Infos, info: Infos, row: int, count: int) -> None:
        """Adds `info`, a further report about the env at `row`, to the infos that `read` returned for `count` envs."""
        merge(infos, info, row, count)

    def add_final(self, infos: Infos, obs: Any, info: Infos, row: int, count: int) -> None:
        """Adds the observation and the info of the step that ended the episode of the env at `row` of `count`."""
        merge(infos, {"final_obs": obs, "final_info": info}, row, count)

    def last(self, env: int, objects: Iterator[Any]) -> Infos:
        """The last info of `env`."""
        return self.columns.single(env, InfoRow.STEP, objects)

    def final(self, env: int, objects: Iterator[Any]) -> Infos:
        """The info of the step that ended the episode of `env` (autoreset_mode="same_step")."""
        return self.columns.single(env, InfoRow.FINAL, objects)


def info_object_names(schemas: Sequence[Sequence[Column]], schema: int) -> list[str]:
    """The paths of the objects that travel through the mail in an info of this schema, in the order of the mail."""
    if schema == InfoSchema.PICKLED:
        return ["info"]

    def names(columns: Sequence[Column], path: str) -> Iterator[str]:
        for key, kind, *_, children in columns:
            here = f"{path}[{key!r}]"
            if kind == InfoKind.DICT:
                yield from names(children, here)
            elif kind == InfoKind.OBJECT:
                yield here

    return list(names(schemas[schema - InfoSchema.FIRST], "info")) if schema >= InfoSchema.FIRST else []


_DTYPES: dict[int, str] = {np.dtype(char).num: char for char in np.typecodes["All"] if char not in "SUVO"}
# Values of these types get a column of numbers. All other values are objects, also those of classes made from these.
_NUMBERS = {bool, int, float, *(np.dtype(char).type for char in _DTYPES.values() if char not in "mM")}


def merge(infos: Infos, info: Infos, row: int, count: int) -> Infos:
    """Adds one env's info at `row` of `count`, as Gymnasium does; promotes a column's dtype where envs differ in it."""
    for key, value in info.items():
        if key == "final_obs":
            column = infos.get(key)
            if column is None:
                column = np.full(count, None, object)
            column[row] = value
        elif isinstance(value, dict) and isinstance(infos.get(key, {}), dict):
            column = merge(infos.get(key, {}), value, row, count)
        else:
            column = _with_value(infos.get(key), infos.get(f"_{key}"), value, row, count)
        infos[key] = column
        infos.setdefault(f"_{key}", np.zeros(count, np.bool_))[row] = True
    return infos


def spread(column: Any, ids: Array, num_envs: int) -> Any:
    """Spreads a column of the envs `ids` to all envs; the other envs have zeros, or None in a column of objects."""
    if isinstance(column, dict):
        return {key: spread(value, ids, num_envs) for key, value in column.items()}
    if column.dtype == object:
        full = np.full((num_envs, *column.shape[1:]), None, object)
    else:
        full = np.zeros((num_envs, *column.shape[1:]), column.dtype)
    full[ids] = column
    return full


def _with_value(column: Any, provided: Any, value: Any, row: int, count: int) -> Any:
    array = _as_array(value)
    if isinstance(column, dict):
        column = _as_objects(column, provided)
    elif column is None:
        single = array.dtype == object and array.ndim == 0
        column = np.full(count, None, object) if single else np.zeros((count, *array.shape), array.dtype)
    elif column.shape[1:] != array.shape or (array.dtype == object) != (column.dtype == object):
        column = _as_objects(column, provided)
    elif array.dtype != column.dtype:
        dtype = _common(column.dtype, array.dtype)
        column = _as_objects(column, provided) if dtype is None else column.astype(dtype)
    column[row] = value
    return column


def _as_array(value: Any) -> Array:
    if isinstance(value, np.ndarray):
        return value
    try:
        return np.asarray(value, type(value)) if type(value) in _NUMBERS else np.array(None)
    except OverflowError:  # an int that no int64 holds
        return np.array(None)


def _common(one: np.dtype[Any], other: np.dtype[Any]) -> np.dtype[Any] | None:
    """The dtype to which two dtypes promote; None for text and numbers, and where integers would become floats."""
    if (one.kind in "SU") != (other.kind in "SU"):  # NumPy would write numbers as text
        return None
    try:
        common = np.result_type(one, other)
    except TypeError:
        return None
    return None if one.kind in "iu" and other.kind in "iu" and common.kind == "f" else common


def _as_objects(column: Any, provided: Array) -> Array:
    """The values that were provided, as a column of objects: the next value has another shape or kind."""
    objects = np.full(len(provided), None, object)
    for row in np.flatnonzero(provided).tolist():
        objects[row] = _value(column, row)
    return objects


def _value(column: Any, row: int) -> Any:
    if not isinstance(column, dict):
        return column[row]
    return {key: _value(column[key], row) for key in column if f"_{key}" in column and column[f"_{key}"][row]}
