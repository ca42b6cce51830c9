"""Atari's banner, which ALE prints on stderr in every process that makes an env: two lines for each worker."""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader

from muster.envs.package_finder import PackageFinder

_PACKAGE = "ale_py"


def print_no_banner() -> PackageFinder:
    """Has ALE print its warnings and errors alone in this process, by its own logger, as soon as it is imported.

    ALE's class for Gymnasium sets a level itself, that of errors, but only after the banner.
    Returns the finder that waits for the import.
    """
    finder = PackageFinder(_PACKAGE, _WithoutBanner)
    if (ale := sys.modules.get(_PACKAGE)) is not None:
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
