"""What a caller has set for its whole process, and expects in workers, too: NumPy's error handling, warning filters.

Only what fits any process is copied; all else that a script sets up is for ``worker_init``. A script imports first and
changes settings afterwards: a worker imports under its own first settings what its caller has imported already.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from muster.introspection import module_name
from muster.pickling.functools_pickling import dumps as by_value
from muster.workers.around_imports import around_imports

# Modes of np.seterr that need the function of np.seterrcall, and those by which an import may fail.
_CALLING = ("call", "log")
_STRICT = ("raise", *_CALLING)

# Modules made by SWIG (Box2D's) end the process where their import raises this warning.
_OF_SWIG = ("ignore", re.compile("builtin type .* has no __module__ attribute"), DeprecationWarning, None, 0)


@dataclass(frozen=True)
class CallerSettings:
    """The settings of one process at one moment.

    numpy_errors: of ``np.seterr``.  numpy_errcall: the function of ``np.seterrcall`` as a pickle, where it is used.
    torch_dtype: the name of torch's default dtype; None where torch is not loaded.
    filters: the warning filters, with each category as a `_Category`.
    imported: the names of the modules that are imported, where importing them under these settings may differ.
    """

    numpy_errors: dict[str, Any]
    numpy_errcall: bytes | None
    torch_dtype: str | None
    recursion_limit: int
    filters: tuple[tuple[Any, ...], ...]
    imported: frozenset[str]

    @classmethod
    def current(cls) -> CallerSettings:
        """The settings of this thread and its process."""
        errors, errcall = dict(np.geterr()), None
        if any(mode in _CALLING for mode in errors.values()):
            with contextlib.suppress(Exception):  # an object that cannot be sent
                errcall = by_value(np.geterrcall())
            if errcall is None:
                errors = {kind: "warn" if mode in _CALLING else mode for kind, mode in errors.items()}
        torch = _torch()
        dtype = None if torch is None else str(torch.get_default_dtype()).rpartition(".")[2]
        filters = list(warnings.filters)
        is_strict = any(mode in _STRICT for mode in errors.values()) or any(one[0] == "error" for one in filters)
        return cls(
            numpy_errors=errors,
            numpy_errcall=errcall,
            torch_dtype=dtype,
            recursion_limit=sys.getrecursionlimit(),
            filters=tuple(sent for one in filters for sent in _sendable(one)),
            imported=frozenset(sys.modules) if is_strict or dtype not in (None, "float32") else frozenset(),
        )

    def apply(self, first: OwnSettings) -> None:
        """Gives this process the settings; torch's and those for warnings of modules once these are imported.

        first: the settings under which this process imports what the caller has imported.
        """
        missing = {category.module for _, _, category, _, _ in self.filters} - sys.modules.keys()
        if names := self.imported | missing:
            around_imports(names, functools.partial(self._imported_under, first))
        with contextlib.suppress(RecursionError):  # this code is deeper already
            sys.setrecursionlimit(self.recursion_limit)
        if self.numpy_errcall is not None:
            np.seterrcall(pickle.loads(self.numpy_errcall))
        np.seterr(**self.numpy_errors)
        self._apply_dtype()
        self.apply_filters(keeps=False)

    def apply_filters(self, *, keeps: bool) -> None:
        """Makes the caller's filters this process's. keeps: those that only this process has stay, in front."""
        filters = self._filters_here()
        own = [one for one in list(warnings.filters) if one not in filters] if keeps else []
        _set_filters([*own, *filters])

    def _filters_here(self) -> list[Any]:
        """The caller's filters, of those categories that are imported here."""
        filters: list[Any] = [_OF_SWIG] if any(one[0] == "error" for one in self.filters) else []
        for action, message, category, module, line in self.filters:
            found = category.find()
            if found is not None:
                filters.append((action, message, found, module, line))
        return filters

    def _apply_dtype(self) -> None:
        if self.torch_dtype is not None and (torch := _torch()) is not None:
            torch.set_default_dtype(getattr(torch, self.torch_dtype))

    @contextlib.contextmanager
    def _imported_under(self, first: OwnSettings) -> Iterator[None]:
        own, of_caller = OwnSettings.current(), self._filters_here()
        first.restore()
        # In front those of whoever imports the module, for as long as that takes.
        _set_filters([*(one for one in own.filters if one not in of_caller), *first.filters])
        try:
            yield
        finally:
            own.restore()
            if own.torch_dtype is None:
                self._apply_dtype()
            self.apply_filters(keeps=True)  # with those of what has been imported


@dataclass(frozen=True)
class OwnSettings:
    """The settings of this process at one moment, to be restored in it. torch_dtype: None where torch is not loaded."""

    numpy_errors: dict[str, Any]
    numpy_errcall: Any
    torch_dtype: Any
    filters: list[Any]

    @classmethod
    def current(cls) -> OwnSettings:
        torch = _torch()
        dtype = None if torch is None else torch.get_default_dtype()
        return cls(dict(np.geterr()), np.geterrcall(), dtype, list(warnings.filters))

    def restore(self) -> None:
        """Makes them this process's again."""
        np.seterrcall(self.numpy_errcall)
        np.seterr(**self.numpy_errors)
        if (torch := _torch()) is not None:
            torch.set_default_dtype(self.torch_dtype or torch.float32)
        _set_filters(self.filters)


@dataclass(frozen=True)
class _Category:
    """The class of a filter's warnings, by its name; by value where it is the script's."""

    module: str
    name: str
    value: bytes | None

    def find(self) -> Any:
        """The class; None where its module is not imported."""
        if self.value is not None:
            return pickle.loads(self.value)
        found: Any = sys.modules.get(self.module)
        for name in self.name.split("."):
            found = getattr(found, name, None)
        return found


def _torch() -> Any:
    """torch, where it is loaded."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "get_default_dtype") else None  # else it is just being imported


def _set_filters(filters: list[Any]) -> None:
    warnings.resetwarnings()  # also tells warnings that filters change
    warnings.filters[:] = filters  # type: ignore[index]  # typeshed declares a sequence


def _sendable(one: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """A filter as one for each of its categories."""
    action, message, category, module, line = one
    categories = category if isinstance(category, tuple) else (category,)
    return [(action, message, _category_of(one), module, line) for one in categories]


def _category_of(category: type[Warning]) -> _Category:
    name = _Category(module_name(category), category.__qualname__, None)
    if name.find() is category and not name.module.endswith("main__"):
        return name
    try:
        return _Category(name.module, name.name, by_value(category))
    except Exception:  # it cannot be sent: then nothing in a worker can warn of it
        return name
