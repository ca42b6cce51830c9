"""Options of an env host, and what it may be asked to call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

# What `EnvHost.call` may be given in place of a name: called with each env and its index.
EnvCall = Callable[[Any, int], Any]


class WaitBudget(NamedTuple):
    """How long to wait awake before sleeping, see `WaitBudget` in _core/doorbell.hpp."""

    pauses: int
    yields: int
    spreads: bool


@dataclass(frozen=True)
class HostOptions:
    """How a host steps its envs; equal for all hosts of a vector env."""

    autoreset_mode: int  # of _core.Autoreset
    check_finite: bool
    wait_budget: WaitBudget
