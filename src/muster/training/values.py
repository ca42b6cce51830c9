"""Values of options as people write them on a command line: ``100k``, ``2e6``, ``1_000_000``."""

from __future__ import annotations

import json
import re
import types
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from muster.arguments import alternatives

_NUMBER = re.compile(r"([+-]?(?:\d+(?:_\d+)*\.?(?:\d+)?|\.\d+)(?:e[+-]?\d{1,3})?)([kmb]?)", re.IGNORECASE)
_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}
_METAVARS: dict[Any, str] = {int: "INT", float: "NUMBER", str: "TEXT", bool: "", Path: "PATH", Mapping: "JSON"}


def read_value(kind: Any, written: Any) -> Any:
    """The value of a word, or of several in a list, for an option of the type `kind`.

    A word that cannot be read so stays text, and a value that is no text what it is: `checked_option` refuses them.
    """
    if isinstance(written, list):
        listed = next((one for one in alternatives(kind) if get_origin(one) is tuple), kind)
        (one,) = get_args(listed)[:1] or (kind,)
        return tuple(read_value(one, word) for word in written)
    if not isinstance(written, str):
        return written
    for one in alternatives(kind):
        value = _read_one(one, written)
        if value is not written:
            return value
    return written


def write_value(value: Any) -> str:
    """A value as it may be written in an option."""
    if isinstance(value, tuple):
        return " ".join(map(write_value, value))
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 100_000:
        return f"{value:_}"
    if isinstance(value, Mapping):
        return json.dumps(dict(value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def metavar_of(kind: Any) -> str:
    """What stands for a value of the type `kind` in a command's help."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal:
        return parts[0] if len(parts) == 1 else "{" + ",".join(parts) + "}"
    if origin is tuple:
        return metavar_of(parts[0])
    several = [one for one in alternatives(kind) if one is not types.NoneType]
    return "|".join(filter(None, map(metavar_of, several))) if several != [kind] else _METAVARS[origin or kind]


def _read_one(kind: Any, word: str) -> Any:
    """The value of a word, or the word itself where it is none of `kind`."""
    origin = get_origin(kind)
    if origin is tuple:
        return (read_value(get_args(kind)[0], word),)
    if origin is Mapping:
        try:
            return json.loads(word)
        except json.JSONDecodeError:
            return word
    if kind is types.NoneType and word.lower() == "none":
        return None
    if kind is Path and word:
        return Path(word)
    if kind in (int, float) and (match := _NUMBER.fullmatch(word.strip())) is not None:
        number = Decimal(match[1]) * _FACTORS[match[2].lower()]
        if kind is float or (number == number.to_integral_value() and abs(number) < 2**63):
            return kind(number)
    return word
