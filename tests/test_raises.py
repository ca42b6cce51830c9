"""Every exception that Muster raises is a MusterError, and where a builtin is expected that as well."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import muster
from muster.errors import MusterError

PACKAGE = Path(__file__).parent.parent / "src" / "muster"

# Everywhere: what Python's protocols ask for, and what names the pip line.
ALWAYS = {"AttributeError", "KeyError", "StopIteration", "NotImplementedError", "ImportError", "ModuleNotFoundError"}
# By module, or by folder, of what else is made there, and why.
EXCEPTED: dict[str, tuple[set[str], str]] = {
    "cli.py": ({"SystemExit"}, "the command line's own"),
    "command_line": ({"HelpShown"}, "the command line's own"),
    "interop/gymnasium.py": (
        {"ValueError", "AssertionError"},
        "Gymnasium's, in its words",
    ),
    "interop/agreed_spaces.py": ({"ValueError", "TypeError", "RuntimeError"}, "Gymnasium's, in its words"),
    "interop/torchrl/libs.py": ({"RuntimeError"}, "TorchRL's, in its words"),
    "transport/channel.py": ({"ChannelClosed", "TimeoutError"}, "a channel's: backends and workers explain them"),
    "hosts/env_resident.py": ({"HostFailed"}, "stays between the two ends of a pool: the backend raises its failure"),
    "hosts/trial.py": ({"TrialFailed"}, "stays in the file: the trial's outcome says how it ended"),
    "pool/pool.py": ({"ChannelClosed"}, "stays in the file: the worker is lost"),
    "pool/launcher.py": ({"OSError"}, "stays in the folder: the errno goes to the caller"),
    "pool/launcher_client.py": (
        {"LauncherLost", "OSError"},
        "stays in the folder: another launcher is started, or the error names its limit",
    ),
    "rollout/replicas/hooks.py": (
        {"ReplicaFailed"},
        "stays in the folder: the learner's side raises the user's error in its place",
    ),
    "training/run_folder.py": ({"OSError"}, "the system's, with the file that it lacks"),
    "training/stopping.py": ({"KeyboardInterrupt"}, "what Python's own handler raises for Ctrl-C"),
    "vector/side_by_side.py": ({"_NotKnown"}, "stays in the file: the outcome says what is not known"),
    "pickling/probe.py": (
        {"TimeoutError", "TypeError"},
        "for pickle, which it refuses an object by; stays in the folder",
    ),
}

MODULES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def exceptions_made(tree: ast.AST) -> Iterator[tuple[int, ast.expr]]:
    """Line and class, as it is written, of what may be an exception's: raised as it is, or called."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield node.lineno, node.func
        elif isinstance(node, ast.Raise) and node.exc is not None and not isinstance(node.exc, ast.Call):
            yield node.lineno, node.exc


def value_of(written: ast.expr, names: dict[str, Any]) -> Any:
    """What a name, or an attribute of one, stands for at the top of its module; None for all else."""
    if isinstance(written, ast.Name):
        return names.get(written.id, getattr(builtins, written.id, None))
    if isinstance(written, ast.Attribute):
        return getattr(value_of(written.value, names), written.attr, None)
    return None


def complaints(tree: ast.AST, names: dict[str, Any], allowed: set[str]) -> list[str]:
    """Line and class of every exception that is made there and should not be."""
    found = []
    for line, written in exceptions_made(tree):
        cls = value_of(written, names)
        if not (inspect.isclass(cls) and issubclass(cls, BaseException)) or issubclass(cls, MusterError):
            continue
        if cls.__name__ not in allowed:
            found.append(f"line {line}: {cls.__name__}")
    return found


def complaints_about(path: Path) -> list[str]:
    dotted = ".".join(["muster", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__")
    try:
        names = vars(importlib.import_module(dotted))
    except ImportError:  # of a package that is not installed
        return []
    excepted = [EXCEPTED.get(name, (set(), ""))[0] for name in (name_of(path), name_of(path.parent))]
    return complaints(ast.parse(path.read_text(encoding="utf-8")), names, ALWAYS.union(*excepted))


def classes_made(name: str) -> set[str]:
    """The classes, as they are written, of what may be an exception in a module or a folder."""
    path = PACKAGE / name
    trees = [ast.parse(one.read_text(encoding="utf-8")) for one in (path.glob("*.py") if path.is_dir() else [path])]
    return {ast.unparse(written).split(".")[-1] for tree in trees for _, written in exceptions_made(tree)}


def test_every_exception_that_is_made_is_a_musters() -> None:
    assert {name_of(path): found for path in MODULES if (found := complaints_about(path))} == {}
    assert [name for name, (allowed, _) in EXCEPTED.items() if not allowed <= classes_made(name)] == []  # is needed


def test_only_a_builtin_is_noticed() -> None:
    for source in (
        "raise ValueError('no')",
        "raise ValueError",
        "raise builtins.TypeError('no') from None",
        "error = RuntimeError('no')",
        "def f():\n    return OSError(3, 'no')",
    ):
        assert len(complaints(ast.parse(source), {"builtins": builtins}, ALWAYS)) == 1, source
    for source in (
        *("raise ConfigError('no')", "raise error", "raise AttributeError('no')"),
        "raise to_exception(failure)",
    ):
        assert complaints(ast.parse(source), vars(muster.errors), ALWAYS) == [], source
