"""Values of options as people write them, and tyro's rule that reads them so: ``100k``, ``2e6``, ``1_000_000``."""

from __future__ import annotations

import json
import re
import types
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

_NUMBER = re.compile(r"([+-]?(?:\d+(?:_\d+)*\.?(?:\d+)?|\.\d+)(?:e[+-]?\d{1,3})?)([kmb]?)", re.IGNORECASE)
_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}
_EXPECTED: dict[Any, str] = {
    int: "a whole number, such as 128, 100k or 2e6",
    float: "a number, such as 0.5, 3e-4 or 100k",
    bool: "true or false",
    str: "text",
    Path: "a path",
    types.NoneType: "None",
}
_METAVARS: dict[Any, str] = {int: "INT", float: "NUMBER", str: "TEXT", Path: "PATH", types.NoneType: "None"}

REGISTRY = ConstructorRegistry()


@dataclass(frozen=True)
class Unread:
    """Takes the place of a value that could not be read. expected: what it had to be.  why: the reason, or empty."""

    got: Any
    expected: str
    why: str = ""


def read_value(kind: Any, value: Any) -> Any:
    """`value`, a word or what TOML has, as one of `kind`, the type of an option; `Unread` where it is none."""
    kinds = _alternatives(kind)
    for one in kinds:
        if not isinstance(read := _read_one(one, value), Unread):
            return read
    return read if len(kinds) == 1 else Unread(value, " or ".join(map(_expected, reversed(kinds))))


def find_unread(value: Any) -> Unread | None:
    """The `Unread` that a value is, or holds."""
    if isinstance(value, tuple):
        return next((one for one in value if isinstance(one, Unread)), None)
    return value if isinstance(value, Unread) else None


def write_value(value: Any) -> str:
    """A value as it may be written in an option."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 100_000:
        return f"{value:_}"
    if isinstance(value, Mapping):
        return json.dumps(dict(value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _read_one(kind: Any, value: Any) -> Any:
    origin = get_origin(kind)
    if origin is Literal:
        return value if value in get_args(kind) else Unread(value, _expected(kind))
    if origin is tuple:
        several = value if isinstance(value, list) else [value]
        return tuple(read_value(get_args(kind)[0], one) for one in several)
    if origin is Mapping:
        return _read_mapping(kind, value)
    if isinstance(value, bool) or kind is bool:
        return value if isinstance(value, bool) and kind is bool else Unread(value, _expected(kind))
    if kind in (int, float):
        number = _read_number(str(value))
        if number is not None and (kind is float or (number == number.to_integral_value() and abs(number) < 2**63)):
            return kind(number)
    elif kind is types.NoneType:
        if str(value).lower() == "none":
            return None
    elif isinstance(value, str) and (value or kind is str):
        return kind(value)
    return Unread(value, _expected(kind))


def _read_number(text: str) -> Decimal | None:
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        return None
    number = Decimal(match[1]) * _FACTORS[match[2].lower()]
    return number if abs(number) < Decimal("1e300") else None


def _read_mapping(kind: Any, written: Any) -> Any:
    value = written
    if isinstance(written, str):
        try:
            value = json.loads(written)
        except json.JSONDecodeError as error:
            return Unread(written, _expected(kind), f": {error}")
    return value if isinstance(value, dict) else Unread(written, _expected(kind))


def _is_known(kind: Any) -> bool:
    return all(one in _METAVARS or get_origin(one) in (Literal, tuple, Mapping) for one in _alternatives(kind))


def _expected(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(map(str, get_args(kind)))
    if get_origin(kind) is tuple:
        return f"one or more, each {_expected(get_args(kind)[0])}"
    return "a JSON object such as '{\"size\": 5}'" if get_origin(kind) is Mapping else _EXPECTED[kind]


def _metavar(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "{" + ",".join(map(str, get_args(kind))) + "}"
    if get_origin(kind) is tuple:
        return f"{_metavar(get_args(kind)[0])} ..."
    return "JSON" if get_origin(kind) is Mapping else _METAVARS[kind]


@REGISTRY.primitive_rule
def _as_people_write(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """tyro's rule for all types of options but flags, and what may be repeated."""
    kind: Any = info.type
    several = get_origin(kind) is tuple
    if (several and tyro.conf.UseAppendAction in info.markers) or kind is bool or not _is_known(kind):
        return None
    return PrimitiveConstructorSpec(
        nargs="*" if several else 1,
        metavar="|".join(map(_metavar, _alternatives(kind))),
        instance_from_str=lambda words: read_value(kind, words if several else words[0]),
        is_instance=lambda value: True,
        str_from_instance=lambda value: [write_value(one) for one in (value if several else [value])],
    )
