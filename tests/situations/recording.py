"""Situations in which users read a message, and how these messages are recorded."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import muster
from muster.errors import EnvError, WorkerError

Situation = Callable[[], Any]

SITUATIONS: dict[str, Situation] = {}
"""By name. Each raises what users read, or yields it: exceptions, warnings and strings, and raises the last of them."""

# Import paths that users write; all other modules may move.
_PUBLIC = ("errors", "interop", "interop.gymnasium", "interop.sb3", "interop.torchrl", "nn", "algorithms", "rollout")
_PUBLIC += ("doctor", "envs.melting_pot")  # fmt: skip
_INDENT = "    "


def situation(name: str) -> Callable[[Situation], Situation]:
    """Registers the decorated function."""

    def register(function: Situation) -> Situation:
        assert name not in SITUATIONS, name
        SITUATIONS[name] = function
        return function

    return register


def situations(kind: str, table: Mapping[str, Situation]) -> None:
    """Registers a function for each name, as ``kind: name``."""
    for name, function in table.items():
        situation(f"{kind}: {name}")(function)


def raised(call: Callable[..., Any], *args: Any, **kwargs: Any) -> BaseException:
    """The exception that the call raises."""
    try:
        result = call(*args, **kwargs)
    except Exception as error:
        return error
    pytest.fail(f"nothing was raised; the call returned {result!r}")


def warned(call: Callable[..., Any], *args: Any, **kwargs: Any) -> list[object]:
    """The warnings of the call, then the exception that it raises, if any."""
    errors: list[object] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            call(*args, **kwargs)
        except Exception as error:
            errors.append(error)
    return [one.message for one in caught] + errors


def sentences_of(function: Situation) -> str:
    """All messages that users read in a situation, in the form of sentences.txt."""
    sentences = "\n".join(_written(one) for one in _read_in(function))
    assert sentences, "nothing was said"
    return sentences


def _read_in(function: Situation) -> Iterator[object]:
    try:
        result = function()
        if isinstance(result, Iterator):
            yield from result
    except Exception as error:
        yield error


def _written(said: object) -> str:
    """The class and the message, then the notes and the class of an env's own exception; more lines are indented."""
    parts = [f"{type(said).__name__}: {said}" if isinstance(said, BaseException) else str(said)]
    parts += [f"note: {note}" for note in getattr(said, "__notes__", ())]
    if isinstance(said, (EnvError, WorkerError)) and said.__cause__ is not None:
        parts.append(f"cause: {type(said.__cause__).__name__}")
        parts += [f"note of the cause: {note}" for note in getattr(said.__cause__, "__notes__", ())]
    first, *rest = "\n".join(map(plain, parts)).splitlines()
    return "\n".join([first, *((_INDENT + line).rstrip() for line in rest)])


def plain(text: str) -> str:
    """`text` without what differs from run to run, from machine to machine, or once modules have moved."""
    for pattern, replacement in _VOLATILE:
        text = pattern.sub(replacement, text)
    return text


def _private_modules() -> re.Pattern[str]:
    root = Path(muster.__file__).parent
    paths = [path.relative_to(root).with_suffix("") for path in root.rglob("*.py")]
    names = {".".join(path.parts).removesuffix(".__init__") for path in paths} - {"__init__", *_PUBLIC}
    return re.compile(rf"\bmuster\.(?:{'|'.join(sorted(map(re.escape, names), key=len, reverse=True))})(?!\w)")


_FRAME = r' *File "[^"\n]*", line \d+,? in [\w<>.]+'
_VOLATILE: list[tuple[re.Pattern[str], str]] = [
    (re.compile(r"\x1b\[\d+m"), ""),  # colours
    # A traceback of Python's: to the end of the note that it is in.
    (re.compile(r"Traceback \(most recent call last\):\n.*", re.DOTALL), "<traceback>"),
    # A stack of faulthandler's: the text behind the last frame is not a part of it.
    (
        re.compile(rf"(?:(?:Current thread|Thread) 0x[^\n]*(?:\n{_FRAME}|\n *<no Python frame>)*\n*)+(?=\n|[ (]|$)"),
        "<stack>",
    ),
    (re.compile(r"Extension modules: .*"), "Extension modules: <modules>"),
    (_private_modules(), "<module>"),
    (re.compile(r"(?<![\w.'/*])/(?:[\w.+\-]+/)+[\w.+\-]*"), "<path>"),
    (re.compile(r"0x[0-9a-f]{4,}"), "<address>"),
    (re.compile(r"\bfor [\d.]+(?:e[+-]?\d+)? s\b"), "for <seconds> s"),
    (re.compile(r"\b\d[\d.]* [MG]B\b"), "<size>"),
    (re.compile(r"About \d+ envs"), "About <number> envs"),
    (re.compile(r"\b(pid|thread) \d{3,}"), r"\1 <number>"),
]
