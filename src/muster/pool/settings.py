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

# Modes of np.seterr that need the function of np.seterrcall.
_CALLING = ("call", "log")

# Modules made by SWIG (Box2D's) end the process where their import raises this warning.
_OF_SWIG = ("ignore", re.compile("builtin type .* has no __module__ attribute"), DeprecationWarning, None, 0)


@dataclass(frozen=True)
class CallerSettings:
    """The settings of one process at one moment.

    numpy_errors: of ``np.seterr``.  numpy_errcall: the function of ``np.seterrcall`` as a pickle, where it is used.
    torch_dtype: torch's default dtype as a pickle, which imports torch where it is loaded; None for float32.
    filters: the warning filters. A category that is not built in is there by its module and name.
    """

    numpy_errors: dict[str, Any]
    numpy_errcall: bytes | None
    torch_dtype: bytes | None
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
        torch = _torch()
        is_usual = torch is None or torch.get_default_dtype() == torch.float32
        dtype = None if is_usual else pickle.dumps(torch.get_default_dtype())
        filters = tuple(sent for one in list(warnings.filters) for sent in _sendable(one))
        return cls(errors, errcall, dtype, sys.getrecursionlimit(), filters)

    def apply(self) -> None:
        """Gives this process the settings, but no filter that makes errors of warnings: see `apply_filters`."""
        # Imports torch now: an env that did so later would find float32.
        dtype = None if self.torch_dtype is None else pickle.loads(self.torch_dtype)
        if (torch := _torch()) is not None:
            torch.set_default_dtype(dtype or torch.float32)
        with contextlib.suppress(RecursionError):  # this code is deeper already
            sys.setrecursionlimit(self.recursion_limit)
        if self.numpy_errcall is not None:
            np.seterrcall(pickle.loads(self.numpy_errcall))
        np.seterr(**self.numpy_errors)
        _set_filters([one for one in self._filters_here() if one[0] != "error"])

    def apply_filters(self) -> None:
        """Makes all filters this process's. Those that it has got since `apply` stay, in front.

        For a process that has imported what its caller had imported before it set the filters: imports warn.
        """
        filters = self._filters_here()
        _set_filters([*(one for one in list(warnings.filters) if one not in filters), *filters])

    def _filters_here(self) -> list[Any]:
        return [
            (action, message, category if isinstance(category, type) else _Named.of(*category), module, line)
            for action, message, category, module, line in self.filters
        ]


class _Named(type):
    """The class of stand-ins for categories of warnings, by name: the module of one may be imported later, or never."""

    @classmethod
    def of(cls, module: str, name: str) -> type:
        return cls(name, (Warning,), {"__module__": module, "__qualname__": name})

    def __subclasscheck__(cls, category: type) -> bool:
        return cls in category.__mro__

    def __eq__(cls, other: object) -> bool:
        return isinstance(other, type) and _name(cls) == _name(other)

    def __hash__(cls) -> int:
        return hash(_name(cls))


def _name(category: type) -> tuple[str, str]:
    return module_name(category), category.__qualname__


def _torch() -> Any:
    """torch, where it is loaded."""
    torch = sys.modules.get("torch")
    return torch if hasattr(torch, "get_default_dtype") else None  # else it is just being imported


def _set_filters(filters: list[Any]) -> None:
    first = [_OF_SWIG] if any(one[0] == "error" for one in filters) else []
    warnings.resetwarnings()  # also tells warnings that filters change
    warnings.filters[:] = first + filters  # type: ignore[index]  # typeshed declares a sequence


def _sendable(one: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    """A filter as one for each of its categories."""
    action, message, category, module, line = one
    categories = category if isinstance(category, tuple) else (category,)
    return [
        (action, message, each if module_name(each) == "builtins" else _name(each), module, line) for each in categories
    ]
