"""Values of options as people write them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest

from muster.command_line.values import Unread, find_unread, read_value, write_value


@pytest.mark.parametrize(
    ("kind", "written", "value"),
    [
        (int, "128", 128),
        (int, "100k", 100_000),
        (int, "100K", 100_000),
        (int, "2e6", 2_000_000),
        (int, "1.5M", 1_500_000),
        (int, "1_000_000", 1_000_000),
        (int, "1b", 10**9),
        (int, "9007199254740993", 9007199254740993),  # no float on the way
        (int, 2e6, 2_000_000),
        (float, "3e-4", 3e-4),
        (float, ".5", 0.5),
        (float, "-2", -2.0),
        (float, "2.5k", 2500.0),
        (float, 1, 1.0),
        (float | None, "None", None),
        (float | None, "0.1", 0.1),
        (int | Literal["auto"] | None, "auto", "auto"),
        (int | Literal["auto"] | None, "3", 3),
        (tuple[int, ...], ["64", "1k"], (64, 1000)),
        (tuple[int, ...], [], ()),
        (tuple[str, ...], "a:b", ("a:b",)),
        (Mapping[str, Any], '{"a": 1}', {"a": 1}),
        (bool, True, True),
        (Path, "runs/a", Path("runs/a")),
    ],
)
def test_what_is_written_is_read(kind: Any, written: Any, value: Any):
    read = read_value(kind, written)
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("kind", "written"),
    [
        (int, "1.5"), (int, "1e-3"), (int, "1__0"), (int, "k"), (int, "10kk"), (int, "1e30"), (int, "1e999999999"),
        (int, ""), (int, True), (int, None), (float, "nan"), (float, "inf"), (float, "1e400"), (float, "a"),
        (bool, 1), (bool, "True"), (str, 3), (Literal["a", "b"], "c"), (int | None, "x"), (Mapping[str, Any], "[1]"),
        (Mapping[str, Any], "{a}"), (tuple[int, ...], ["1", "b"]),
    ],
)  # fmt: skip
def test_what_cannot_be_read_says_what_was_expected(kind: Any, written: Any):
    unread = find_unread(read_value(kind, written))
    assert isinstance(unread, Unread)
    assert unread.expected


@pytest.mark.parametrize("value", [1, 200_000, 0.00025, 1e-8, None, {"a": [1]}])
def test_what_help_shows_can_be_written(value: Any):
    kind = Mapping[str, Any] if isinstance(value, dict) else type(value)
    assert read_value(kind, write_value(value)) == value
