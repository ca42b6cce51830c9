"""``recycle_after``: workers are replaced after a time, before what their envs leak is too much.

That happens where an env of theirs begins an episode anyway: its reset is the new env's then. In ``same_step`` the old
env has begun that episode already, and its next row reports a restart, as those of the worker's other envs do.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from gymnasium.vector import AutoresetMode

from muster.backends.base import Backend
from muster.pool.resources import Usage, held_by
from muster.transport.channel import watched_s

_log = logging.getLogger("muster")

_LOOK_S = 0.5
RECYCLED = "recycled after"
"""The beginning of a reason that is no failure."""
_UNITS = {"episodes": "episodes", "steps": "steps", "seconds": "s", "memory_bytes": "bytes of memory"}


def worn_out(after: Mapping[str, float], episodes: int, steps: int, seconds: float, pid: int | None) -> str:
    """The reason to replace a worker that has done so much; empty without. after: the numbers of ``recycle_after``."""
    done: dict[str, float] = {"episodes": episodes, "steps": steps, "seconds": seconds}
    if "memory_bytes" in after:
        done["memory_bytes"] = held_by(pid, after["memory_bytes"])
    return next((f"{RECYCLED} {most:,} {_UNITS[name]}" for name, most in after.items() if done[name] >= most), "")


def held_at_start(after: Mapping[str, float], usage: Usage) -> str:
    """The words where a worker has held too much from its start on, so that replacing it does not help; else empty."""
    held, most = usage.private_bytes, after.get("memory_bytes")
    if held is None or most is None or held < most:
        return ""
    return f"held {held:,} bytes once its envs were built, with recycle_after={dict(after)}"


class Recycling:
    """Replaces the workers of one vector env, `most` at a time. after: the numbers of ``recycle_after``.

    lose: called with a worker, its envs, the reason and those that begin an episode, so that it is replaced.
    fail: called with a worker and the reason where that does not help; raises once it was too often.
    """

    def __init__(
        self,
        backend: Backend,
        mode: AutoresetMode,
        after: Mapping[str, float],
        most: int,
        lose: Callable[[int, range, str, Collection[int]], None],
        fail: Callable[[int, str], None],
    ) -> None:
        self._backend, self._mode, self._after, self._most = backend, mode, after, most
        self._lose, self._fail = lose, fail
        self._records, self._caller = backend.slab.records, backend.caller
        self._before = [(0, 0)] * backend.num_workers  # resets and steps of the workers before
        self._due: dict[int, str] = {}
        self._unweighed = {*range(backend.num_workers)} if "memory_bytes" in after else set()
        self._started: set[int] = set()  # by this, and perhaps not ready
        self._look_at, self._has_warned = 0.0, False

    def begins(self, host: int) -> None:
        """Notes that a worker is followed by another one."""
        self._before[host] = self._counts(host)
        self._due.pop(host, None)
        self._unweighed |= {host} if "memory_bytes" in self._after else set()

    def look(self, ids: Collection[int], *, resets: bool) -> None:
        """Replaces what is due, before something is sent to the envs `ids`. resets: whether they are reset."""
        if (now := time.monotonic()) >= self._look_at:
            self._look_at = now + _LOOK_S
            self._find_due()
        for host in [*self._unweighed]:
            self._weigh(host)
        for host, reason in [*self._due.items()]:
            self._started = {one for one in self._started if self._backend.ready_at(one) is None}
            if len(self._started) >= self._most:
                return
            envs = self._envs_of(host)
            are_reset = [env for env in envs if resets and env in ids]
            begin = [env for env in envs if env in are_reset or self._begins_episode(env)]
            if begin and not any(map(self._caller.is_pending, envs)):
                self._started.add(host)
                self._lose(host, envs, reason, are_reset if self._mode is AutoresetMode.SAME_STEP else begin)
                self.begins(host)

    def _begins_episode(self, env: int) -> bool:
        return bool(self._records["has_final" if self._mode is AutoresetMode.SAME_STEP else "needs_reset"][env])

    def _find_due(self) -> None:
        processes = self._backend.processes()
        for host in range(self._backend.num_workers):
            if host in self._due or (ready_at := self._backend.ready_at(host)) is None:
                continue
            episodes, steps = (now - then for now, then in zip(self._counts(host), self._before[host], strict=True))
            pid, _ = processes[host]
            if reason := worn_out(self._after, episodes, steps, watched_s() - ready_at, pid):
                self._due[host] = reason

    def _weigh(self, host: int) -> None:
        """Counts a worker as failed that holds too much once its envs are reset: replacing it does not help."""
        if self._backend.ready_at(host) is None or self._counts(host)[0] == self._before[host][0]:
            return
        self._unweighed.discard(host)
        pid, most = self._backend.processes()[host][0], self._after["memory_bytes"]
        if (held := held_by(pid, most)) < most:
            return
        said = f"held {held:,} bytes after its first reset, with recycle_after={dict(self._after)}"
        if not self._has_warned:
            self._has_warned = True
            name = self._backend.nouns.name(host, self._envs_of(host))
            _log.warning("%s %s: it is replaced at each episode. Set memory_bytes higher", name, said)
        self._fail(host, said)

    def _envs_of(self, host: int) -> range:
        return range(*self._backend.first_envs[host : host + 2])

    def _counts(self, host: int) -> tuple[int, int]:
        state: dict[str, Any] = self._backend.slab.host(host)
        return state["resets"], state["env_steps"]
