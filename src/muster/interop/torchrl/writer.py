"""Writing what envs return into columns, with a check of each leaf."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from tensordict import TensorDictBase  # type: ignore[import-untyped]  # it ships no py.typed
from torch import Tensor

from muster.errors import SpecMismatch
from muster.interop.torchrl.columns import has_stacks

Key = str | tuple[str, ...]
Keys = tuple[Key, ...]


class Writer:
    """Writes the leaves of tensordicts into columns.

    required: leaves that each tensordict must have.  what: the tensordict's place, for messages.
    """

    def __init__(self, columns: TensorDictBase, what: str, required: Sequence[Key] = ()) -> None:
        self._what = what
        self._columns = columns
        self._has_stacks = has_stacks(columns)
        needed = {path_of(key) for key in required}
        # The leaves by the tensordict that holds them: an entry of a plain tensordict takes less time than a path.
        self._groups: dict[tuple[str, ...], list[tuple[str, Tensor, bool]]] = {}
        for key, leaf in () if self._has_stacks else columns.items(True, True):
            path = path_of(key)
            self._groups.setdefault(path[:-1], []).append((path[-1], leaf, path in needed))

    def __call__(self, values: TensorDictBase) -> None:
        """Checks all leaves, then writes them. Raises SpecMismatch for a leaf that is missing or laid out otherwise."""
        if self._has_stacks:
            self._columns.update_(values.select(*self._columns.keys(True), strict=False))
            return
        found = []
        for path, leaves in self._groups.items():
            entries = _entries(values, path)
            for name, column, required in leaves:
                value = entries.get(name)
                if value is None:
                    if required:
                        raise missing_in(values, self._what, (*path, name), brief(column))
                    continue
                if not _fits(value, column):
                    raise self._first_lie(path, entries, leaves)
                found.append((column, value))
        _write(found)

    def _first_lie(
        self, path: tuple[str, ...], entries: dict[str, Any], leaves: list[tuple[str, Tensor, bool]]
    ) -> SpecMismatch:
        """The error for the first leaf that the env has set, which others may have been made of."""
        columns = {name: column for name, column, _ in leaves}
        name = next(name for name in entries if name in columns and not _fits(entries[name], columns[name]))
        return laid_out_otherwise(self._what, (*path, name), entries[name], brief(columns[name]))

    def misfit(self, values: TensorDictBase, made: Collection[tuple[str, ...]]) -> SpecMismatch | None:
        """The error for the first leaf that nothing can make fit: one that is missing, or of another size.

        made: those that are made where they are missing.
        """
        for path, leaves in self._groups.items():
            entries = _entries(values, path)
            for name, column, required in leaves:
                value, whole = entries.get(name), (*path, name)
                if value is None and required and whole not in made:
                    return missing_in(values, self._what, whole, brief(column))
                if isinstance(value, Tensor) and value.numel() != column.numel():
                    return laid_out_otherwise(self._what, whole, value, brief(column))
        return None

    def write_if_whole(self, values: TensorDictBase) -> bool:
        """Writes all leaves if each is there and laid out as its column; returns whether it has."""
        found = []
        for path, leaves in self._groups.items():
            entries = _entries(values, path)
            for name, column, _ in leaves:
                value = entries.get(name)
                if value is None or not _fits(value, column):
                    return False
                found.append((column, value))
        _write(found)
        return True


def missing_in(values: TensorDictBase, what: str, path: tuple[str, ...], expected: str) -> SpecMismatch:
    """The error for a leaf that `values` lack."""
    return SpecMismatch(
        f"{what} tensordict has no {name_of(path)}, expected {expected}; it has "
        f"{sorted(map(str, values.keys(True, True)))}. Make the env's specs and its results agree"
    )


def laid_out_otherwise(what: str, path: tuple[str, ...], value: Any, expected: str) -> SpecMismatch:
    """The error for a leaf of another shape or dtype."""
    return SpecMismatch(
        f"{what} {name_of(path)} is {brief(value)}, expected {expected}, as its spec says; check_env_specs(env) of "
        "torchrl.envs.utils shows all that differs"
    )


def path_of(key: Key) -> tuple[str, ...]:
    """A key as a tuple of names."""
    return (key,) if isinstance(key, str) else tuple(key)


def name_of(path: tuple[str, ...]) -> str:
    """A path as users write the key."""
    return repr(path[0] if len(path) == 1 else path)


def brief(value: Any) -> str:
    """Shape and dtype of a tensor; the class of anything else."""
    return f"{list(value.shape)} {value.dtype}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _fits(value: Tensor, column: Tensor) -> bool:
    return value.shape == column.shape and value.dtype == column.dtype


def _entries(values: TensorDictBase, path: tuple[str, ...]) -> dict[str, Any]:
    holder = values.get(path, None) if path else values
    return {} if holder is None else dict(holder.items())


def _write(found: Iterable[tuple[Tensor, Tensor]]) -> None:
    for column, value in found:
        if column is not value:
            column.copy_(value)
