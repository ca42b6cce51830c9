"""Options of an env host, and what it may be asked to call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

# What `Share.call` may be given in place of a name: called with each env and its index.
EnvCall = Callable[[Any, int], Any]


class Patience(NamedTuple):
    """How long to wait awake before sleeping, see `Patience` in _core/doorbell.hpp."""

    pauses: int
    yields: int
    spreads: bool


@dataclass(frozen=True)
class ShareOptions:
    """How a share is stepped; the same for all shares of a vector env."""

    autoreset_mode: int  # of _core.Autoreset
    check_finite: bool
    patience: Patience
