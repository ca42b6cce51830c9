"""Options of an env host, and the type of functions that it calls with its envs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

# A function that `EnvHost.call` takes in place of a method's name: called with each env, its index and the arguments.
EnvCall = Callable[..., Any]


class WaitBudget(NamedTuple):
    """The time to wait awake before sleeping, see `WaitBudget` in _core/doorbell.hpp."""

    pauses: int
    yields: int
    spreads: bool


@dataclass(frozen=True)
class HostOptions:
    """Options of stepping, equal for all hosts of a vector env."""

    autoreset_mode: int  # of _core.Autoreset
    check_finite: bool
    lenient: bool  # whether rewards and flags may be what other libraries convert
    wait_budget: WaitBudget
