"""The cores, memory and threads that this process may use."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """The cores that this process may keep busy: affinity and cgroup quota (v2 and v1), at least 1."""
    cores = len(os.sched_getaffinity(0))
    quota = cpu_quota()
    return max(1, min(cores, round(quota))) if quota else cores


def cpu_quota() -> float | None:
    """The cgroup's limit of CPU time, in cores (v2 and v1); None where there is none."""
    return _quota_v2() or _quota_v1()


def _quota_v2() -> float | None:
    limits = []
    for folder in _up_to(CGROUP, _own_cgroup()):
        fields = read_text(folder / "cpu.max").split()
        if len(fields) == 2 and fields[0] != "max":
            limits.append(int(fields[0]) / int(fields[1]))
    return min(limits, default=None)


def _quota_v1() -> float | None:
    quota, period = (read_text(CGROUP / "cpu" / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    return int(quota) / int(period) if quota and period and int(quota) > 0 else None


def memory_left() -> tuple[int, str]:
    """Bytes that this process and its children may still take, and what sets that limit: a cgroup or the machine."""
    fields = dict(line.split(":") for line in read_text(Path("/proc/meminfo")).splitlines())
    limits = [(sys.maxsize, "no limit is known")]
    if "MemAvailable" in fields:
        limits.append((int(fields["MemAvailable"].split()[0]) * 1024, "free in this machine"))
    for folder, limit_name, usage_name, cache_name in _memory_cgroups():
        limit, usage = read_text(folder / limit_name).strip(), read_text(folder / usage_name).strip()
        if not limit.isdigit() or not usage.isdigit():
            continue
        statistics = dict(line.split() for line in read_text(folder / "memory.stat").splitlines())
        # The kernel frees the page cache of files that nobody reads when memory gets short.
        used = int(usage) - int(statistics.get(cache_name, 0))
        limits.append((max(0, int(limit) - used), f"of the cgroup's {limit_name}={limit}"))
    return min(limits)


def _memory_cgroups() -> Iterator[tuple[Path, str, str, str]]:
    """The cgroups whose memory limits count here: folder, and the names of limit, usage and idle page cache."""
    for folder in _up_to(CGROUP, _own_cgroup()):
        yield folder, "memory.max", "memory.current", "inactive_file"
    for folder in _folders_v1("memory"):
        yield folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"


def threads_left() -> tuple[int, str] | None:
    """Threads that the cgroup lets its processes start, and what sets that limit; None where nothing does."""
    limits = []
    for folder in (*_up_to(CGROUP, _own_cgroup()), *_folders_v1("pids")):
        limit, current = (read_text(folder / f"pids.{name}").strip() for name in ("max", "current"))
        if limit.isdigit() and current.isdigit():
            limits.append((max(0, int(limit) - int(current)), f"of the cgroup's pids.max={limit}"))
    return min(limits, default=None)


def _folders_v1(controller: str) -> list[Path]:
    """The cgroups of version 1 whose limits count here, of one controller."""
    folders: list[Path] = []
    for line in read_text(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            folders += _up_to(CGROUP / controller, CGROUP / controller / path.lstrip("/"))
    return folders


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
        return path.read_text()
    except OSError:
        return ""
