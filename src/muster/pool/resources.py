"""The cores, memory and threads that this process may use, what processes hold, and whether more envs will fit."""

from __future__ import annotations

import contextlib
import errno
import itertools
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from muster.errors import LimitReached, NotEnoughMemory
from muster.introspection import caller_stacklevel

CGROUP = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """The cores that this process may keep busy, by its affinity and its cgroup's quota; at least 1."""
    cores = len(os.sched_getaffinity(0))
    quota = cpu_quota()
    return max(1, min(cores, round(quota))) if quota else cores


def cpu_quota() -> float | None:
    """The cgroup's limit of CPU time, in cores; None where there is none."""
    limits = []
    for folder in _up_to(CGROUP, _own_cgroup()):
        fields = read_text(folder / "cpu.max").split()
        if len(fields) == 2 and fields[0] != "max":
            limits.append(int(fields[0]) / int(fields[1]))
    return min(limits, default=None)


def memory_left() -> tuple[int, str]:
    """Bytes that this process and its children may still take, and what sets that limit: a cgroup or the machine."""
    fields = dict(line.split(":") for line in read_text(Path("/proc/meminfo")).splitlines())
    limits = [(sys.maxsize, "no limit is known")]
    if "MemAvailable" in fields:
        limits.append((int(fields["MemAvailable"].split()[0]) * 1024, "free in this machine"))
    for folder in _up_to(CGROUP, _own_cgroup()):
        limit, usage = (read_text(folder / f"memory.{name}").strip() for name in ("max", "current"))
        if not limit.isdigit() or not usage.isdigit():
            continue
        statistics = dict(line.split() for line in read_text(folder / "memory.stat").splitlines())
        # The kernel frees the page cache of files that nobody reads when memory gets short.
        used = int(usage) - int(statistics.get("inactive_file", 0))
        limits.append((max(0, int(limit) - used), f"of the cgroup's memory.max={limit}"))
    return min(limits)


_OF_LIMITS = (errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.EFBIG)


def limit(number: int | None) -> str:
    """The sentence about an error of the kernel that a limit causes; else empty. number: the errno."""
    if number not in _OF_LIMITS:
        return ""
    return (
        f"{os.strerror(number)}. A limit of this process, its user, its container or the machine is reached: see "
        "`ulimit -a` and pids.max of the cgroup. Allow more, or ask for fewer workers"
    )


@contextlib.contextmanager
def naming_limits(failed: str) -> Iterator[None]:
    """Has an error of the body say that it comes from a limit: LimitReached. failed: what has failed, in words."""
    try:
        yield
    except LimitReached:
        raise
    except OSError as error:
        if not (found := limit(error.errno)):
            raise
        raise LimitReached(error.errno, f"{failed}: {found}") from error


def limit_reached(number: int, failed: str) -> LimitReached:
    """The error of `naming_limits` where no system call has said that code itself."""
    return LimitReached(number, f"{failed}: {limit(number)}")


def _up_to(top: Path, folder: Path) -> list[Path]:
    """The folder and its parents, up to `top`."""
    return [one for one in (folder, *folder.parents) if top in (one, *one.parents)]


def _own_cgroup() -> Path:
    for line in read_text(Path("/proc/self/cgroup")).splitlines():
        if line.startswith("0::"):
            return CGROUP / line[3:].lstrip("/")
    return CGROUP


