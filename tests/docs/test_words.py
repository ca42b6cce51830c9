"""The English pages are written for a native reader: none of the words that make one stumble."""

from __future__ import annotations

import re

import pytest
from test_pages import BLOCK, PAGES, ROOT

TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
OWN = [page for page in (*PAGES, *TUTORIALS) if page.name != "changelog.md"]
START = r"(?:^|[.:!?] |\n\n|\| |\*\* )"
STUMBLES = {
    "a sentence that begins so": START + r"(?:What|Whether|Of|Where|Whoever)\b",
    "own": r"\b(?:of )?one's own\b",
    "resume": r"\bgo(?:es|ing)? on with (?:a|the|that) run\b|\bgone on with\b",
    "if, when": r", where (?:it|an?|the|there|they|you|no)\b",
    "subject, verb, object": r"\bhas not\b|\bof which\b|\bwhose\b|\bbeside\b",
    "says, warns": r"\btells\b(?! \w+ apart)|\bis told\b|\b(?:is|are) said\b",
}


@pytest.mark.parametrize("page", OWN, ids=lambda page: str(page.relative_to(ROOT)))
def test_nothing_makes_a_reader_stumble(page) -> None:
    text = re.sub(r"^ *```.*?^ *```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"(?<!\n)\n(?!\n)", " ", re.sub("`[^`]*`", "`code`", text))
    found = {why: [one[0].strip() for one in re.finditer(pattern, text)] for why, pattern in STUMBLES.items()}
    assert {why: words for why, words in found.items() if words} == {}


@pytest.mark.parametrize("page", OWN, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_sentence_stands_before_and_behind_each_program(page) -> None:
    text = page.read_text()
    behind = [text[one.end() :].lstrip()[:40] for one in BLOCK.finditer(text)]
    assert [words for words in behind if re.match(r"[a-z]", words)] == []
