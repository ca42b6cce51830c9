"""Melting Pot's substrates, imported where TensorFlow and JAX, which only its bots need, are not installed."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import sys
import threading
import types
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from typing import Any

_PACKAGE = "meltingpot"
_SUBSTRATES = f"{_PACKAGE}.substrate"
_LOADING = threading.Lock()


def load_substrates() -> Any:
    """The module ``meltingpot.substrate``, also where Melting Pot is installed without TensorFlow and bots.

    Raises ModuleNotFoundError with the command that installs it.
    """
    with _LOADING:
        if _PACKAGE in sys.modules:
            return _load()
        # Not executed: its ``__init__`` imports bots, hence TensorFlow.
        sys.modules[_PACKAGE] = importlib.util.module_from_spec(melting_pot_package())
        try:
            return _load()
        except BaseException:
            del sys.modules[_PACKAGE]
            raise


def melting_pot_package() -> ModuleSpec:
    """The spec of the installed package, which says where it lies. Raises ModuleNotFoundError."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(
            "Melting Pot is not installed. Without TensorFlow and bots: python -m muster.envs.install_meltingpot; "
            "with them: pip install dm-meltingpot",
            name=_PACKAGE,
        )
    return spec


def import_without_bots() -> None:
    """Makes ``import meltingpot`` import the substrates alone in this process, if TensorFlow is not installed.

    For workers: objects that refer to a module of Melting Pot import it there before any code of the user has run.
    """
    if not any(isinstance(finder, _WithoutBots) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WithoutBots())


class _WithoutBots(MetaPathFinder):
    """Finds the package ``meltingpot`` as the other finders do, but makes Python load its substrates alone."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _PACKAGE or _is_installed("tensorflow"):
            return None
        others = (getattr(finder, "find_spec", None) for finder in sys.meta_path if finder is not self)
        found = (find_spec(fullname, path, target) for find_spec in others if find_spec is not None)
        spec: ModuleSpec | None = next((one for one in found if one is not None), None)
        if spec is None or spec.origin is None:
            return None
        if not any(Path(folder, "substrate.py").exists() for folder in spec.submodule_search_locations or ()):
            return None  # another package of that name, or a release without that module
        spec.loader = _SubstratesAlone(fullname, spec.origin)
        return spec


class _SubstratesAlone(SourceFileLoader):
    def exec_module(self, module: types.ModuleType) -> None:
        _load()  # without the lock: the thread that holds it may be waiting for this import


def _load() -> Any:
    if _SUBSTRATES in sys.modules:
        return sys.modules[_SUBSTRATES]
    with _with_chex():
        substrates = importlib.import_module(_SUBSTRATES)
    sys.modules.setdefault(f"{_PACKAGE}.python", sys.modules[_PACKAGE])  # as its ``__init__`` does, for older code
    return substrates


@contextlib.contextmanager
def _with_chex() -> Iterator[None]:
    """Puts a substitute for chex, which requires JAX, into ``sys.modules``: Melting Pot uses only a decorator of it."""
    if _is_installed("chex"):
        yield
        return
    standing_in = types.ModuleType("chex")
    standing_in.dataclass = dataclasses.dataclass  # type: ignore[attr-defined]  # it is made right here
    sys.modules["chex"] = standing_in
    try:
        yield
    finally:
        sys.modules.pop("chex", None)


def _is_installed(name: str) -> bool:
    """Whether a module is installed, or replaced by the user's own in ``sys.modules``.

    A bare folder of that name, which has no origin, does not count.
    """
    if name in sys.modules:
        return sys.modules[name] is not None  # None blocks its import
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.origin is not None
