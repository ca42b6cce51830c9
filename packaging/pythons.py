"""The Pythons of this machine: those in PATH, those of pyenv, and those that PYTHONS names."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

MINORS = range(11, 30)


@dataclass(frozen=True)
class Python:
    path: str
    version: tuple[int, int, int]
    machine: str  # the processor that it is compiled for, as platform.machine() names it

    @property
    def name(self) -> str:
        return f"{self.version[0]}.{self.version[1]}"


def demanded(pythons: list[Python], names: tuple[str, ...]) -> dict[str, Python]:
    """``pythons`` by name. Ends with a sentence where one of ``names`` is not among them."""
    by_name = {python.name: python for python in pythons}
    if missing := [name for name in names if name not in by_name]:
        sys.exit(f"No Python {' and no Python '.join(missing)} found in PATH, pyenv or PYTHONS. It takes each of them.")
    return by_name


def found() -> list[Python]:
    """One Python of each version from 3.11 on and of each processor, the newest of those that answer, by version."""
    newest: dict[tuple[str, str], Python] = {}
    for python in filter(None, map(_asked, _candidates())):
        key = python.name, python.machine
        if key not in newest or newest[key].version < python.version:
            newest[key] = python
    return sorted(newest.values(), key=lambda python: (python.version, python.machine))


def _candidates() -> list[str]:
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    in_path = filter(None, (shutil.which(f"python3.{minor}") for minor in MINORS))
    return [
        *map(os.path.expanduser, os.environ.get("PYTHONS", "").split()),
        *in_path,
        *map(str, sorted(pyenv.glob("versions/3.*/bin/python"))),
    ]


def _asked(path: str) -> Python | None:
    """What the Python at ``path`` says about itself; None where it does not answer or is older than 3.11."""
    question = "import platform, sys; print(*sys.version_info[:3], platform.machine())"
    try:
        answer = subprocess.run([path, "-c", question], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    *version, machine = answer.stdout.split()
    major, minor, patch = map(int, version)
    return Python(path, (major, minor, patch), machine) if (major, minor) >= (3, 11) else None
