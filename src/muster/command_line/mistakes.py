"""Errors as every command reports them: one line, in the words of the command line, and an exit status."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

import gymnasium as gym

from muster.command_line.streams import about_stdout, say_error
from muster.errors import ConfigError, EnvError, MusterError, RecipeError

FAILED, MISUSED, SIGNALLED = 1, 2, 128  # the last one less the signal's number
_NOT_THE_USERS = (f"{Path(__file__).resolve().parents[1]}/", f"{Path(os.__file__).resolve().parent}/")
_UNKNOWN = (gym.error.NameNotFound, gym.error.NamespaceNotFound)


class Mistake(Exception):
    """A command line that makes no sense, in its own words."""


class Ended(Exception):
    """The end of a command that has said all there is to say. status: its exit status."""

    def __init__(self, status: int) -> None:
        super().__init__(status)
        self.status = status


@contextmanager
def reported(command: str, options: Collection[str] = ()) -> Iterator[None]:
    """Encloses a command: reports what is no fault of ours in one line on stderr, and raises `Ended`.

    options: the names in Python that stand for options. The traceback of a user's own env follows its line.
    """
    try:
        yield
    except (Mistake, MusterError, gym.error.Error, ImportError, OSError, MemoryError, RuntimeError) as error:
        if isinstance(error, OSError) and (broken := about_stdout(error)) is not None:
            if broken:
                say_error(f"{command}: error: {broken}")
            raise Ended(FAILED) from None
        if type(error) is RuntimeError and "allocate memory" not in str(error):
            raise  # that one is torch's, for a tensor that is too big
        said = str(error) if isinstance(error, Mistake) else in_own_words(_said_of(error), options)
        say_error(f"{command}: error: {one_line(said)}")
        if isinstance(error, EnvError) and _shows_users_code(error):
            say_error((error.worker_traceback or "").rstrip())
        misused = isinstance(error, (Mistake, ConfigError, RecipeError))
        raise Ended(MISUSED if misused else FAILED) from error


def one_line(text: str) -> str:
    """The text without its line breaks, and without code, which is indented and is Python."""
    lines = re.sub(r"(?<=[\w)'\"])\n(?=[A-Z])", ".\n", text).replace("\t", "    ").split("\n")
    prose = [line.strip() for line in lines if not line.startswith("    ")]
    said = " ".join(line for line in prose if line)
    return said if len(prose) == len(lines) else said.removesuffix(":")


def _said_of(error: Exception) -> str:
    if isinstance(error, gym.error.Error):
        notes = getattr(error, "__notes__", [])  # which id may be meant
        if isinstance(error, _UNKNOWN) and not notes and "Did you mean" not in str(error):
            notes = ["If it is of a package that is installed, write the module before it: module:Id-v0."]
        return " ".join([str(error), *notes])
    if isinstance(error, (MemoryError, RuntimeError)) and not isinstance(error, MusterError):
        return f"there is not enough memory; choose smaller numbers ({type(error).__name__}: {error})"
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return str(error)


def _shows_users_code(error: EnvError) -> bool:
    """Whether the worker's traceback leads into code of the user; an env that refuses its arguments needs none."""
    refused = error.step is None and error.original_type == "TypeError" and "argument" in error.message
    files = re.findall(r'^  File "(.+)", line \d+, in ', error.worker_traceback or "", re.MULTILINE)
    return not refused and any(map(_is_users, files))


def _is_users(file: str) -> bool:
    installed = re.search("[/\\\\](site|dist)-packages[/\\\\]", file) is not None
    return not installed and file[:1] != "<" and not os.path.realpath(file).startswith(_NOT_THE_USERS)


def in_own_words(text: str, options: Collection[str]) -> str:
    """The sentence, with options by their names on the command line: ``num_envs=8`` is ``--num-envs 8`` there.

    A name that is a plain word, too, such as "env", is an option only before "=" and "must".
    """
    for name in ("wrappers", *options):
        option = option_of(name)
        text = re.sub(rf'(?<![\w.-]){name}="(\w+)"(?: or "(\w+)")?', rf"{option} \1", text)
        text = re.sub(rf"(?<![\w.-]){name}=True\b", option, text)
        text = re.sub(rf"(?<![\w.-]){name}=(?=\w)", f"{option} ", text)
        end = r"(?![\w(/-]|\.\w)" if "_" in name else "(?= must)"
        text = re.sub(rf"(?<![\w./'-]){name}{end}", option, text)
    return text


def option_of(name: str) -> str:
    """The option of a field's name."""
    if name in ("env", "run"):
        return name.upper()
    return f"--{'wrapper' if name == 'wrappers' else name.replace('_', '-')}"
