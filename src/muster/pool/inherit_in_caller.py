"""What workers receive as processes that multiprocessing spawns do: fds of queues and pipes, the resource tracker."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from muster.pickling.shared_pickling import tracker_fd
from muster.pool.messages import Inherited
from muster.pool.worker_process import close_own, own


class Inheritance:
    """The caller's end. fds: for each worker those that its recipes need, see `recipe.pack`.

    The fds are copied, so that a replacement of a worker can receive them, too; until then nobody who reads from one of
    these pipes is told that all other ends are closed.
    """

    def __init__(self, fds: Sequence[Sequence[int]]) -> None:
        self._copies: dict[int, int] = {}
        for fd in {fd for of_worker in fds for fd in of_worker}:
            self._copies[fd] = os.dup(fd)
            own(self._copies[fd])
        self._fds = [[self._copies[fd] for fd in of_worker] for of_worker in fds]

    def of(self, host: int) -> tuple[Inherited, list[int]]:
        """The part of worker `host`, and the fds to send with it."""
        fds, tracker, authkey = self._fds[host], tracker_fd(), None
        if "multiprocessing.managers" in sys.modules:
            authkey = bytes(sys.modules["multiprocessing.process"].current_process().authkey)
        return Inherited(len(fds), tracker is not None, authkey), fds if tracker is None else [*fds, tracker]

    def close(self) -> None:
        """Closes the copies of fds; no further worker can be started."""
        close_own(*self._copies.values())
        self._copies.clear()
