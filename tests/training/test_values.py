"""Values of options as people write them, and what is said of others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from muster.arguments import option
from muster.command_line.parser import write_value
from muster.errors import ConfigError
from muster.training.values import value_of


@dataclass
class Options:
    """Options of each kind."""

    whole: int = option(1, "", least=1)
    few: int = option(1, "", least=1, most=8)
    number: float = option(0.5, "", above=0)
    share: float | None = option(None, "", least=0, most=1)
    flag: bool = option(False, "")
    workers: int | Literal["auto"] | None = option(None, "", least=1)
    kind: Literal["a", "b"] = option("a", "")
    sizes: tuple[int, ...] = option((), "", least=1)
    names: tuple[str, ...] = option((), "", repeated=True)
    keywords: Mapping[str, Any] = option({}, "")
    path: Path = option(Path("."), "")
    text: str = option("", "")


@pytest.mark.parametrize(
    ("name", "written", "value"),
    [
        ("whole", "128", 128),
        ("whole", "100k", 100_000),
        ("whole", "2e6", 2_000_000),
        ("whole", "1.5M", 1_500_000),
        ("whole", "1_000_000", 1_000_000),
        ("whole", "9007199254740993", 9007199254740993),  # no float on the way
        ("whole", 2e6, 2_000_000),
        ("whole", np.int64(3), 3),
        ("number", "3e-4", 3e-4),
        ("number", ".5", 0.5),
        ("number", "2.5k", 2500.0),
        ("number", 1, 1.0),
        ("share", "None", None),
        ("workers", "auto", "auto"),
        ("workers", "3", 3),
        ("sizes", ["64", "1k"], (64, 1000)),
        ("sizes", [], ()),
        ("names", "a:b", ("a:b",)),
        ("keywords", '{"a": 1}', {"a": 1}),
        ("flag", np.True_, True),
        ("path", "runs/a", Path("runs/a")),
    ],
)
def test_what_is_written_is_read(name: str, written: Any, value: Any):
    read = value_of(Options, name, written)
    assert read == value
    assert type(read) is type(value)


WHOLE = "a whole number of at least 1"


@pytest.mark.parametrize(
    ("name", "expected", "several"),
    [
        ("whole", WHOLE, ("1.5", "1__0", "10kk", "1e30", "1e999999999", "", "0", True, None)),
        ("few", "a whole number from 1 to 8", ("9",)),
        ("number", "a number above 0", ("nan", "inf", "1e400", "a", "0")),
        ("share", "a number from 0 to 1 or None", ("2",)),
        ("workers", f"{WHOLE}, 'auto' or None", ("x", 0)),
        ("kind", "'a' or 'b'", ("c",)),
        ("sizes", f"a list, each entry {WHOLE}", ([1, 0],)),
        ("flag", "True or False", (1, "True")),
        ("keywords", "a dict, in JSON such as '{\"size\": 5}'", ("{", "[1]", 3)),
        ("path", "a path", ("", 3)),
        ("text", "text", (3,)),
    ],
)
def test_an_error_says_what_was_expected(name: str, expected: str, several: tuple[Any, ...]):
    for written in several:
        with pytest.raises(ConfigError) as caught:
            value_of(Options, name, written)
        assert (caught.value.option, caught.value.expected) == (name, expected)
        assert str(caught.value) == f"{name} must be {expected}, got {caught.value.got!r}"


@pytest.mark.parametrize(
    ("name", "value"), [("whole", 1), ("whole", 200_000), ("number", 1e-8), ("share", None), ("keywords", {"a": [1]})]
)
def test_what_help_shows_can_be_written(name: str, value: Any):
    assert value_of(Options, name, write_value(value)) == value
