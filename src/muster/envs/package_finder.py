"""Imports of one package, found as Python finds them, but loaded by a loader of Muster's. So ALE prints no banner."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader

_ALE = "ale_py"  # prints two lines on stderr in every process that makes an env


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


def print_no_banner() -> PackageFinder:
    """Has ALE print its warnings and errors alone in this process, by its own logger, as soon as it is imported.

    ALE's class for Gymnasium sets a level itself, that of errors, but only after the banner.
    Returns the finder that waits for the import.
    """
    finder = PackageFinder(_ALE, _WithoutBanner)
    if (ale := sys.modules.get(_ALE)) is not None:
        _set_level(ale)
    else:
        finder.install()
    return finder


@contextlib.contextmanager
def no_banner_meanwhile() -> Iterator[None]:
    """Has ALE print no banner for the envs that are built meanwhile in the user's own process.

    Imports are as they were afterwards. ALE's class for Gymnasium has then set its own level.
    """
    finder = print_no_banner()
    try:
        yield
    finally:
        finder.remove()


class _WithoutBanner(SourceFileLoader):
    def exec_module(self, module: types.ModuleType) -> None:
        super().exec_module(module)
        _set_level(module)


def _set_level(ale: types.ModuleType) -> None:
    with contextlib.suppress(AttributeError):  # another release of ALE, without such a logger
        ale.ALEInterface.setLoggerMode(ale.LoggerMode.Warning)
