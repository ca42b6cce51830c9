"""Actions that follow the import of a module, whoever imports it."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

_actions: dict[str, list[Callable[[], None]]] = {}


def after_import(module: str, act: Callable[[], None]) -> None:
    """Calls `act` once `module` is imported: now, if it is already. The same action is not called twice."""
    if module in sys.modules:
        act()
        return
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    if act not in _actions.setdefault(module, []):
        _actions[module].append(act)


class _Finder(MetaPathFinder):
    """Finds the modules that have an action as the other finders do; their loaders act after loading."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _actions:
            return None
        others = (getattr(finder, "find_spec", None) for finder in sys.meta_path if finder is not self)
        found = (find_spec(fullname, path, target) for find_spec in others if find_spec is not None)
        spec: ModuleSpec | None = next((one for one in found if one is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _ActingLoader(spec.loader)
        return spec


class _ActingLoader(Loader):
    """Loads as another loader does, then acts. The module shows that other loader as its own."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        for act in _actions.pop(module.__name__, ()):
            act()
