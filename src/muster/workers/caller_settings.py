"""What a caller has set for its whole process, and expects in workers, too: NumPy's error handling, warning filters.

Only what fits any process is copied; all else that a script sets up is for ``worker_init``.
"""

from __future__ import annotations

import contextlib
import pickle
import re
import sys
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

from muster.introspection import module_name
from muster.pickling.functools_pickling import dumps as by_value
from muster.workers.after_import import after_import

# Modes of np.seterr that need the function of np.seterrcall.
_CALLING = ("call", "log")

# Modules made by SWIG (Box2D's) end the process where their import raises this warning.
_OF_SWIG = ("ignore", re.compile("builtin type .* has no __module__ attribute"), DeprecationWarning, None, 0)


@dataclass(frozen=True)
class CallerSettings:
    """The settings of one process at one moment.

    numpy_errors: of ``np.seterr``.  numpy_errcall: the function of ``np.seterrcall`` as a pickle, where it is used.
    torch_dtype: the name of torch's default dtype; None where torch is not loaded.
    filters: the warning filters, with each category as a `_Category`.
    """

    numpy_errors: dict[str, Any]
    numpy_errcall: bytes | None
    torch_dtype: str | None
    recursion_limit: int
    filters: tuple[tuple[Any, ...], ...]

    @classmethod
    def current(cls) -> CallerSettings:
        """The settings of this thread and its process."""
        errors, errcall = dict(np.geterr()), None
        if any(mode in _CALLING for mode in errors.values()):
            with contextlib.suppress(Exception):  # an object that cannot be sent
                errcall = by_value(np.geterrcall())
            if errcall is None:
                errors = {kind: "warn" if mode in _CALLING else mode for kind, mode in errors.items()}
        torch: Any = sys.modules.get("torch")
        get_dtype = getattr(torch, "get_default_dtype", None)  # None where torch is just being imported
        return cls(
            numpy_errors=errors,
            numpy_errcall=errcall,
            torch_dtype=None if get_dtype is None else str(get_dtype()).rpartition(".")[2],
            recursion_limit=sys.getrecursionlimit(),
            filters=tuple(sent for one in list(warnings.filters) for sent in _sendable(one)),
        )

    def apply(self) -> None:
        """Gives this process the settings; torch's and those for warnings of modules once these are imported."""
        with contextlib.suppress(RecursionError):  # this code is deeper already
            sys.setrecursionlimit(self.recursion_limit)
        if self.numpy_errcall is not None:
            np.seterrcall(pickle.loads(self.numpy_errcall))
        np.seterr(**self.numpy_errors)
        if self.torch_dtype is not None:
            after_import("torch", self._apply_dtype)
        self.apply_filters(keeps=False)

    def apply_filters(self, *, keeps: bool) -> None:
        """Makes the caller's filters this process's. keeps: those that only this process has stay, in front."""
        filters: list[Any] = [_OF_SWIG] if any(one[0] == "error" for one in self.filters) else []
        for action, message, category, module, line in self.filters:
            found = category.find()
            if found is not None:
                filters.append((action, message, found, module, line))
            elif category.module not in sys.modules:  # until it is, nothing can warn of this category
                after_import(category.module, self._complete_filters)
        own = [one for one in list(warnings.filters) if one not in filters] if keeps else []
        warnings.resetwarnings()  # also tells warnings that filters change
        warnings.filters[:] = [*own, *filters]  # type: ignore[index]  # typeshed declares a sequence

    def _complete_filters(self) -> None:
        self.apply_filters(keeps=True)

    def _apply_dtype(self) -> None:
        torch: Any = sys.modules["torch"]
        torch.set_default_dtype(getattr(torch, str(self.torch_dtype)))


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
