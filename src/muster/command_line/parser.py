"""Options of a command from its words, by argparse: the fields of dataclasses, a group of options for each of them."""

from __future__ import annotations

import argparse
import inspect
import json
import shutil
import textwrap
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args, get_origin

from muster.arguments import alternatives, fields_of, option_of
from muster.errors import ConfigError, printable_lines
from muster.training.values import near, value_of

HELP = ("-h", "--help")

_METAVARS: dict[Any, str] = {int: "INT", float: "NUMBER", str: "TEXT", bool: "", Path: "PATH", Mapping: "JSON"}

_ALGORITHMS = (
    ": PPO trains a single agent, MAPPO several, and IPPO is --critic own. Other algorithms, such as DQN, get their "
    "data from muster.Collector, or train on the drop-ins for SB3 and TorchRL"
)
# What people look for, and what there is instead.
_SOUGHT = {
    "--algo": _ALGORITHMS,
    "--algorithm": _ALGORITHMS,
    "--self-play": ": a callback does it, see tasks/self-play in the docs",
}


class HelpShown(Exception):
    """The end of a command that has said all there is: its help."""


@dataclass(frozen=True)
class Parser:
    """The options of a command.

    command: such as "muster train".  kinds: dataclasses of fields that are a `muster.arguments.option` each. The
    docstring of the first begins the help, and the first lines of the others are the titles of groups.
    """

    command: str
    kinds: tuple[type, ...]

    def read(self, words: Sequence[str]) -> dict[str, Any]:
        """The values that the words have, by the names of the fields. Shows the help where they ask for it.

        Raises ConfigError.
        """
        try:
            found, left = self._argparse().parse_known_intermixed_args(list(map(_with_hyphens, words)))
        except argparse.ArgumentError as error:
            raise self._misused(error.argument_name or "") from None
        if unknown := next((word for word in left if word.startswith("-")), None):
            option = unknown.partition("=")[0]
            known = near(option, map(option_of, self._owners()))
            instead = _SOUGHT.get(option, f"{known}; {self.command} --help lists them")
            raise ConfigError(f"there is no option {option}{instead}")
        values = vars(found)
        if values.pop("help", False):
            self.show_help()
        if left:
            raise ConfigError(f"{left[0]!r} is one word too many; see {self.command} --help")
        owners = self._owners()
        return {name: value_of(owners[name], name, written) for name, written in values.items()}

    def show_help(self, values: Mapping[str, Any] | None = None, beginning: str = "") -> NoReturn:
        """Prints the help. values: to show in the place of the defaults.  beginning: a paragraph before the options."""
        print(printable_lines(self._argparse(values or {}, beginning).format_help()), end="", flush=True)
        raise HelpShown()

    def _owners(self) -> dict[str, type]:
        return {name: kind for kind in self.kinds for name in fields_of(kind)}

    def _misused(self, named: str) -> ConfigError:
        """The error for an option that lacks its value, or has one although it takes none. named: by argparse."""
        options = named.split("/")
        name = options[0].removeprefix("--").replace("-", "_")
        owner = self._owners().get(name)
        if owner is None or _is_switch(fields_of(owner)[name][0]):
            return ConfigError(f"{options[0]} takes no value: write {', or '.join(options)}")
        return ConfigError(f"{options[0]} needs a value; {self.command} --help says which")

    def _argparse(self, values: Mapping[str, Any] | None = None, beginning: str = "") -> argparse.ArgumentParser:
        positional = [name.upper() for name, (_, facts) in fields_of(self.kinds[0]).items() if facts["positional"]]
        parser = argparse.ArgumentParser(
            prog=self.command,
            usage=" ".join([self.command, "[OPTIONS]", *positional]),
            description=paragraphs(f"{inspect.getdoc(self.kinds[0])}\n\n{beginning}".rstrip()),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            argument_default=argparse.SUPPRESS,
            add_help=False,
            allow_abbrev=False,
            exit_on_error=False,
        )
        parser.add_argument(*HELP, action="store_true", help="show this help message and exit")
        group: Any = parser
        switch: Any = "store_true"
        for kind in self.kinds:
            if kind is not self.kinds[0]:
                title, _, _ = str(inspect.getdoc(kind)).partition("\n")
                # A file may turn these on, so that the words need a way to turn them off.
                group, switch = parser.add_argument_group(title.rstrip(".")), argparse.BooleanOptionalAction
            for name, (of, facts) in fields_of(kind).items():
                value = (values or {}).get(name, getattr(kind, name, None))
                names = [name] if facts["positional"] else [option_of(name), *filter(None, [facts["alias"]])]
                group.add_argument(*names, **_how(name, of, facts, value, switch))
        return parser


def paragraphs(text: str) -> str:
    """The text, with its paragraphs broken into lines for the terminal."""
    width = shutil.get_terminal_size().columns - 2
    return "\n\n".join(textwrap.fill(one, width, break_on_hyphens=False) for one in text.split("\n\n"))


def _with_hyphens(word: str) -> str:
    """``--num-envs=8`` for ``--num_envs=8``."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else word


def _how(name: str, kind: Any, facts: Mapping[str, Any], value: Any, switch: Any) -> dict[str, Any]:
    """How argparse reads and shows the option. value: to show.  switch: the action of an option that takes none."""
    silent = facts["positional"] or value in (None, ()) or (value is False and switch == "store_true")
    shown = "" if silent else f" (default: {write_value(value)})"
    how: dict[str, Any] = {"help": (facts["about"] + shown).replace("%", "%%")}
    if _is_switch(kind):
        return {**how, "action": switch}
    how["metavar"] = name.upper() if facts["positional"] else metavar_of(kind)
    if facts["repeated"]:
        return {**how, "action": "append"}
    if any(get_origin(one) is tuple for one in alternatives(kind)):
        return {**how, "nargs": "*"}
    return {**how, "nargs": "?"} if facts["positional"] else how


def _is_switch(kind: Any) -> bool:
    return bool in alternatives(kind) and {*alternatives(kind)} <= {bool, type(None)}


def write_value(value: Any) -> str:
    """A value as it may be written in an option."""
    if isinstance(value, tuple):
        return " ".join(map(write_value, value))
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 100_000:
        return f"{value:_}"
    if isinstance(value, Mapping):
        return json.dumps(dict(value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def metavar_of(kind: Any) -> str:
    """The word for a value of the type `kind` in a command's help."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Literal:
        return parts[0] if len(parts) == 1 else "{" + ",".join(parts) + "}"
    if origin is tuple:
        return metavar_of(parts[0])
    several = [one for one in alternatives(kind) if one is not types.NoneType]
    return "|".join(filter(None, map(metavar_of, several))) if several != [kind] else _METAVARS[origin or kind]
