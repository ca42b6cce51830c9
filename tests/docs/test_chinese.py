"""The pages in Chinese have the code of their English pages, and every page on an error has one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHINESE, PROBLEMS = ROOT / "docs" / "zh", ROOT / "docs" / "problems"
# English page by Chinese page.
PAGES = {
    ROOT / "README.zh-CN.md": ROOT / "README.md",
    CHINESE / "index.md": ROOT / "docs" / "index.md",
    CHINESE / "install.md": ROOT / "docs" / "start" / "install.md",
    CHINESE / "first-env.md": ROOT / "docs" / "start" / "first-env.md",
    **{CHINESE / "problems" / page.name: page for page in sorted(PROBLEMS.glob("*.md"))},
}
BLOCK = re.compile(r"^ *```(?:python|sh|text)\n.*?^ *```$", re.MULTILINE | re.DOTALL)


def test_every_chinese_page_has_an_english_one() -> None:
    assert {*CHINESE.rglob("*.md")} <= PAGES.keys()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_is_that_of_the_english_page(page: Path) -> None:
    assert BLOCK.findall(page.read_text(encoding="utf-8")) == BLOCK.findall(PAGES[page].read_text(encoding="utf-8"))
