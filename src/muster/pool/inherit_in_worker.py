"""The duties of a process of multiprocessing, done by a worker: locks, queues and proxies work in it."""

from __future__ import annotations

import errno
import logging
import sys
import threading
from collections.abc import Sequence
from typing import Any

from muster.pickling.shared_pickling import use_tracker
from muster.pool.messages import Inherited
from muster.pool.resources import limit_reached

_log = logging.getLogger("muster")

_FLUSH_S = 5.0


def take_over(inherited: Inherited, fds: Sequence[int]) -> Sequence[int]:
    """Makes this worker the heir of its caller; returns the fds for the recipes. Raises LimitReached."""
    if len(fds) < inherited.num_fds + inherited.has_tracker:
        raise limit_reached(errno.EMFILE, "this worker could not take the files of its recipes")
    if inherited.has_tracker:
        use_tracker(fds[-1])
    if inherited.authkey is not None:
        import multiprocessing.process

        multiprocessing.process.current_process().authkey = inherited.authkey
    return fds[: inherited.num_fds]


def after_fork() -> None:
    """Does in a forked worker what multiprocessing does in processes that it forks: queues start anew, and so on."""
    util: Any = sys.modules.get("multiprocessing.util")
    if util is not None:
        util._finalizer_registry.clear()
        util._run_after_forkers()


def finish_queues() -> None:
    """Writes out what this process has put into multiprocessing's queues, as the end of its own processes does.

    Gives up after some seconds: a queue that is full, and that nobody reads, takes no more.
    """
    util: Any = sys.modules.get("multiprocessing.util")
    if util is None:
        return

    def finish() -> None:
        util._run_finalizers(0)
        util._run_finalizers()

    thread = threading.Thread(target=finish, daemon=True, name="muster-queues")
    thread.start()
    thread.join(_FLUSH_S)
    if thread.is_alive():
        _log.warning(
            "A multiprocessing queue was not written out within %.0f s, since nobody reads it; the rest of what this "
            "worker has put is lost. Read the queue before close().",
            _FLUSH_S,
        )
