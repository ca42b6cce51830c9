"""Each block of code on these pages runs by itself, as who reads it would paste it, and prints what it says.

A block that begins with a comment of a file's name alone, ``# my_env.py``, is that file for all blocks of its page.
What a ``text`` block right behind says is what the program prints, where ``...`` stands for anything.
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
PROBLEMS = ("bus-error", "egl", "eof-error", "local-objects", "main-guard")
PAGES = [
    *sorted((ROOT / "docs" / "start").glob("*.md")),
    *sorted((ROOT / "docs" / "tasks").glob("*.md")),
    *(ROOT / "docs" / "problems" / f"{name}.md" for name in PROBLEMS),
]
REASONS = ("it needs a cluster", "it needs a GPU", "it needs a simulator", "it takes more than 60 s")
BLOCK = re.compile(
    r"(?:<!-- Not run by the tests: (?P<reason>[^>]+)\. -->\n\n?)?"
    r"^(?P<indent> *)```(?P<language>python|sh)\n(?P<code>.*?)^(?P=indent)```"
    r"(?:\n\n```text\n(?P<printed>.*?)^```)?",
    re.MULTILINE | re.DOTALL,
)


class Block(NamedTuple):
    """A block of code of a page. reason: why it is not run, None where it is."""

    page: Path
    language: str
    code: str
    reason: str | None
    printed: str | None

    @property
    def file(self) -> str | None:
        """The name of the file that it is."""
        found = re.match(r"# ([\w/]+\.(?:py|toml|yaml))\n", self.code)
        return None if found is None else found[1]


def blocks_of(page: Path) -> list[Block]:
    found = []
    for match in BLOCK.finditer(page.read_text()):
        code = re.sub(f"^{match['indent']}", "", match["code"], flags=re.MULTILINE)
        found.append(Block(page, match["language"], code, match["reason"], match["printed"]))
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page)]


def test_few_blocks_are_not_run() -> None:
    left_out = [block for block in BLOCKS if block.reason is not None]
    assert {block.reason for block in left_out} <= set(REASONS)
    assert len(left_out) <= len(BLOCKS) / 10


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "block",
    [pytest.param(one, id=f"{one.page.relative_to(ROOT)}:{at}") for at, one in enumerate(BLOCKS) if one.reason is None],
)
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
        assert re.fullmatch(pattern, done.stdout.rstrip(), re.DOTALL), done.stdout
