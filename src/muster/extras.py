"""Packages that only some parts of Muster need: the sentences for those that are missing or too old."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import NamedTuple

# A test holds it to pyproject.toml.
VERSION = "0.1.0"

# OpenMP spins 300,000 times for the next loop, milliseconds in which nobody else has the core; this is microseconds.
_SPINS = "1000"


class Package(NamedTuple):
    """A package of an extra. name: as people write it.  distribution: as pip does.  oldest: that works with Muster."""

    name: str
    distribution: str
    oldest: str


# By module. The oldest versions are those of pyproject.toml; tests/test_extras.py compares them.
PACKAGES = {
    "torch": Package("PyTorch", "torch", "2.5"),
    "tensordict": Package("TensorDict", "tensordict", "0.12"),
    "safetensors": Package("safetensors", "safetensors", "0.8"),
    "torchrl": Package("TorchRL", "torchrl", "0.14"),
    "stable_baselines3": Package("Stable-Baselines3", "stable-baselines3", "2.9"),
    "rich": Package("rich", "rich", "14.3"),
    "psutil": Package("psutil", "psutil", "5.9"),
    "tensorboard": Package("TensorBoard", "tensorboard", "2.18"),
    "matplotlib": Package("matplotlib", "matplotlib", "3.9"),
    "av": Package("PyAV", "av", "13"),
    "cv2": Package("OpenCV", "opencv-python-headless", "4.10.0.84"),
    "pettingzoo": Package("pettingzoo", "pettingzoo", "1.25"),
    "mpe2": Package("mpe2", "mpe2", "1.0"),
    "ray": Package("Ray", "ray", "2.50"),
    "wandb": Package("wandb", "wandb", "0.31"),
    "yaml": Package("PyYAML", "pyyaml", "6.0"),
}


def bound_spinning() -> None:
    """Has OpenMP's threads, with which torch computes, sleep soon when they wait: envs' workers need their cores.

    OpenMP asks the environment as torch is imported. What users have said there stays.
    """
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", _SPINS)


def missing(needing: str, what: str, command: str) -> str:
    """The sentence for a package that is not installed. needing: its beginning, such as ``"muster.nn needs"``."""
    return f"{needing} {what}. Install it with: {command}"


def pip_install(requirement: str) -> str:
    """The line that installs a requirement, such as ``"muster-rl[torch]"``: quoted, for shells that know brackets."""
    return f"pip install '{requirement}'"


def require(needing: str, requirement: str, *modules: str) -> None:
    """Raises ImportError, with the line that installs `requirement`, where one of `modules` is missing or too old.

    needing: as in `missing`.  modules: keys of PACKAGES. None of them is imported: an old release may end its import
    with an error that says nothing of its age.
    """
    for module in modules:
        name, distribution, oldest = PACKAGES[module]
        if not is_installed(module):
            raise ModuleNotFoundError(missing(needing, name, pip_install(requirement)), name=module)
        found = installed_version(distribution)
        if found is not None and is_older(found, oldest):
            raise ImportError(
                f"{needing} {name}>={oldest}, found {found}. Upgrade it with: pip install --upgrade '{requirement}'",
                name=module,
            )


@contextmanager
def imports_for(needing: str, requirement: str, *modules: str) -> Iterator[None]:
    """Encloses imports that need `modules`. Raises what `require` and `missing_explained` raise."""
    require(needing, requirement, *modules)
    with missing_explained(needing, pip_install(requirement)):
        yield


@contextmanager
def missing_explained(needing: str, command: str) -> Iterator[None]:
    """Encloses imports. Raises ModuleNotFoundError, with `command`, where one fails for a package not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if not module or is_installed(module):
            raise  # a part of a package is missing: installing the package again would not help
        name = PACKAGES[module].name if module in PACKAGES else module
        raise ModuleNotFoundError(missing(needing, name, command), name=module) from error


def is_installed(module: str) -> bool:
    """Returns whether a module is installed, or replaced by the user's own in ``sys.modules``.

    A bare folder of that name, which has no origin, does not count.
    """
    if module in sys.modules:
        return sys.modules[module] is not None  # None blocks its import
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None


def installed_version(distribution: str) -> str | None:
    """The installed version, read without an import; None where it is not known: a nightly build has another name."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def is_older(found: str, oldest: str) -> bool:
    """Returns whether version `found` is known to be older than `oldest`. A pre-release counts as the release."""
    release = release_of(found)
    return bool(release) and release < release_of(oldest)


def release_of(version: str) -> tuple[int, ...]:
    """The numbers of a version, without zeros at the end: pre-releases count as the release. Empty for no version."""
    match = re.match(r"v?(\d+(?:\.\d+)*)", version)
    numbers = [int(number) for number in match[1].split(".")] if match else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)
