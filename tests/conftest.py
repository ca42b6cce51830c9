"""Fixtures for every test: a check that the test leaves nothing behind."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

# With this their asserts show the values that they compared, as those of test modules do.
pytest.register_assert_rewrite(
    "backend_under_test",
    "backend_contract",
    "step_contract",
    "info_contract",
    "error_contract",
    "multi_agent_contract",
    "env_api_contract",
    "bare_loops",
    "row_checks",
)

_PR_SET_CHILD_SUBREAPER = 36
_PATIENCE_S = 5.0


@dataclass
class Holdings:
    """The things that this process holds and has started, each kind as a set of names."""

    processes: set[str]
    threads: set[str]
    fds: set[str]
    shared_memory: set[str]

    @classmethod
    def now(cls) -> Holdings:
        threads = {f"{thread.name} {thread.ident}" for thread in threading.enumerate()}
        shared_memory = set(os.listdir("/dev/shm"))
        if "PYTEST_XDIST_WORKER" in os.environ:
            # Python's named semaphores may belong to tests that run at the same time, and be mapped by no process.
            shared_memory = {name for name in shared_memory if not name.startswith("sem.mp-")}
        return cls(set(descendants(os.getpid())), threads, _open_fds(), shared_memory)

    def beyond(self, before: Holdings) -> dict[str, set[str]]:
        """The things that exist now and did not exist before, by kind."""
        more = {field.name: getattr(self, field.name) - getattr(before, field.name) for field in fields(self)}
        return {kind: names for kind, names in more.items() if names}


@pytest.fixture(scope="session")
def _adopts_orphans() -> None:
    """Makes processes whose parent has ended children of this process, so that none can hide."""
    refused = ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    assert not refused or ctypes.get_errno() == errno.EINVAL  # emulators of other processors do not know the call


@pytest.fixture
def leaves_nothing(_adopts_orphans: None) -> Iterator[None]:
    """Fails if the test leaves a process, a thread, an fd or an entry in /dev/shm (semaphores are there, too)."""
    gc.collect()
    gc.freeze()  # so that the collections below look only at what the test makes, and not at all modules
    before = Holdings.now()
    yield
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        gc.collect()
        left = Holdings.now().beyond(before)
        if "shared_memory" in left:
            left["shared_memory"] -= _used_by_others()
        if not any(left.values()):
            return
        if time.monotonic() > deadline:
            pytest.fail(f"left behind: {left}")
        time.sleep(0.02)


def descendants(pid: int) -> dict[str, int]:
    """Living processes below `pid`: their names as ``name pid``, for messages, and their pids."""
    children: dict[int, list[tuple[int, str]]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            name, _, rest = (entry / "stat").read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue
        state, parent = rest.split()[:2]
        if state != "Z":  # a zombie holds nothing, and its exit code may still be read
            children.setdefault(int(parent), []).append((int(entry.name), name))
    found: dict[str, int] = {}
    queue = [pid]
    while queue:
        for child, name in children.get(queue.pop(), []):
            found[f"{name} {child}"] = child
            queue.append(child)
    return found


def _used_by_others() -> set[str]:
    """Entries of /dev/shm that other processes have mapped: neither this one nor its descendants."""
    ours = {os.getpid(), *descendants(os.getpid()).values()}
    used: set[str] = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) not in ours:
            try:
                maps = (entry / "maps").read_text()
            except OSError:
                continue
            used.update(part.split()[0] for part in maps.split("/dev/shm/")[1:])
    return used


def _open_fds() -> set[str]:
    fds = set()
    for fd in os.listdir("/proc/self/fd"):
        try:
            fds.add(f"{fd} -> {os.readlink(f'/proc/self/fd/{fd}')}")
        except OSError:
            continue  # the fd that listed the folder
    return fds
