"""Numbers that envs have for what belongs to their machine: see `WorkerInfo.unique_index`."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import secrets
import struct

from muster.pickling.interrupts import Uninterrupted
from muster.pool.launcher_client import standard_fds
from muster.pool.worker_process import close_own, own

# The variable that all processes of a tree have, once envs run there, and its value where this process is the first.
TREE = "MUSTER_TREE"
_OWN = str(secrets.randbits(40))
_MOST_ENVS_BITS = 20


def tree() -> str:
    """The number that the processes of this tree have in common."""
    return os.environ.setdefault(TREE, _OWN)


class UniqueIndices:
    """The lowest numbers that no other env has in this tree of processes, from `take` to `release`.

    Each is a lock on one byte of /dev/null, far from its beginning: a file that is there everywhere, and that keeps
    nothing. The kernel gives back the locks of a process that dies.
    """

    def __init__(self) -> None:
        self._fd = self._pid = -1

    def take(self, count: int) -> tuple[int, ...]:
        """Takes so many numbers. Called once. Raises OSError."""
        first = int(tree()) << _MOST_ENVS_BITS  # also for none: processes that start now are of this tree
        if count == 0:
            return ()
        with Uninterrupted(), standard_fds():
            self._fd, self._pid = os.open(os.devnull, os.O_RDWR), os.getpid()
            own(self._fd)
        return tuple(itertools.islice((i for i in itertools.count() if self._locks(first + i)), count))

    def release(self) -> None:
        """Gives the numbers back, except in a fork, which has the same locks. For any time."""
        if self._fd >= 0 and self._pid == os.getpid():
            with Uninterrupted():
                with contextlib.suppress(OSError):
                    self._set(fcntl.F_UNLCK, 0, 0)
                fd, self._fd = self._fd, -1
                close_own(fd)

    __del__ = release  # where Ctrl-C has ended a `close` before it came to that

    def _locks(self, byte: int) -> bool:
        try:
            self._set(fcntl.F_WRLCK, byte, 1)
        except OSError as error:  # EAGAIN: another env has it; else a sandbox has no such locks, and its envs run
            return not isinstance(error, BlockingIOError)
        return True

    def _set(self, kind: int, byte: int, length: int) -> None:
        # A `struct flock`. Its lock is the open file's: closing another file here does not end it.
        fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, byte, length, 0))
