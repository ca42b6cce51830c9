"""Files and functions that a reader can take in at once, and names that say which file is meant."""

from __future__ import annotations

import ast
import importlib
import io
import tokenize
from collections import Counter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "src" / "muster"
MOST_LINES = 500
MOST_LINES_OF_CODE = 60
MOST_ROOT_MODULES = 7

# Functions that are longer, and why.
LONG_FUNCTIONS = {
    "interop/torchrl/parallel.py:__init__": "its arguments are those of TorchRL's class, which takes them one by one",
    "vector/make.py:make_vec": "its arguments, which users know from the peers, are checked one by one",
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


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_no_file_is_too_long(path: Path) -> None:
    assert path.read_text(encoding="utf-8").count("\n") <= MOST_LINES


def test_no_function_is_too_long() -> None:
    long = set()
    for path in MODULES:
        source = path.read_text(encoding="utf-8")
        code = lines_of_code(source)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef):
                count = len(code & set(range(node.lineno, (node.end_lineno or 0) + 1)))
                if count > MOST_LINES_OF_CODE:
                    long.add(f"{name_of(path)}:{node.name}")
    assert long == LONG_FUNCTIONS.keys()


def test_few_modules_stand_at_the_root() -> None:
    named_by_python = ("__init__.py", "__main__.py")
    assert len([path for path in MODULES if path.parent == PACKAGE and path.name not in named_by_python]) <= (
        MOST_ROOT_MODULES
    )


def test_no_two_modules_have_one_name() -> None:
    counts = Counter(path.name for path in MODULES if path.name != "__init__.py")
    assert [name for name, count in counts.items() if count > 1] == []


@pytest.mark.parametrize("package", [path for path in MODULES if path.name == "__init__.py"], ids=name_of)
def test_no_module_has_the_name_of_a_public_function(package: Path) -> None:
    folder = package.parent
    public = getattr(importlib.import_module(".".join(["muster", *folder.relative_to(PACKAGE).parts])), "__all__", ())
    modules = {path.stem for path in folder.glob("*.py")} | {path.name for path in folder.iterdir() if path.is_dir()}
    assert modules & set(public) == set()
