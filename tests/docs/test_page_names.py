"""The pages that messages end with are there."""

from __future__ import annotations

import re
from pathlib import Path

from muster.errors import CannotTravel, more

ROOT = Path(__file__).parents[2]


def test_each_page_that_a_message_names_exists() -> None:
    named = {
        name
        for path in (ROOT / "src" / "muster").rglob("*.py")
        for name in re.findall(r'"((?:problems|tasks)/[\w-]+)"', path.read_text())
    }
    assert len(named) > 8
    assert [name for name in named if not (ROOT / "docs" / f"{name}.md").is_file()] == []


def test_the_page_is_the_last_line() -> None:
    error = CannotTravel("server cannot be sent to a worker.", "problems/zeromq")
    assert str(error) == "server cannot be sent to a worker.\nMore: docs/problems/zeromq.md"
    assert more("") == ""
