"""Errors as every command reports them: one line, in the words of the command line, and an exit status."""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import gymnasium as gym

from muster.errors import ConfigError, EnvError, MusterError, RecipeError

FAILED, MISUSED, SIGNALLED = 1, 2, 128  # the last one less the signal's number


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

    options: the names in Python that stand for options. The traceback of an env that raised follows its line.
    """
    try:
        yield
    except (Mistake, ConfigError, RecipeError) as error:
        said = str(error) if isinstance(error, Mistake) else in_own_words(str(error), options)
        print(f"{command}: error: {said}", file=sys.stderr)
        raise Ended(MISUSED) from error
    except (MusterError, gym.error.Error, ImportError, OSError) as error:
        notes = getattr(error, "__notes__", ()) if isinstance(error, gym.error.Error) else ()  # which id may be meant
        print(f"{command}: error: {' '.join([str(error), *notes])}", file=sys.stderr)
        if isinstance(error, EnvError) and error.worker_traceback and not _is_users_mistake(error):
            print(error.worker_traceback.rstrip(), file=sys.stderr)
        raise Ended(FAILED) from error


def _is_users_mistake(error: EnvError) -> bool:
    """Whether an env did no more than refuse what it was called with: its id, or its keyword arguments."""
    refused = error.step is None and error.original_type == "TypeError" and "argument" in error.message
    return refused or isinstance(error.__cause__, gym.error.Error)


def in_own_words(text: str, options: Collection[str]) -> str:
    """The sentence, with options by their names on the command line: ``num_envs=8`` is ``--num-envs 8`` there.

    A name that is a plain word, too, such as "env", is an option only before "=" and "must".
    """
    for name in ("wrappers", *options):
        option = option_of(name)
        text = re.sub(rf'(?<![\w.-]){name}="(\w+)"(?: or "(\w+)")?', rf"{option} \1", text)
        text = re.sub(rf"(?<![\w.-]){name}=True\b", option, text)
        text = re.sub(rf"(?<![\w.-]){name}=(?=\w)", f"{option} ", text)
        end = r"(?![\w(./-])" if "_" in name else "(?= must)"
        text = re.sub(rf"(?<![\w./-]){name}{end}", option, text)
    return text.replace("PPOConfig: ", "")


def option_of(name: str) -> str:
    """The option of a field's name."""
    if name in ("env", "run"):
        return name.upper()
    return f"--{'wrapper' if name == 'wrappers' else name.replace('_', '-')}"
