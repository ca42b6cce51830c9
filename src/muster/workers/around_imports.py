"""Something that is done around the import of some modules, whoever imports them."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any, TypeVar

from muster.envs.package_finder import found_by_others

T = TypeVar("T")


def around_imports(names: Iterable[str], around: Callable[[], AbstractContextManager[None]]) -> None:
    """Has the import of each module of `names`, and all that it imports meanwhile, run within ``around()``.

    Adds to the names of earlier calls; `around` takes the place of theirs.
    """
    finder = next((one for one in sys.meta_path if isinstance(one, _Finder)), None)
    if finder is None:
        finder = _Finder()
        sys.meta_path.insert(0, finder)
    finder.names.update(names)
    finder.around = around


class _Finder(MetaPathFinder):
    """Finds the modules as the other finders do; their loaders load within ``around()``."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.around: Callable[[], AbstractContextManager[None]] = nullcontext
        self._within = False
        self._finding = False  # another finder may ask all finders, too

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if self._within or self._finding or fullname not in self.names:
            return None
        self._finding = True
        try:
            spec = found_by_others(self, fullname, path, target)
        finally:
            self._finding = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec

    def within(self, load: Callable[..., T], argument: Any) -> T:
        """The result of ``load(argument)``, called within ``around()`` unless this is part of such a call."""
        if self._within:
            return load(argument)
        self._within = True
        try:
            with self.around():
                return load(argument)
        finally:
            self._within = False


class _Loader(Loader):
    """Loads as another loader does. The module shows that other loader as its own."""

    def __init__(self, loader: Loader, finder: _Finder) -> None:
        self._loader = loader
        self._finder = finder

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # of a copy that has no attributes yet
            raise AttributeError(name)
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType | None:
        return self._finder.within(self._loader.create_module, spec)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._finder.within(self._loader.exec_module, module)
