"""TorchRL's private names, on which `muster.interop.torchrl` rests: where one is gone, its import says so by name."""

from __future__ import annotations

import os
import types
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from muster._core import MARK
from muster.extras import installed_version, is_installed, is_older
from muster.introspection import caller_stacklevel

# The newest release that has been tried.
TRIED = "0.14.1"


def require_names(names: Iterable[str], *classes: type) -> None:
    """Raises ImportError for the first of `names` that none of TorchRL's `classes` has, nor reads or sets in itself."""
    known = set().union(*map(mentioned, classes))
    for name in names:
        if name not in known:
            where = " or ".join(cls.__name__ for cls in classes)
            raise ImportError(_gone(f"the private name {name} of TorchRL's {where}"), name="torchrl")


@contextmanager
def parts_required() -> Iterator[None]:
    """Encloses the imports there. Raises ImportError, with the versions, where one of TorchRL's parts is gone."""
    try:
        yield
    except ImportError as error:
        package = (error.name or "").partition(".")[0]
        if package not in ("torchrl", "tensordict") or not is_installed(package) or TRIED in str(error):
            raise
        raise ImportError(f"{_gone('a part of TorchRL')} ({error})", name=error.name) from error


def warn_if_newer() -> None:
    """Warns where TorchRL is newer than what has been tried; in workers, which import this once more, it does not."""
    found = installed_version("torchrl")
    if found is not None and is_older(TRIED, found) and f"{MARK}{os.getpid()}" not in os.environ:
        warnings.warn(
            f"TorchRL {found} is newer than {TRIED}, the newest that muster.interop.torchrl was tried with. If "
            f"something fails, try pip install 'torchrl=={TRIED}', or pip install --upgrade muster-rl",
            UserWarning,
            stacklevel=caller_stacklevel(),
        )


def mentioned(cls: type) -> set[str]:
    """The names of the members of a class, and those of the attributes that its methods read and set."""
    functions = [member for base in cls.__mro__ for member in vars(base).values()]
    return set(dir(cls)).union(*(_names_in(code) for member in functions for code in _codes(member)))


def _codes(member: object) -> Iterator[types.CodeType]:
    """The code of a member of a class: of a function, whatever decorates it, or of a property."""
    parts = [getattr(member, name, None) for name in ("__func__", "fget", "fset")]
    if isinstance(member, types.FunctionType):
        yield member.__code__
        parts += [cell.cell_contents for cell in member.__closure__ or ()]
    for part in parts:
        if isinstance(part, types.FunctionType):
            yield from _codes(part)


def _names_in(code: types.CodeType) -> set[str]:
    inner = [one for one in code.co_consts if isinstance(one, types.CodeType)]
    texts = {one for one in code.co_consts if isinstance(one, str)}  # of keys of ``__dict__``
    return set(code.co_names).union(texts, *map(_names_in, inner))


def _gone(what: str) -> str:
    found = installed_version("torchrl") or "of an unknown version"
    return (
        f"muster.interop.torchrl needs {what}, which the installed TorchRL {found} does not have; it was tried with "
        f"{TRIED}. Install that one with: pip install 'torchrl=={TRIED}', or a newer Muster with: "
        "pip install --upgrade muster-rl"
    )
