"""The phases of a training: for ``muster top``, and as shares of the clock; and what has kept its envs."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Self

from muster._core import ticks
from muster.errors import ConfigError
from muster.pool.about import about_file
from muster.pool.worker_process import close_own
from muster.view.looks import PHASES, PHASES_AT, Watched, runs, stepped_s
from muster.view.verdict import verdict

NAMES = ("rollout", "update", "evaluation", "checkpoint")


def own_runs() -> dict[tuple[int, int], Watched]:
    """The pools with envs that this process has, by their keys."""
    with contextlib.suppress(ConfigError):  # it has none
        return {run.key: run for run in runs(os.getpid()) if run.pid == os.getpid() and not run.problem}
    return {}


class Phases:
    """The phases that the training in the folder `run` is in, for use in a ``with`` block.

    Processes of this user see them in the training's about file, two words that each change writes.
    others: the keys of `own_runs` before its envs were made.
    """

    def __init__(self, run: Path, others: Iterable[tuple[int, int]]) -> None:
        self._about = about_file({"run": str(run), "phases": NAMES})
        self._own = next((own for key, own in own_runs().items() if key not in others), None)  # None: not in workers
        self._first = None if self._own is None else self._own.look()
        self._hosts = self._first.hosts if self._first is not None else ()
        self._began = self._at = self._told_at = time.monotonic()
        self._phase, self._spent, self._told = NAMES[-1], dict.fromkeys(NAMES, 0.0), dict.fromkeys(NAMES, 0.0)
        self._in_envs_s = 0.0
        self.enter(NAMES[-1])

    def enter(self, phase: str) -> None:
        """Says that another phase, one of `NAMES`, begins."""
        now = time.monotonic()
        self._spent[self._phase] += now - self._at
        self._phase, self._at = phase, now
        os.pwrite(self._about, PHASES.pack(NAMES.index(phase), ticks()), PHASES_AT)

    def shares(self) -> dict[str, float]:
        """Shares of the clock since the last call: envs, by their slowest worker, the rest of rollouts, and learning.

        Those of rollouts are nan where envs are not in workers of this machine.
        """
        self.enter(self._phase)
        dt, self._told_at = max(1e-9, self._at - self._told_at), self._at
        rollout, update = ((self._spent[name] - self._told[name]) / dt for name in ("rollout", "update"))
        self._told, envs_s = dict(self._spent), float("nan")
        if self._own is not None and (hosts := self._own.hosts()):
            envs_s = max(map(stepped_s, self._hosts, hosts), default=envs_s)
            self._hosts, self._in_envs_s = hosts, self._in_envs_s + envs_s
        envs = min(envs_s / dt, rollout)
        return {"share_envs": envs, "share_acting": rollout - envs, "share_learning": update}

    def slowed_by(self) -> str | None:
        """A sentence about the training so far; None where it is the envs that take the time, or nobody knows."""
        if self._own is None or self._first is None or (now := self._own.look()) is None:
            return None
        cause, whole = verdict(self._first, now), self._at - self._began
        if cause.kind in ("straggler", "machine", "copying"):
            return cause.sentence
        envs, update = self._in_envs_s / whole, self._spent["update"] / whole
        acting = max(0.0, self._spent["rollout"] / whole - envs)
        if envs >= max(acting, update) or whole < 1.0:
            return None
        remedy = "a smaller network, --device cuda" if update >= acting else "a smaller network, --num-collectors"
        return f"learning takes {update:.2f} of the time, acting {acting:.2f} and the envs {envs:.2f}: {remedy}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        close_own(self._about)
