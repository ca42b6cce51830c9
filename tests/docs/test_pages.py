"""Each block of code on these pages runs by itself, as who reads it would paste it, and prints what it says.

A block that begins with a comment of a file's name alone, ``# my_env.py``, is that file for all blocks of its page.
Code that is not run is the difference between two programs (``diff``), or a file of options (``toml``).
What a ``text`` block right behind says is what the program prints, where ``...`` stands for anything.
The pages in Chinese have the code of the English ones: see test_chinese.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

import programs

ROOT = Path(__file__).parents[2]
# The Chinese pages have the code of the English ones, see test_chinese.py; notebooks are run by test_site.py.
LEFT_OUT = ("_build", "adr", "zh", "tutorials")
DOCS = ROOT / "docs"
PAGES = [page for page in sorted(DOCS.rglob("*.md")) if page.relative_to(DOCS).parts[0] not in LEFT_OUT]
PAGES.insert(0, ROOT / "README.md")
HIDING = {"", "bash", "console", "py", "pycon", "python3", "shell"}
REASONS = ("it needs a cluster", "it needs Optuna", "it needs rl_zoo3", "it takes more than 60 s")
BLOCK = re.compile(
    r"(?:<!-- Not run by the tests: (?P<reason>[^>]+)\. -->\n\n?)?"
    r"^(?P<indent> *)```(?P<language>python|sh|toml)\n(?P<code>.*?)^(?P=indent)```"
    r"(?:\n\n```text\n(?P<printed>.*?)^```)?",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """A block of code of a page. name: the page's, with the block's number.  reason: why it is not run, or None."""

    page: Path
    name: str
    language: str
    code: str
    reason: str | None
    printed: str | None

    @property
    def file(self) -> str | None:
        """The name of the file that it is."""
        found = re.match(r"# ([\w/]+\.(?:py|toml|yaml))\n", self.code)
        return None if found is None else found[1]

    @property
    def runs(self) -> bool:
        return self.language != "toml" and self.reason is None


def blocks_of(page: Path) -> list[Block]:
    found = []
    for number, match in enumerate(BLOCK.finditer(page.read_text())):
        code = re.sub(f"^{match['indent']}", "", match["code"], flags=re.MULTILINE)
        name = f"{page.relative_to(ROOT).with_suffix('')}-{number}"
        found.append(Block(page, name, match["language"], code, match["reason"], match["printed"]))
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def test_few_blocks_are_not_run() -> None:
    programs_there = [block for block in BLOCKS if block.language != "toml"]
    left_out = [block for block in programs_there if block.reason is not None]
    print(f"{len(left_out)} of {len(programs_there)} programs are not run:", *(block.name for block in left_out))
    assert {block.reason for block in left_out} <= set(REASONS)
    assert len(left_out) <= 10


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_code_hides_behind_another_language(page: Path) -> None:
    opened = re.findall(r"^ *```(.*)$", page.read_text(), re.MULTILINE)[::2]
    assert not HIDING & {*opened}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_compiles(page: Path) -> None:
    for block in blocks_of(page):
        if block.language == "python":
            compile(block.code, page.name, "exec")


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("block", [pytest.param(block, id=block.name) for block in BLOCKS if block.runs])
def test_a_block_runs(block: Block, tmp_path: Path) -> None:
    for other in blocks_of(block.page):
        if other.file is not None:
            (tmp_path / other.file).parent.mkdir(exist_ok=True)
            (tmp_path / other.file).write_text(other.code)
    (tmp_path / "block").write_text(block.code)
    if block.language == "python":
        done = programs.run(tmp_path / "block", imports=programs.TORCH, cwd=tmp_path, timeout=100)
    else:
        environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        done = subprocess.run(
            ["bash", "-e", "block"], cwd=tmp_path, env=environ, timeout=100, capture_output=True, text=True
        )
    assert done.returncode == 0, f"{block.code}\n{done.stdout}{done.stderr}"
    if block.printed is not None:
        pattern = ".*".join(map(re.escape, block.printed.rstrip().split("...")))
        printed = "\n".join(map(str.rstrip, done.stdout.rstrip().splitlines()))
        assert re.fullmatch(pattern, printed, re.DOTALL), done.stdout
