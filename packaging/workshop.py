"""The places and the environments that wheels are built and tried in."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
DIST = ROOT / "dist"
WORK = ROOT / "build" / "wheels"  # environments and the compiler's cache, kept between calls
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def environment(python: str, name: str, requirements: list[str]) -> list[str]:
    """Makes a virtual environment with the pinned ``requirements``. Returns the command that runs a module in it."""
    home = WORK / name
    if not (home / "bin" / "pip").exists():  # which comes last
        run([python, "-m", "venv", str(home)])
    command = [str(home / "bin" / "python"), "-m"]
    constraints = ["--constraint", str(ROOT / "constraints.txt")]
    print(f"setting up {home.relative_to(ROOT)}", flush=True)
    run([*command, "pip", "install", "--disable-pip-version-check", "--quiet", *constraints, *requirements])
    return command


def tools_of(python: str) -> list[str]:
    """Makes the environment of the extra ``wheels``. Returns the command that runs a module in it."""
    return environment(python, "tools", PROJECT["project"]["optional-dependencies"]["wheels"])


def run(command: list[str], **variables: str) -> str:
    """What ``command`` prints; ends with it where the command fails."""
    done = subprocess.run(
        command,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        sys.exit(f"{done.stdout}\n{' '.join(command)}\nended with exit status {done.returncode}; its output is above.")
    return done.stdout
