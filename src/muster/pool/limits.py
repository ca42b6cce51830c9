"""The limits of a pool: of answers, of its workers, and of its end."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from muster.arguments import one_of, seconds, whole
from muster.errors import ConfigError
from muster.pool.deaths import NOUNS, Nouns

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
        """True if nothing is closed, and nothing is said about that."""
        return self.call_s == 0.0

    def of_call(self, timeout_s: float | None, *, terminate: bool) -> CloseLimits:
        """These limits, or those that the arguments of one call of ``close()`` set in their place."""
        if terminate:
            return AT_ONCE
        return self if timeout_s is None else in_all(timeout_s, f"timeout={timeout_s:g}", self.busy_s)

    def hurried(self, is_hurried: bool = True) -> CloseLimits:
        """These limits where, if `is_hurried`, nobody needs what the workers are busy with."""
        return replace(self, busy_s=min(self.busy_s, HURRIED_S)) if is_hurried else self


TRIGGERS = ("episodes", "steps", "seconds", "memory_bytes")
AT_ONCE = CloseLimits(0.0, 0.0, 0.0)
FOR_EVER = CloseLimits(math.inf, math.inf, math.inf, "")


def in_all(timeout_s: float, words: str, busy_s: float = math.inf) -> CloseLimits:
    """The limits where all has to be done within a time. words: that limit, as users know it."""
    limit_s = max(timeout_s, LEAST_S)
    return CloseLimits(math.inf, limit_s, min(busy_s, limit_s), words)


@dataclass(frozen=True)
class Limits:
    """How long the workers of a pool may take, and how often they are replaced, as users say it.

    start_timeout: seconds for a worker until its resident is built.  step_timeout: for an answer, None without a limit.
    close_timeout: for each env's own ``close()``, None without a limit.  on_failure: "raise" or "restart".
    max_restarts: within a minute, of what is in one place.  nouns: for these options in errors.
    max_concurrent_starts: workers that build at the same time, None for all.
    recycle_after: by a name of `TRIGGERS`, how much a worker does, or holds, until it is replaced; None for ever.
    closing: what holds in the place of `close_timeout`, for front ends that close as others do.
    Raises ConfigError.
    """

    start_timeout: float = 300.0
    step_timeout: float | None = None
    close_timeout: float | None = CLOSE_S
    on_failure: str = "raise"
    max_restarts: int = 10
    nouns: Nouns = NOUNS
    closing: CloseLimits | None = None
    max_concurrent_starts: int | None = None
    recycle_after: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        one_of("on_failure", self.on_failure, ("raise", "restart"))
        seconds("start_timeout", self.start_timeout)
        if self.step_timeout is not None:
            seconds(self.nouns.step_timeout, self.step_timeout)
        whole("max_restarts", self.max_restarts, 0)
        if self.max_concurrent_starts is not None:
            whole("max_concurrent_starts", self.max_concurrent_starts, 1)
        if self.recycle_after is not None:
            self._check_recycling(self.recycle_after)
        self.close()

    def _check_recycling(self, after: Any) -> None:
        names = ", ".join(f'"{name}"' for name in TRIGGERS)
        if not isinstance(after, Mapping) or not after or not set(after) <= set(TRIGGERS):
            raise ConfigError("recycle_after", f"a dict with some of {names}, and a number for each", after)
        for name, value in after.items():
            if name == "seconds":
                seconds("recycle_after['seconds']", value)
            else:
                whole(f"recycle_after[{name!r}]", value, 1)
        if self.restarts is None:
            raise ConfigError("recycle_after", 'left out without on_failure="restart", which replaces workers', after)

    @property
    def restarts(self) -> int | None:
        """The number of restarts that a place may need; None where a failure is raised."""
        return self.max_restarts if self.on_failure == "restart" else None

    def options(self) -> dict[str, Any]:
        """The options, by the names that `make_vec` has for them."""
        return {
            "start_timeout": self.start_timeout,
            "step_timeout": self.step_timeout,
            "close_timeout": self.close_timeout,
            "on_failure": self.on_failure,
            "max_restarts": self.max_restarts,
            "max_concurrent_starts": self.max_concurrent_starts,
            "recycle_after": self.recycle_after,
        }

    def close(self, num_envs: int = 1) -> CloseLimits:
        """The limits of a close. num_envs: envs that are closed as one."""
        if self.closing is not None:
            return self.closing
        if self.close_timeout is None:
            return CloseLimits(math.inf, words="")
        limit_s = seconds("close_timeout", self.close_timeout)
        return CloseLimits(limit_s * num_envs, words=f"close_timeout={limit_s:g}" + " for each env" * (num_envs > 1))
