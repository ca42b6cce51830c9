"""Files and functions that a reader can take in at once, and names that say which file is meant."""

from __future__ import annotations

import ast
import importlib
import io
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent / "src" / "muster"
MOST_LINES = 500
MOST_LINES_OF_CODE = 60
MOST_ROOT_MODULES = 7
NAMED_BY_PYTHON = ("__init__.py", "__main__.py")

# Functions that are longer, and why.
LONG_FUNCTIONS = {
    "vector/make.py:make_vec": "its arguments, which users know from the peers, are checked one by one",
    "rollout/multi_collector.py:__init__": "its arguments are half of it",
}

SOURCES = sorted(path for pattern in ("*.py", "*.pyi", "*.hpp", "*.cpp") for path in PACKAGE.rglob(pattern))
MODULES = [path for path in SOURCES if path.suffix == ".py"]


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def lines_of_code(source: str) -> set[int]:
    """The numbers of the lines that hold more than comments and docstrings."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    blank = (
        *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
        *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
    )
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in blank:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines - docstrings


def long_functions() -> Iterator[str]:
    for path in MODULES:
        source = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                lines = range(node.lineno, (node.end_lineno or 0) + 1)
                if len(lines) > MOST_LINES_OF_CODE and len(lines_of_code(source) & {*lines}) > MOST_LINES_OF_CODE:
                    yield f"{name_of(path)}:{node.name}"


def hidden_modules() -> Iterator[str]:
    """Modules that have the name of a public function of their package."""
    for path in MODULES:
        if path.name == "__init__.py":
            folder = path.parent
            package = importlib.import_module(".".join(["muster", *folder.relative_to(PACKAGE).parts]))
            held = {one.stem for one in folder.glob("*.py")} | {one.name for one in folder.iterdir() if one.is_dir()}
            yield from (f"{package.__name__}.{name}" for name in held & set(getattr(package, "__all__", ())))


def test_every_file_is_short_and_has_a_name_of_its_own() -> None:
    assert [name_of(path) for path in SOURCES if path.read_text(encoding="utf-8").count("\n") > MOST_LINES] == []
    assert set(long_functions()) == LONG_FUNCTIONS.keys()
    at_the_root = [path for path in MODULES if path.parent == PACKAGE]
    assert len([path for path in at_the_root if path.name not in NAMED_BY_PYTHON]) <= MOST_ROOT_MODULES
    counts = Counter(path.name for path in MODULES if path.name != "__init__.py")
    assert [name for name, count in counts.items() if count > 1] == []
    assert list(hidden_modules()) == []
