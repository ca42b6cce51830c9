"""The pages in Chinese have the code of their English pages, comments in Chinese, and one name for each page."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHINESE, DOCS = ROOT / "docs" / "zh", ROOT / "docs"
STARTS = ("install", "first-env", "train", "ten-minutes")
# English page by Chinese page.
PAGES = {
    ROOT / "README.zh-CN.md": ROOT / "README.md",
    CHINESE / "index.md": DOCS / "index.md",
    **{CHINESE / f"{name}.md": DOCS / "start" / f"{name}.md" for name in STARTS},
    **{CHINESE / "problems" / page.name: page for page in sorted((DOCS / "problems").glob("*.md"))},
    **{page: DOCS / "tasks" / page.name for page in sorted((CHINESE / "tasks").glob("*.md"))},
}
BLOCK = re.compile(r"^ *```(python|sh|text)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[((?:`[^`]*`|[^]`[])*)\]\(([\w./-]+\.md)[^)]*\)")
HAN = re.compile("[\u4e00-\u9fff]")
# Their first block is no error, but says in words what happens.
IN_WORDS = ("envs-that-hang.md", "many-processes.md", "slow-close.md")

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def blocks_of(page: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def without_comments(language: str, code: str) -> str:
    """The code as what is run, without docstrings; the names of files that it is saved as stay."""
    if language == "text":
        return code
    if language == "sh":
        return re.sub(r" *#.*", "", code)
    tree, file = ast.parse(code), re.match(r"# [\w/]+\.py\n", code)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            del node.body[0]
    return (file[0] if file else "") + ast.dump(tree)


def sayings(language: str, code: str) -> list[str]:
    """The comments and docstrings of a program."""
    if language != "python":
        return re.findall(r"(?<!\S)#.*", code) if language == "sh" else []
    tokens = tokenize.generate_tokens(io.StringIO(code).readline)
    comments = [token.string for token in tokens if token.type == tokenize.COMMENT]
    owners = (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ClassDef | ast.FunctionDef))
    return [*comments, *filter(None, map(ast.get_docstring, owners))]


def title_of(page: Path) -> str:
    found = re.search(r"^# (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    return found[1]


def test_every_chinese_page_has_an_english_one() -> None:
    assert {*CHINESE.rglob("*.md")} <= PAGES.keys()


@each_page
def test_code_is_that_of_the_english_page(page: Path) -> None:
    chinese, english = blocks_of(page), blocks_of(PAGES[page])
    if page.name in IN_WORDS:
        assert HAN.search(chinese[0][1])
        chinese, english = chinese[1:], english[1:]
    codes = [[without_comments(*block) for block in blocks] for blocks in (chinese, english)]
    assert codes[0] == codes[1]


@each_page
def test_comments_are_in_chinese(page: Path) -> None:
    said = [text for block in blocks_of(page) for text in sayings(*block)]
    assert [text for text in said if re.search(r"[a-z]{2,} [a-z]{2,}", text) and not HAN.search(text)] == []


@pytest.mark.parametrize("page", sorted(CHINESE.rglob("*.md")), ids=lambda page: str(page.relative_to(CHINESE)))
def test_a_page_has_one_name_and_its_english_twin_is_not_linked(page: Path) -> None:
    linked = [(name, (page.parent / target).resolve()) for name, target in LINK.findall(page.read_text("utf-8"))]
    others = {name: title_of(there) for name, there in linked if there.is_relative_to(CHINESE)}
    assert [(name, title) for name, title in others.items() if name != title] == []
    assert {there for _, there in linked} & {*PAGES.values()} == set()
