"""Names of the caller's script that an env's error in a worker misses, as its traceback shows."""

from __future__ import annotations

import os
import re
from collections.abc import Set

_MAIN = "__(?:mp_)?main__"
# What pickle, `import` and look-ups say of a module that has not the name.
_NOT_IN_MAIN = re.compile(
    rf"Can't get attribute '(\w+)[^']*' on <module '{_MAIN}'|attribute lookup (\w+)\S* on {_MAIN} failed|"
    rf"module '{_MAIN}' has no attribute '(\w+)'|cannot import name '(\w+)' from '{_MAIN}'|"
    rf"not found as {_MAIN}\.(\w+)"
)
_NOT_DEFINED = re.compile(r"name '(\w+)' is not defined")
_FRAME = re.compile(r'  File "(.+)", line \d+, in ')


def missing_name(type_name: str, message: str, traceback: str, *, script: str, names: Set[str]) -> str | None:
    """The name of the script that the error misses; None where it misses none, or may mean something else.

    traceback: formatted.  script: its path.  names: those that its top level binds.
    """
    for found in _NOT_IN_MAIN.finditer(traceback):
        name: str = next(filter(None, found.groups()))
        if name in names:
            return name
    if (undefined := _NOT_DEFINED.match(message)) and type_name == "NameError":
        name = undefined[1]
    elif type_name == "KeyError":
        name = message.strip("'")
    else:
        return None
    # A library has globals of its own, and a dict of the env's may have keys that are called like globals.
    lines = traceback.splitlines()
    frames = [(frame[1], line) for frame, line in zip(map(_FRAME.match, lines), lines[1:], strict=False) if frame]
    inner = [(file, line) for file, line in frames if not file.startswith("<")][-1:]  # <string>: `eval` and `exec`
    is_scripts = any(os.path.abspath(file) == script for file, _ in inner)
    looks_up = type_name == "NameError" or any("globals()" in line or "__main__" in line for _, line in inner)
    return name if name in names and is_scripts and looks_up else None
