"""Installs Melting Pot's substrates from PyPI, without its bots and TensorFlow.

    python -m muster.envs.install_meltingpot [arguments for pip]

It needs Linux on x86_64 or aarch64 with glibc 2.35 or newer (Debian 12, Ubuntu 22.04): the engine below, dmlab2d, has
wheels for no other. Where everything is installed already, nothing is done.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path

from muster.extras import installed_version, is_older

VERSION = "2.4.1"
# What substrates import, with the extra `meltingpot`. Melting Pot itself would bring TensorFlow, for its bots.
REQUIREMENTS = (
    "dmlab2d>=1.0.2",
    "dm-env",
    "ml-collections",
    "immutabledict",
    "reactivex",
    "dm-tree",
    "absl-py",
    "networkx",
)
OLDEST_GLIBC = (2, 35)
PROCESSORS = ("x86_64", "aarch64")

_ASSETS = "meltingpot-assets-2.3.0.tar.gz"
_INTERRUPTED = 130  # the shell's exit status for Ctrl-C


def main(arguments: Sequence[str]) -> int:
    """Installs what is missing. Returns the exit status: where pip fails, that of pip. arguments: passed on to pip."""
    if {"-h", "--help"} & set(arguments):
        print(str(__doc__).strip())
        return 0
    quiet = not {"-q", "-qq", "-qqq", "--quiet"}.isdisjoint(arguments)

    def say(text: str) -> None:
        if not quiet:
            print(text, flush=True)  # before pip writes to the same file

    if is_complete():
        say(f"dm-meltingpot {VERSION} is installed already, with all that substrates need.")
        return 0
    if (obstacle := obstacle_here()) is not None:
        print(obstacle, file=sys.stderr)
        return 1
    say("1 of 2: dmlab2d and the other packages that substrates need")
    if status := _pip(*arguments, *REQUIREMENTS):
        return status
    say(f"2 of 2: dm-meltingpot {VERSION}, built without its bots")
    with tempfile.TemporaryDirectory() as folder:
        put_empty_assets(Path(folder))
        # Not kept in pip's cache: there `pip install dm-meltingpot` would find a wheel without bots, too.
        options = ("--no-cache-dir", "--no-deps", *arguments, f"dm-meltingpot=={VERSION}")
        status = _pip(*options, environment={**os.environ, "TMPDIR": folder})
    if not status:
        say('Done. muster.make_vec("meltingpot/commons_harvest__open", num_envs=4) makes a vector env of a substrate.')
    return status


def is_complete() -> bool:
    """Returns whether the version is installed, with all that its substrates need."""
    for name, _, oldest in (requirement.partition(">=") for requirement in REQUIREMENTS):
        if (found := installed_version(name)) is None or is_older(found, oldest):
            return False
    return installed_version("dm-meltingpot") == VERSION


def obstacle_here() -> str | None:
    """The reason why Melting Pot cannot be installed here, in a sentence; None where nothing speaks against it."""
    if platform.system() != "Linux" or platform.machine() not in PROCESSORS:
        return (
            f"Muster runs Melting Pot on Linux on {' or '.join(PROCESSORS)}; "
            f"this is {platform.system()} on {platform.machine()}."
        )
    library, version = platform.libc_ver()
    needed = f"dmlab2d, the engine below Melting Pot, needs glibc {'.'.join(map(str, OLDEST_GLIBC))} or newer"
    if library != "glibc":
        return f"{needed}; this system has none of it."
    if tuple(int(number) for number in version.split(".")[:2]) < OLDEST_GLIBC:
        return f"{needed}; this system has {version}."
    return None


def put_empty_assets(folder: Path) -> None:
    """Puts an archive without bots into `folder`. With it as TMPDIR, the build of Melting Pot downloads none."""
    bots = tarfile.TarInfo("assets/saved_models")
    bots.type, bots.mode = tarfile.DIRTYPE, 0o755
    with tarfile.open(folder / _ASSETS, "w:gz") as archive:
        archive.addfile(bots)


def _pip(*arguments: str, environment: dict[str, str] | None = None) -> int:
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", *arguments]
    status = subprocess.run(command, env=environment, check=False).returncode
    if status:
        words = f"Melting Pot is not installed: pip ended with exit status {status}. Its own words are above."
        print(words, file=sys.stderr)
    return status if status >= 0 else 128 - status  # as shells do for a signal


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
