"""The packages of a node: versions that differ from the driver's, and modules that it does not have."""

from __future__ import annotations

import importlib.util
import platform
import shlex
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from muster.extras import installed_version, release_of

# By the name that people know. Of the first ones another minor version has other messages, weights or bytecode.
_STRICT = {"Python": "", "muster": "muster-rl", "torch": "torch"}
_DISTRIBUTIONS = _STRICT | {name: name for name in ("tensordict", "numpy", "gymnasium", "cloudpickle")}


def missing_text(error: BaseException | None, node: str) -> str:
    """The message for a module that a node does not have, where this machine has it; empty for another error.

    error: what was raised there, with its causes.  node: a name for people.
    """
    while error is not None and not (isinstance(error, ModuleNotFoundError) and error.name):
        error = error.__cause__
    module = "" if error is None else str(error.name)
    try:
        spec = importlib.util.find_spec(module) if module else None
    except (ImportError, ValueError):  # of a parent that is not here, either
        spec = None
    if spec is None:
        return ""
    origin = spec.origin
    needs = f"a collector needs module {module!r}{f' (from {origin})' if origin else ''}, which {node} does not have."
    installed = [Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib")]
    if origin is None or any(Path(origin).is_relative_to(folder) for folder in installed):
        return f"{needs} Install it there, as it is here"
    top = module.partition(".")[0]
    # The folder that sys.path has: as many levels up as the name has parts, and a package's __init__.py is one below.
    depth = module.count(".") + (spec.submodule_search_locations is not None)
    by_value = f"; `import {top}, cloudpickle; cloudpickle.register_pickle_by_value({top})` before"
    folder = str(Path(origin).parents[depth])
    return (
        f"{needs} Ways out: RayCluster(runtime_env={{'working_dir': {folder!r}}}); install it there"
        f"{by_value if origin.endswith('.py') else ''}. On a command line: --working-dir {shlex.quote(folder)}"
    )


def versions_here() -> dict[str, str | None]:
    """The versions of Python and the packages that have to agree between machines; None for what is not known."""
    packages = {name: installed_version(distribution) for name, distribution in _DISTRIBUTIONS.items() if distribution}
    return {"Python": platform.python_version(), **packages}


class VersionCheck(NamedTuple):
    """The sentences about a node's versions: an error's and a warning's; empty for none."""

    error: str
    warning: str


def compare_versions(here: Mapping[str, str | None], there: Mapping[str, str | None], node: str) -> VersionCheck:
    """Compares what `versions_here` has returned here and on a node. node: a name for people.

    Builds of one version are the same, such as 2.5.1+cpu and 2.5.1+cu124. Another minor version of Python, muster or
    torch is an error, another patch a warning, as is another minor version of the rest.
    """
    wrong, doubtful = list[str](), list[str]()
    for name, ours in here.items():
        theirs, strict = there.get(name), name in _STRICT
        ours_at, theirs_at = ((*release_of(version or ""), 0, 0, 0)[:3] for version in (ours, theirs))
        said = f"{name} {theirs or '(none)'} instead of {ours}"
        if ours is not None and ours_at[:2] != theirs_at[:2]:
            (wrong if strict else doubtful).append(said)
        elif ours is not None and ours_at != theirs_at and strict:
            doubtful.append(said)
    advice = "install the same versions"
    return VersionCheck(
        f"{node} has {', '.join(wrong)}. They would not understand what is sent: {advice}" if wrong else "",
        f"{node} has {', '.join(doubtful)}. If something fails there, {advice}" if doubtful else "",
    )
