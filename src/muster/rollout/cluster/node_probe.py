"""Questions for a node before anything starts there: the modules that pickles name, and the versions of packages.

The driver asks `modules_needed` and `versions_here`, the node `missing_here` and `versions_here`; the driver compares.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import io
import itertools
import pickletools
import platform
import shlex
import sys
import sysconfig
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from muster.extras import installed_version, release_of
from muster.pool.script import Script
from muster.rollout.replicas.plans import PoolPlan

_STRINGS = ("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE")
_PUTS, _GETS = ("PUT", "BINPUT", "LONG_BINPUT"), ("GET", "BINGET", "LONG_BINGET")
# What cloudpickle writes in the place of a module: a call of this function with the module's name.
_IMPORT = ("cloudpickle.cloudpickle", "subimport")
_PICKLE = b"\x80"

# By the name that people know. Of the first ones another minor version has other messages, weights or bytecode.
_STRICT = {"Python": "", "muster": "muster-rl", "torch": "torch"}
_DISTRIBUTIONS = _STRICT | {name: name for name in ("tensordict", "numpy", "gymnasium", "cloudpickle")}


def modules_needed(plan: PoolPlan) -> dict[str, str]:
    """The modules that collectors will import, and what needs each."""
    script = plan.processes.set_up and plan.processes.set_up.init.script
    found = dict.fromkeys(modules_imported(script) if script else (), "the script that worker_init runs")
    for one in plan.plans:
        pickles = {"the envs or worker_init": one.content.recipes}
        if one.content.policy:
            pickles["the policy"] = bytes(one.big[-one.content.policy])
        found = modules_named(pickles) | found
    return found


def modules_named(pickles: Mapping[str, bytes]) -> dict[str, str]:
    """The modules that unpickling would import, and the first of the pickles that names each.

    pickles: by the name of the argument that they hold. Pickles in pickles count. What a function imports as it runs is
    not known.
    """
    found: dict[str, str] = {}
    for argument, pickled in pickles.items():
        for module in _named_in(pickled):
            found.setdefault(module, argument)
    found.pop("__main__", None)  # workers have one of their own
    return found


def modules_imported(script: Script) -> list[str]:
    """The modules that a script imports at its top level, outside of all other statements; and its own one."""
    found = [script.module] if script.module is not None else []
    for statement in ast.parse(script.text or b"").body:
        if isinstance(statement, ast.Import):
            found += [one.name for one in statement.names]
        elif isinstance(statement, ast.ImportFrom) and statement.module is not None and not statement.level:
            found.append(statement.module)
    return found


def _named_in(pickled: bytes) -> Iterator[str]:
    """Of pickles one behind the other, too, which share their memo, as one Pickler's do."""
    memo, file = dict[int, Any](), io.BytesIO(pickled)
    top = deque[Any]([None, None], maxlen=2)  # of the stack: strings, globals and tuples of one; None for all else
    value: Any
    for opcode, value, _ in itertools.chain.from_iterable(_pickles_in(file, len(pickled))):
        name = opcode.name
        if name == "MEMOIZE":
            memo[len(memo)] = top[-1]
        elif name in _PUTS:
            memo[value] = top[-1]
        elif name in _GETS:
            top.append(memo.get(value))
        elif name == "TUPLE1":
            top[-1] = (top[-1],)
        elif name in ("GLOBAL", "STACK_GLOBAL"):
            named = tuple(value.split(" ", 1)) if name == "GLOBAL" else tuple(top)
            top.append(named)
            if named[0] is not None:
                yield named[0]
        else:
            if name == "REDUCE" and top[0] == _IMPORT:
                yield str(top[1][0])
            if isinstance(value, bytes | bytearray) and value[:1] == _PICKLE and _is_pickle(bytes(value)):
                yield from _named_in(bytes(value))
            top.append(value if name in _STRINGS else None)


def _pickles_in(file: io.BytesIO, size: int) -> Iterator[Iterator[Any]]:
    """The opcodes of each of the pickles in a file."""
    while file.tell() < size:
        yield pickletools.genops(file)


def _is_pickle(content: bytes) -> bool:
    """Whether these bytes are pickles from the first to the last, and not numbers that begin like one."""
    try:
        deque(itertools.chain.from_iterable(_pickles_in(io.BytesIO(content), len(content))), 0)
    except Exception:  # other bytes have any opcodes and arguments
        return False
    return True


def missing_here(names: Iterable[str]) -> list[str]:
    """Those of the modules that a new process on this machine would not find. Modules written meanwhile are seen."""
    importlib.invalidate_caches()
    return [name for name in names if not _is_here(name)]


def _is_here(name: str) -> bool:
    """Whether the import system finds a module by files alone, so that no code of users runs.

    What is only made while its parent runs cannot be found so, such as six.moves: the parent is imported for it.
    """
    places, parts = None, name.split(".")
    for length in range(1, len(parts) + 1):
        spec = _find(".".join(parts[:length]), places)
        if spec is None:
            return length > 1 and _is_made_by_parent(name)
        places = spec.submodule_search_locations
        if places is None:
            return length == len(parts) or _is_made_by_parent(name)
    return spec is not None and spec.origin is not None  # else a folder of that name, without any code


def _find(name: str, places: Any) -> ModuleSpec | None:
    specs = (finder.find_spec(name, places) for finder in sys.meta_path if hasattr(finder, "find_spec"))
    return next((spec for spec in specs if spec is not None), None)


def _is_made_by_parent(name: str) -> bool:
    try:
        importlib.import_module(name)
    except Exception:  # whatever a user's module raises as it runs
        return False
    return True


def missing_text(argument: str, module: str, node: str) -> str:
    """The message for a module that a node does not have. Called where the module is. node: a name for people."""
    spec = importlib.util.find_spec(module)
    origin = spec.origin if spec is not None else None
    needs = f"{argument} needs module {module!r}{f' (from {origin})' if origin else ''}, which {node} does not have."
    installed = [Path(sysconfig.get_path(kind)) for kind in ("purelib", "platlib")]
    if spec is None or origin is None or any(Path(origin).is_relative_to(folder) for folder in installed):
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


@dataclass(frozen=True)
class VersionCheck:
    """What is to be said of a node's versions: the text of an error, and of a warning; empty for none."""

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
        f"{node} has {', '.join(wrong)}. What travels would not be understood: {advice}" if wrong else "",
        f"{node} has {', '.join(doubtful)}. If something fails there, {advice}" if doubtful else "",
    )
