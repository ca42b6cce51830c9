"""Options of a command from its words, by tyro; what cannot be read is a `Mistake` of one line, not tyro's box."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
import io
import itertools
import os
import shutil
import sys
import textwrap
import typing
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import tyro

from muster.command_line.mistakes import Ended, Mistake, option_of
from muster.command_line.values import REGISTRY, find_unread

Options = TypeVar("Options")

HELP = ("-h", "--help")
_VALUES_OF_SWITCHES = ("true", "false", "yes", "no", "on", "off", "1", "0", "none")


def asks_for_help(words: Sequence[str]) -> bool:
    return any(word in HELP for word in words)


def read_options(default: Options, words: Sequence[str], command: str) -> Options:
    """`default`, a dataclass, with the values that `words` have; prints the help where they ask for it, and exits.

    Raises Mistake.
    """
    if asks_for_help(words):
        show_help(default, command)
    _refuse_values_of_switches(default, words)
    try:
        options, left = _call_tyro(default, words, command, console_outputs=False, return_unknown_args=True)
    except SystemExit:  # the one thing that is wrong for tyro: the rule for values reads whatever there is
        raise Mistake(_about_missing_value(words, command)) from None
    if left:
        raise Mistake(_about_unknown(left[0], default, command))
    for name, value in named_values(options):
        check_value(option_of(name), value)
    return options  # type: ignore[no-any-return]  # of the default's type


def check_value(name: str, value: Any) -> None:
    """Raises Mistake where a value could not be read. name: the option's, in the words of where it was written."""
    unread = find_unread(value)
    if unread is not None:
        hint = " (it takes all words up to the next option)" if isinstance(value, tuple) and len(value) > 1 else ""
        raise Mistake(f"{name} must be {unread.expected}, got {unread.got!r}{unread.why}{hint}")


def check_least(options: Any, **least: float) -> None:
    """Raises Mistake for a value below its least one. least: by the names of fields; None is no value."""
    for name, bound in least.items():
        value = getattr(options, name)
        if value is not None and value < bound:
            raise Mistake(f"{option_of(name)} must be at least {bound}, got {value}")


def show_help(default: Any, command: str, beginning: str = "") -> NoReturn:
    """Prints the options with their values in `default`, and exits. beginning: a paragraph before the options."""
    about = inspect.cleandoc(type(default).__doc__ or "")
    page = HelpPage()
    with page:
        _call_tyro(default, ["--help"], command, description=f"{about}\n\n{beginning}".rstrip())
    raise Ended(0)


class HelpPage(io.StringIO):
    """Prints at the end of a ``with`` block what tyro has printed, paragraphs broken into lines as its tables are."""

    def __init__(self) -> None:
        super().__init__()
        self._stdout = sys.stdout
        self._redirection = contextlib.redirect_stdout(self)

    @property
    def encoding(self) -> str:  # type: ignore[override]  # tyro draws its tables by this
        return getattr(self._stdout, "encoding", None) or "ascii"

    def isatty(self) -> bool:
        return self._stdout.isatty()

    def __enter__(self) -> HelpPage:
        self._redirection.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> bool:  # type: ignore[override]  # io's: None
        self._redirection.__exit__(None, None, None)
        width = shutil.get_terminal_size().columns
        lines = self.getvalue().replace("\u2022", "-").rstrip().split("\n")  # tyro draws bullets in ASCII, too
        broken = [textwrap.fill(line, width, break_on_hyphens=False) if line[:1].isalpha() else line for line in lines]
        try:
            print("\n".join(broken), flush=True)
        except BrokenPipeError:  # the reader has seen enough, as `head` does; Python flushes once more at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return kind is SystemExit  # tyro's, after its help


def near(name: str, names: Iterable[str]) -> str:
    """The end of a message about an unknown name: the known one that may be meant."""
    found = difflib.get_close_matches(name, list(names), 1)
    return f" (did you mean {found[0]}?)" if found else ""


def _call_tyro(default: Any, words: Sequence[str], command: str, **options: Any) -> Any:
    config = (tyro.conf.OmitArgPrefixes,)
    with warnings.catch_warnings(action="ignore"):  # of defaults that are not of their type: whoever takes them says so
        return tyro.cli(
            type(default), args=words, default=default, prog=command, registry=REGISTRY, config=config, **options
        )


def names_of(options: Any) -> list[str]:
    """The names of the fields that are options, those of parts included."""
    return [name for name, _ in named_values(options)]


def named_values(options: Any) -> Iterator[tuple[str, Any]]:
    """Name and value of each option, those of parts included."""
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if dataclasses.is_dataclass(value) and find_unread(value) is None:
            yield from named_values(value)
        else:
            yield field.name, value


def _about_missing_value(words: Sequence[str], command: str) -> str:
    for word, after in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--") and word != "--" and "=" not in word and after.startswith("--"):
            return f"{word} needs a value; {command} --help says which"
    return f"the options cannot be read; see {command} --help"


def _about_unknown(word: str, default: Any, command: str) -> str:
    if not word.startswith("-"):
        return f"{word!r} is one word too many; see {command} --help"
    option = word.partition("=")[0].replace("_", "-")
    known = [option_of(name) for name in names_of(default)] + list(filter(None, _switches(default).values()))
    return f"there is no option {option}{near(option, known)}; {command} --help lists them"


def _refuse_values_of_switches(default: Any, words: Sequence[str]) -> None:
    """Raises Mistake for ``--switch=value`` and ``--switch False``, which tyro would take for the switch and an ENV."""
    switches = _switches(default)
    both = {one: (yes, no) for yes, no in switches.items() for one in (yes, no) if one}
    for word, after in itertools.zip_longest(words, words[1:], fillvalue=""):
        flag, equals, value = word.partition("=")
        value = value if equals else after
        if (ways := both.get(flag.replace("_", "-"))) and (equals or value.lower() in _VALUES_OF_SWITCHES):
            raise Mistake(f"{flag} takes no value, got {value}: write {', or '.join(filter(None, ways))}")


def _switches(options: Any) -> dict[str, str]:
    """The options that take no value, each with its opposite, ``--no-...``, or an empty text where it has none."""
    kinds = typing.get_type_hints(type(options), include_extras=True)
    found: dict[str, str] = {}
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if dataclasses.is_dataclass(value):
            found |= _switches(value)
        elif isinstance(value, bool):
            option = option_of(field.name)
            found[option] = f"--no-{option.removeprefix('--')}" if kinds[field.name] is bool else ""
    return found
