"""Imports of one package, found as Python finds them, but loaded by a loader of Muster's."""

from __future__ import annotations

import sys
import types
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader


class PackageFinder(MetaPathFinder):
    """Finds `package` as the other finders do, and has a loader of the class `loader` load it from the same file."""

    def __init__(self, package: str, loader: type[SourceFileLoader]) -> None:
        self._package = package
        self._loader = loader

    def install(self) -> None:
        """Puts this finder before the others of this process, unless one for the package is there already."""
        finders = [finder for finder in sys.meta_path if isinstance(finder, PackageFinder)]
        if all(finder._package != self._package for finder in finders):
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Takes this finder away again, if it was installed."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._package:
            return None
        others = (getattr(other, "find_spec", None) for other in sys.meta_path if other is not self)
        found = (find_spec(fullname, path, target) for find_spec in others if find_spec is not None)
        spec: ModuleSpec | None = next(filter(None, found), None)
        if spec is None or spec.origin is None or not self.accepts(spec):
            return None
        spec.loader = self._loader(fullname, spec.origin)
        return spec

    def accepts(self, spec: ModuleSpec) -> bool:
        """Returns whether to load the package that was found; else Python loads it as if there were no such finder."""
        return True
