"""Options of a run from words, of a command line and of a file: ``100k``, ``2e6``, ``1_000_000`` are numbers."""

from __future__ import annotations

import difflib
import json
import re
import tomllib
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, get_args, get_origin

from muster.arguments import alternatives, checked_option, fields_of, option
from muster.errors import ConfigError
from muster.extras import imports_for

_NUMBER = re.compile(r"([+-]?(?:\d+(?:_\d+)*\.?(?:\d+)?|\.\d+)(?:e[+-]?\d{1,3})?)([kmb]?)", re.IGNORECASE)
_FACTORS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}
_OF_ENV = "keyword arguments of the env, such as '{\"size\": 5}'"
_AROUND = "module:callable or file.py:callable, env -> env; may be repeated, the first one innermost"
_ALIASES = {"kwargs": "env_kwargs", "wrappers": "wrapper"}


@dataclass(frozen=True)
class NamedEnv:
    """The env of a command, and what is around it."""

    env: str | None = option(
        None, "an env id (CartPole-v1, module:Id-v0), module:factory, or file.py:factory", positional=True
    )
    env_kwargs: Mapping[str, Any] = option({}, _OF_ENV, alias="--kwargs")
    wrapper: tuple[str, ...] = option((), _AROUND, repeated=True)


def value_of(owner: type, name: str, written: Any) -> Any:
    """The value of the field `name` of the dataclass `owner`, from words or another value. Raises ConfigError."""
    return checked_option(owner, name, _read(fields_of(owner)[name][0], written))


def values_in(table: Mapping[str, Any], owners: Mapping[str, type], *, words: bool = False) -> dict[str, Any]:
    """The checked values of a table by the names of their fields. Raises ConfigError, also for unknown names.

    owners: the dataclasses of the names that may be there.  words: whether text may stand for what is no text.
    """
    values = {}
    for key, written in table.items():
        name = _ALIASES.get(key, key.replace("-", "_"))
        if name not in owners:
            own = "; what the env itself takes goes into env_kwargs"
            raise ConfigError(f"{key} is no option of the env or of a run{near(name, owners) or own}")
        try:
            values[name] = (value_of if words else checked_option)(owners[name], name, written)
        except ConfigError as error:
            raise ConfigError(key, error.expected, error.got) from None
    return values


def read_run_file(path: Path, owners: Mapping[str, type]) -> dict[str, Any]:
    """The values of a run's file by the names of their fields: YAML by its suffix, else TOML. owners: as `values_in`.

    Raises ConfigError, which names file and key, and ImportError without PyYAML.
    """
    try:
        text = path.read_text(encoding="utf-8")
        table = _read_yaml(text) if path.suffix in (".yaml", ".yml") else tomllib.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        problem = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"--config {path} cannot be read: {problem}") from None
    try:
        return values_in(table, owners, words=True)
    except (ConfigError, RecursionError) as error:
        raise ConfigError(f"{path}: {error}") from None


def near(name: str, names: Iterable[str]) -> str:
    """The end of a message about an unknown name: the known one that may be meant, where one is as near as a slip."""
    found = difflib.get_close_matches(name, list(names), 1, cutoff=0.7)
    return f" (did you mean {found[0]}?)" if found else ""


def _read_yaml(text: str) -> dict[str, Any]:
    with imports_for("--config in YAML needs", "muster-rl[loggers]", "yaml"):
        import yaml
    try:
        table = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None) or error
        raise ConfigError(f"{problem}" + (f" (line {mark.line + 1})" if mark else "")) from None
    if not isinstance(table, dict):
        raise ConfigError(f"it holds no names with values, as in num_envs: 8, but {type(table).__name__}")
    return {str(key): value for key, value in table.items()}


def _read(kind: Any, written: Any) -> Any:
    """The value of a word, or of several in a list, for an option of the type `kind`.

    A word that cannot be read so stays text, and a value that is no text what it is: `checked_option` refuses them.
    """
    if isinstance(written, list):
        listed = next((one for one in alternatives(kind) if get_origin(one) is tuple), kind)
        (one,) = get_args(listed)[:1] or (kind,)
        return tuple(_read(one, word) for word in written)
    if isinstance(written, str):
        for one in alternatives(kind):
            if (value := _read_one(one, written)) is not written:
                return value
    return written


def _read_one(kind: Any, word: str) -> Any:
    """The value of a word, or the word itself where it is none of `kind`."""
    origin = get_origin(kind)
    if origin is tuple:
        return (_read(get_args(kind)[0], word),)
    if origin is Mapping:
        try:
            return json.loads(word)
        except json.JSONDecodeError:
            return word
    if kind is types.NoneType and word.lower() == "none":
        return None
    if kind in (int, float) and (match := _NUMBER.fullmatch(word.strip())) is not None:
        number = Decimal(match[1]) * _FACTORS[match[2].lower()]
        if kind is float or (number == number.to_integral_value() and abs(number) < 2**63):
            return kind(number)
    return word
