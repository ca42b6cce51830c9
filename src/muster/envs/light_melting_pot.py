"""Melting Pot's substrates, imported where TensorFlow and JAX, which only its bots need, are not installed."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import sys
import threading
import types
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from typing import Any

from muster.envs.package_finder import PackageFinder
from muster.extras import is_installed, missing, missing_explained
from muster.pickling.interrupts import new_in_child

_PACKAGE = "meltingpot"
_SUBSTRATES = f"{_PACKAGE}.substrate"
_INSTALL = "python -m muster.envs.install_meltingpot"
_LOADING = new_in_child(threading.Lock())


def load_substrates() -> Any:
    """The module ``meltingpot.substrate``, also where Melting Pot is installed without TensorFlow and bots.

    Raises ModuleNotFoundError with the command that installs it.
    """
    with _LOADING:
        if sys.modules.get(_PACKAGE) is not None:
            return _load()
        # Not executed: its ``__init__`` imports bots, hence TensorFlow.
        sys.modules[_PACKAGE] = importlib.util.module_from_spec(melting_pot_package())
        try:
            return _load()
        except BaseException:
            del sys.modules[_PACKAGE]
            raise


def melting_pot_package(needing: str = "Substrates need") -> ModuleSpec:
    """The spec of the installed package, which says where it lies. Raises ModuleNotFoundError.

    needing: the beginning of its message.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(missing(needing, "Melting Pot", _INSTALL), name=_PACKAGE)
    return spec


def import_without_bots() -> None:
    """Makes ``import meltingpot`` import the substrates alone in this process, if TensorFlow is not installed.

    For workers: objects that refer to a module of Melting Pot import it there before any code of the user has run.
    """
    _WithoutBots(_PACKAGE, _SubstratesAlone).install()


class _WithoutBots(PackageFinder):
    """Finds the package ``meltingpot`` where TensorFlow is not installed, for its substrates to be loaded alone."""

    def accepts(self, spec: ModuleSpec) -> bool:
        # Neither another package of that name nor a release without that module.
        folders = spec.submodule_search_locations or ()
        return not is_installed("tensorflow") and any(Path(folder, "substrate.py").exists() for folder in folders)


class _SubstratesAlone(SourceFileLoader):
    def exec_module(self, module: types.ModuleType) -> None:
        _load()  # without the lock: the thread that holds it may be waiting for this import


def _load() -> Any:
    if _SUBSTRATES in sys.modules:
        return sys.modules[_SUBSTRATES]
    with _with_chex(), missing_explained("Melting Pot needs", _INSTALL):
        substrates = importlib.import_module(_SUBSTRATES)
    sys.modules.setdefault(f"{_PACKAGE}.python", sys.modules[_PACKAGE])  # as its ``__init__`` does, for older code
    return substrates


@contextlib.contextmanager
def _with_chex() -> Iterator[None]:
    """Puts a substitute for chex, which requires JAX, into ``sys.modules``: Melting Pot uses only a decorator of it."""
    if is_installed("chex"):
        yield
        return
    standing_in = types.ModuleType("chex")
    standing_in.dataclass = dataclasses.dataclass  # type: ignore[attr-defined]  # it is made right here
    sys.modules["chex"] = standing_in
    try:
        yield
    finally:
        sys.modules.pop("chex", None)
