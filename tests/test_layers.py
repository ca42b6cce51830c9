"""Imports go down only, and `import muster` is cheap and changes nothing for the process that does it."""

from __future__ import annotations

import ast
import graphlib
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path

import muster
import programs

PACKAGE = Path(__file__).parent.parent / "src" / "muster"

# From the top to the ground: a module or a folder of src/muster imports what stands below it, and nothing beside it.
# Of two that hold a module the longer one counts. A new one needs a line here.
ORDER = (
    "__main__",
    "cli",
    "command_line",
    "training",
    "doctor",
    "algorithms",
    "interop.torchrl",
    "interop",
    "rollout.multi_collector",
    "rollout.cluster",
    "rollout.replicas",
    "rollout",
    "nn",
    "vector",
    "view",
    "backends",
    "hosts",
    "envs",
    "pool",
    "recipes",
    "transport",
    "pickling",
    "spaces",
    "lazy_values",
    "worker_info",
    "introspection",
    "arguments",
    "errors",
    "extras",
    "_core",
)
LEVELS = {unit: level for level, unit in enumerate(reversed(ORDER))}
TORCH_FROM = "nn"
OPTIONAL = {
    "torch",
    "tensordict",
    "torchrl",
    "ray",
    "pettingzoo",
    "mpe2",
    "dm_env",
    "dmlab2d",
    "meltingpot",
    "stable_baselines3",
    "rich",
    "matplotlib",
    "tensorboard",
    "psutil",
}


def imported_names(source: str, package: str) -> Iterator[str]:
    """Dotted names of all that ``source``, a module in ``package``, imports: in functions and for type checkers too."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base]) if base else ".".join(above)
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__"):
            name = node.args[0] if node.args else None
            if isinstance(name, ast.Constant) and isinstance(name.value, str):
                yield name.value


def unit_of(name: str) -> str | None:
    """The entry of ORDER that the dotted name, without ``muster.``, belongs to; None for the package's face."""
    parts = name.split(".")
    held = (".".join(parts[:length]) for length in (2, 1))
    return next((unit for unit in held if unit in LEVELS), None)


def name_of(path: Path) -> str:
    """The dotted name of the module at ``path``, without ``muster.``."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


def complaints(unit: str, names: Iterator[str]) -> list[str]:
    """What is wrong with a module of ``unit`` that imports ``names``."""
    found = []
    for name in names:
        root, _, inner = name.partition(".")
        if root == "torch" and LEVELS[unit] < LEVELS[TORCH_FROM]:
            found.append(f"{unit} imports {name}; torch is for {TORCH_FROM} and what stands above it")
        if root != "muster":
            continue
        target = unit_of(inner)
        if target is None and unit in ORDER[:2]:
            continue  # nothing is above it, so it may use the public names like anyone
        if target is None:
            found.append(f"imports {name} by way of muster/__init__.py; import it from the module that defines it")
        elif LEVELS[target] > LEVELS[unit]:
            found.append(f"{unit} imports {name}, of {target}, which stands above it")
    return found


def modules() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


def names_imported_by(path: Path) -> Iterator[str]:
    package = ".".join(["muster", *path.relative_to(PACKAGE).parts[:-1]])
    return imported_names(path.read_text(encoding="utf-8"), package)


def graph_of_imports() -> dict[str, set[str]]:
    known = {name_of(path).removesuffix(".__init__"): path for path in modules()}
    graph: dict[str, set[str]] = {}
    for module, path in known.items():
        inner = [name.removeprefix("muster.") for name in names_imported_by(path) if name.startswith("muster.")]
        targets = {name if name in known else name.rpartition(".")[0] for name in inner}
        graph[module] = targets & known.keys() - {module}
    return graph


def test_imports_go_down_only_and_not_in_circles() -> None:
    units = {name_of(path): unit_of(name_of(path)) for path in modules()}
    assert [name for name, unit in units.items() if unit is None] == []
    found = {name_of(path): complaints(str(units[name_of(path)]), names_imported_by(path)) for path in modules()}
    assert {name: said for name, said in found.items() if said} == {}
    graphlib.TopologicalSorter(graph_of_imports()).prepare()  # raises CycleError, which names the circle


def test_one_file_imports_ray() -> None:
    importing = [
        name_of(path) for path in modules() if "ray" in {one.partition(".")[0] for one in names_imported_by(path)}
    ]
    assert importing == ["rollout.cluster.ray_connection"]


def test_an_import_that_goes_up_is_noticed() -> None:
    for unit, source in (
        ("backends", "from ..vector.vector_env import VectorEnv"),
        ("backends", "from muster import VectorEnv"),
        ("backends", "def f():\n    importlib.import_module('muster.vector.vector_env')"),
        ("backends", "if TYPE_CHECKING:\n    import torch.nn"),
        ("rollout", "from muster.rollout.replicas.replica import Replica"),  # one folder within another is ordered, too
    ):
        assert len(complaints(unit, imported_names(source, f"muster.{unit}"))) == 1, source


def in_a_fresh_process(code: str) -> object:
    """What ``code`` prints as JSON."""
    return json.loads(programs.run("-c", textwrap.dedent(code), fresh=True, check=True).stdout)


def test_importing_muster_imports_no_optional_package() -> None:
    loaded = in_a_fresh_process("import json, sys, muster; print(json.dumps(list(sys.modules)))")
    assert isinstance(loaded, list)
    assert {name.split(".")[0] for name in loaded} & OPTIONAL == set()


def test_importing_muster_changes_nothing_global() -> None:
    changed = in_a_fresh_process(
        """
        import json, logging, multiprocessing, os, random, signal, sys, threading, warnings
        import cloudpickle, gymnasium, gymnasium.vector, numpy

        def state():
            return {
                "start method": multiprocessing.get_start_method(allow_none=True),
                "warning filters": list(warnings.filters),
                "showwarning": warnings.showwarning,
                "signal handlers": {number: signal.getsignal(number) for number in signal.valid_signals()},
                "threads": len(os.listdir("/proc/self/task")),
                "threading hook": threading.excepthook,
                "environment": dict(os.environ),
                "sys.path": list(sys.path),
                "import hooks": list(sys.meta_path) + list(sys.path_hooks),
                "sys hooks": (sys.excepthook, sys.displayhook, sys.breakpointhook, sys.unraisablehook),
                "file descriptors": sorted(os.listdir("/proc/self/fd")),
                "children": open("/proc/self/task/%d/children" % os.getpid()).read(),
                "working directory": os.getcwd(),
                "log handlers": (list(logging.root.handlers), logging.root.level),
                "random": random.getstate(),
                "numpy.random": str(numpy.random.get_state()),
                "registered envs": list(gymnasium.registry),
            }

        before = state()
        import muster
        after = state()
        print(json.dumps([key for key in before if before[key] != after[key]]))
        """
    )
    assert changed == []


def test_every_public_name_can_be_had_and_is_announced() -> None:
    assert len(muster.__all__) <= 15
    assert len(set(muster.__all__)) == len(muster.__all__)
    assert [name for name in muster.__all__ if getattr(muster, name, None) is None] == []
    ours = {name for name, value in vars(muster).items() if getattr(value, "__module__", "").startswith("muster")}
    assert {name for name in ours if not name.startswith("_")} <= set(muster.__all__)
