"""The limits of a pool: of answers, of its workers, and of its end."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

from muster.arguments import seconds

CLOSE_S = 60.0
# How long a worker that is in a step, a reset or a call may take before it begins to close.
BUSY_S = 5.0
# The same after a Ctrl-C, which has given up that step already, and for a worker that still starts.
HURRIED_S = 1.0
# The least that `timeout` means: workers begin to close, so that what is cut off can be named.
LEAST_S = 0.1


@dataclass
class Limit:
    """A limit of time, in seconds and in words."""

    s: float
    words: str


@dataclass(frozen=True)
class CloseLimits:
    """How long a close waits, in seconds; infinity is for ever.

    part_s: for the close of each part of a resident, such as an env.  call_s: for all of them together.
    busy_s: for a worker that is in a step, a reset or a call, before it begins to close.
    words: the limit as users know it, for messages; empty where there is none.
    """

    part_s: float = CLOSE_S
    call_s: float = math.inf
    busy_s: float = field(default_factory=lambda: BUSY_S)
    words: str = f"close_timeout={CLOSE_S:g}"

    @property
    def terminates(self) -> bool:
        """Whether nothing is closed, and nothing is said about that."""
        return self.call_s == 0.0

    def of_call(self, timeout_s: float | None, *, terminate: bool) -> CloseLimits:
        """These limits, or those that the arguments of one call of ``close()`` set in their place."""
        if terminate:
            return AT_ONCE
        return self if timeout_s is None else in_all(timeout_s, f"timeout={timeout_s:g}", self.busy_s)

    def hurried(self, is_hurried: bool = True) -> CloseLimits:
        """These limits where, if `is_hurried`, nobody needs what the workers are busy with."""
        return replace(self, busy_s=min(self.busy_s, HURRIED_S)) if is_hurried else self


AT_ONCE = CloseLimits(0.0, 0.0, 0.0)
FOR_EVER = CloseLimits(math.inf, math.inf, math.inf, "")


def in_all(timeout_s: float, words: str, busy_s: float = math.inf) -> CloseLimits:
    """The limits where all has to be done within a time. words: that limit, as users know it."""
    limit_s = max(timeout_s, LEAST_S)
    return CloseLimits(math.inf, limit_s, min(busy_s, limit_s), words)


def limits_of(close_timeout: Any, num_envs: int = 1) -> CloseLimits:
    """The limits for the option `close_timeout`. num_envs: envs that are closed as one. Raises ConfigError."""
    if close_timeout is None:
        return CloseLimits(math.inf, words="")
    limit_s = seconds("close_timeout", close_timeout)
    return CloseLimits(limit_s * num_envs, words=f"close_timeout={limit_s:g}" + " for each env" * (num_envs > 1))
