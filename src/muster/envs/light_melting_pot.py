"""Melting Pot's substrates, imported where TensorFlow and JAX, which only its bots need, are not installed."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import sys
import types
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

_PACKAGE = "meltingpot"
_SUBSTRATES = f"{_PACKAGE}.substrate"


def load_substrates() -> Any:
    """The module ``meltingpot.substrate``, also where Melting Pot is installed without TensorFlow and bots.

    Raises ModuleNotFoundError with the command that installs it.
    """
    if _SUBSTRATES not in sys.modules and _PACKAGE not in sys.modules:
        # Not executed: its ``__init__`` imports bots, hence TensorFlow.
        sys.modules[_PACKAGE] = importlib.util.module_from_spec(melting_pot_package())
    with _with_chex():
        return importlib.import_module(_SUBSTRATES)


def melting_pot_package() -> ModuleSpec:
    """Where Melting Pot lies. Raises ModuleNotFoundError."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError(
            "Melting Pot is not installed. Without TensorFlow and bots: scripts/install_meltingpot.sh; with them: "
            "pip install dm-meltingpot",
            name=_PACKAGE,
        )
    return spec


def import_without_bots() -> None:
    """From now on ``import meltingpot`` gives the substrates, in this process, if TensorFlow is not installed.

    For workers: what refers to a module of Melting Pot imports it there before any code of the user's has run.
    """
    if not any(isinstance(finder, _WithoutBots) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WithoutBots())


class _WithoutBots(MetaPathFinder, Loader):
    """Imports the package ``meltingpot`` as its substrates alone."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _PACKAGE or importlib.util.find_spec("tensorflow") is not None:
            return None
        spec = PathFinder.find_spec(fullname, path)
        if spec is not None:
            spec.loader = self
        return spec

    def exec_module(self, module: types.ModuleType) -> None:
        load_substrates()


@contextlib.contextmanager
def _with_chex() -> Iterator[None]:
    """Melting Pot takes nothing but a decorator from chex, which brings JAX along."""
    if importlib.util.find_spec("chex") is not None:
        yield
        return
    standing_in = types.ModuleType("chex")
    standing_in.dataclass = dataclasses.dataclass  # type: ignore[attr-defined]  # it is made right here
    sys.modules["chex"] = standing_in
    try:
        yield
    finally:
        del sys.modules["chex"]
