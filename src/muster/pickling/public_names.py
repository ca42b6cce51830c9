"""The calls that make objects of classes whose names nobody writes, and of any other class."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from muster.introspection import class_name, module_name, public_name, type_name
from muster.pickling.kind_facts import Kind
from muster.pickling.walk import is_importable
from muster.pickling.written_code import Writer

ARGUMENTS = ", ..."
"""The end of the code of a call whose arguments are not known."""

# By topmost module and class, the arguments of the ``muster.lazy`` that makes one.
_MADE_BY: dict[tuple[str, str], Callable[[Any], str]] = {
    ("tempfile", "_TemporaryFileWrapper"): lambda file: "tempfile.NamedTemporaryFile",
    ("asyncio", "BaseEventLoop"): lambda loop: "asyncio.new_event_loop",
    ("_thread", "_local"): lambda made: "threading.local",
    ("_hashlib", "HASH"): lambda made: f"hashlib.new, {made.name!r}",
}


def build_of(value: Any, kind: Kind | None, writer: Writer) -> str | None:
    """The arguments of the ``muster.lazy`` that builds an object like `value`.

    They end in `ARGUMENTS` where some may lack. None where no code that a user could write builds one.
    kind: what is known about `value`.
    """
    if kind is not None:
        return None if kind.lazy == "..." else kind.lazy
    for base in type(value).__mro__:
        made_by = _MADE_BY.get((module_name(base).partition(".")[0], base.__name__))
        if made_by is not None:
            return made_by(value)
    made = type(value)
    if not _has_public_name(made) and writer.variable(made) is None:
        return None
    return writer.name_of(made) + ("" if _takes_nothing(made) else ARGUMENTS)


def shown_type(value: Any) -> str:
    """The object's class, for messages. Classes of Muster's own are not named: users do not know them."""
    return "an object of Muster's" if _is_own(type(value)) else type_name(value)


def _is_own(kind: type) -> bool:
    return module_name(kind).partition(".")[0] == __name__.partition(".")[0]


def _has_public_name(kind: type) -> bool:
    if _is_own(kind):
        return False
    if is_importable(kind):
        return public_name(kind) is not None
    path = class_name(kind).replace("__main__", "main").replace("__mp_main__", "main")
    return not any(part.startswith("_") for part in path.split("."))


def _takes_nothing(kind: type) -> bool:
    """Whether the class takes no argument at all."""
    try:
        return not inspect.signature(kind).parameters
    except (TypeError, ValueError):  # of a class made by C code, the signature may not be known
        return False