def read_text(path: Path) -> str:
    """The text of a kernel's file; empty where there is no such file, or this process may not read it."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def stat_of(pid: int | str) -> list[str]:
    """The name of a process, and the fields of its /proc/PID/stat from the state on; none where it has ended."""
    before, _, after = read_text(Path(f"/proc/{pid}/stat")).rpartition(")")
    return [before.partition("(")[2], *after.split()] if after else []


class Usage(NamedTuple):
    """The things that a process holds at one moment; None where it has ended, or the kernel does not say.

    anonymous_bytes: memory that belongs to no file, with what has been swapped out; that of its `children` counts.
    private_bytes: memory that nobody else holds, where that was asked for; else None.
    handles: open file descriptors.  children: processes that it has started, or that those have started, and that
    still exist.
    """

    anonymous_bytes: int | None = None
    handles: int | None = None
    children: int | None = None
    private_bytes: int | None = None


def usage_of(pid: int | None, *, private: bool = False) -> Usage:
    """The usage of process `pid`. Takes well under 0.1 ms, as no page table is walked; `private` walks them."""
    if pid is None:
        return Usage()
    try:
        handles = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return Usage()
    started = descendants(pid)
    held = _of_all(pid, private_bytes) if private else None
    return Usage(_of_all(pid, anonymous_bytes), handles, None if started is None else len(started), held)


def anonymous_bytes(pid: int) -> int | None:
    """Bytes of memory of process `pid` that belong to no file; None where it has ended, or the kernel does not say."""
    return _kilobytes(f"/proc/{pid}/status", "RssAnon:", "VmSwap:")


def figures(pid: int | None, start: Usage) -> dict[str, int | None]:
    """The figures of process `pid`, and their growth since `start`. Reads a few files of /proc."""
    now = usage_of(pid)
    return {
        "pid": pid,
        "memory_bytes": _of_all(pid, private_bytes),
        "memory_growth_bytes": _growth(start.anonymous_bytes, now.anonymous_bytes),
        "handles": now.handles,
        "fds": now.handles,
        "handles_growth": _growth(start.handles, now.handles),
        "children": now.children,
        "children_growth": _growth(start.children, now.children),
    }


def _of_all(pid: int | None, bytes_of: Callable[[int], int | None]) -> int | None:
    """The memory of process `pid` and of what it has started. Of this process alone: its workers are children, too."""
    own = None if pid is None else bytes_of(pid)
    if pid is None or own is None or pid == os.getpid():
        return own
    return own + sum(bytes_of(child) or 0 for child in descendants(pid) or ())


def _growth(before: int | None, now: int | None) -> int | None:
    return None if before is None or now is None else now - before


def cpu_s() -> float:
    """CPU seconds of this process and of what it has started, so far."""
    of = [stat_of(pid) for pid in (os.getpid(), *(descendants(os.getpid()) or ()))]
    return sum(sum(map(int, fields[12:16])) for fields in of if fields) / os.sysconf("SC_CLK_TCK")


def descendants(pid: int) -> list[int] | None:
    """The ids of the processes that `pid` has started, and of those that these have; None if the kernel does not say.

    An orphan belongs to nobody here.
    """
    try:
        lists = [_children(pid, thread) for thread in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return None
    found = []
    for child in (int(word) for words in lists for word in words):
        found += [child, *(descendants(child) or ())]
    return found


def _children(pid: int, thread: str) -> list[str]:
    try:
        with open(f"/proc/{pid}/task/{thread}/children") as file:
            return file.read().split()
    except OSError:
        if os.path.exists(f"/proc/{pid}/task/{thread}"):  # this kernel has no such file; else the thread has ended
            raise
        return []


def private_bytes(pid: int) -> int | None:
    """Bytes of memory that only process `pid` holds; None where it has ended, or the kernel does not say."""
    return _kilobytes(f"/proc/{pid}/smaps_rollup", "Private_")


def _kilobytes(path: str, *names: str) -> int | None:
    """The sum, in bytes, of lines that begin so; None without."""
    found = [int(line.split()[1]) * 1024 for line in read_text(Path(path)).splitlines() if line.startswith(names)]
    return sum(found) if found else None


def held_by(pid: int | None, least: float) -> int:
    """Bytes of memory that only process `pid` and those that it has started hold; 0 where that is below `least`.

    Walks page tables, which takes a while, only where these processes have so much in memory.
    """
    if pid is None or (_of_all(pid, lambda one: _kilobytes(f"/proc/{one}/status", "VmRSS:")) or 0) < least:
        return 0
    return _of_all(pid, private_bytes) or 0


def own_memory_bytes() -> int:
    """Bytes of memory that only this process holds, or only one of its children; 0 where the kernel does not say."""
    return sum(private_bytes(one) or 0 for one in (os.getpid(), *(descendants(os.getpid()) or ())))


MEMORY_CHECKS = ("error", "warn", "off")
# With so much for each env all are built at once; else the first has so long alone, so that it may be measured.
_ROOM_BYTES = 10**9
_ALONE_S = 1.0
MAY_SHARE = "Envs that share nothing, as `muster doctor` finds out, may share processes."


class MemoryPlan:
    """The memory that `num_envs` envs in `num_workers` workers will need, as it is judged while they are built.

    check: one of `MEMORY_CHECKS`, but not "off".  advice: a sentence for the error.
    has_room: whether all may be built at once.
    """

    def __init__(self, num_envs: int, num_workers: int, check: str, advice: str = "") -> None:
        self._num_envs, self._num_workers = num_envs, num_workers
        self._check, self._advice = check, advice
        self._left_at_first = memory_left()[0]
        self.has_room = self._left_at_first >= num_envs * _ROOM_BYTES
        self._others_at = math.inf  # time.monotonic() from which on the others may be built, whatever the first needs

    @property
    def others_begin(self) -> bool:
        """True once the workers after the first may build."""
        return time.monotonic() >= self._others_at

    def look(self, reports: list[tuple[int, ...]]) -> None:
        """Takes the reports of the first worker. Called while any worker builds.

        reports: see `accepts`; the empty one comes as it begins. Raises or warns as `accepts` does.
        """
        while reports:
            if not (built := reports.pop(0)):
                self._others_at = time.monotonic() + _ALONE_S
            elif self._others_at and self.accepts(built):
                self._others_at = 0.0

    def accepts(self, built: Sequence[int]) -> bool:
        """True if the others may be built, too, after one more env of the first worker's.

        built: bytes of memory that its process held before the first env, and after each env so far. After one env this
        is too strict, since libraries are counted: if there is a second one, that decides. Raises NotEnoughMemory, or
        warns, if the envs do not fit.
        """
        left_bytes, limit = memory_left()
        left_bytes = max(left_bytes, self._left_at_first - built[-1])  # as if the others had not begun
        needed, count = self._needed(self._num_envs, built), len(built) - 1
        if needed <= left_bytes:
            return True
        if count < min(2, self._num_envs // self._num_workers):
            return False
        worker_bytes, env_bytes = _costs(built)
        most = count
        while self._needed(most + 1, built) <= left_bytes:
            most += 1
        message = (
            f"{self._num_envs} envs in {self._num_workers} process{'es' * (self._num_workers > 1)} will not fit into "
            f"memory. After the first {count} about {_size(needed)} are needed ({_size(env_bytes)} for an env, "
            f"{_size(worker_bytes)} for a worker, measured in the first one), and {_size(left_bytes)} are left "
            f"({limit}). About {most} envs would fit. {self._advice}"
        ).rstrip()
        if self._check == "error":
            raise NotEnoughMemory(f'{message} To try all the same: memory_check="warn".')
        warnings.warn(message, ResourceWarning, stacklevel=caller_stacklevel())
        return True

    def _needed(self, num_envs: int, built: Sequence[int]) -> int:
        """Bytes for `num_envs` envs and their workers, without those that are built already.

        Too many for envs that share workers, if only one is built and it has loaded big libraries.
        """
        worker_bytes, env_bytes = _costs(built)
        workers = min(self._num_workers, num_envs)
        return (workers - 1) * worker_bytes + (num_envs - len(built) + 1) * env_bytes


def _costs(built: Sequence[int]) -> tuple[int, int]:
    """Bytes of one worker without envs, and of one env. Libraries make the first env cost more than the second."""
    before_bytes, *_ = built
    first, *second = (max(0, after - before) for before, after in itertools.pairwise(built))
    return (before_bytes + max(0, first - second[0]), second[0]) if second else (before_bytes, first)


def _size(count: int) -> str:
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"
