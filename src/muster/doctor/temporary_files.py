"""The temporary files that the processes of a soaked env make, and nobody else."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from muster.workers.resources import read_text

# The files that a process holds open are looked for among this many of its newest handles.
_MOST_HANDLES = 512
# Listing a folder may take a sixtieth of the process's time.
_LISTING_COSTS_AT_MOST = 1 / 60


class TemporaryFiles:
    """Counts temporary files, and makes `folder` the place for those of this process, where nobody else puts any.

    The machine's own folders are for all programs. There a file counts if it is new and known to be of these processes:
    Python code of this one has made it, its name has the id of one of them, or one of them has it open or mapped.
    What C code or a child has made there under another name, and closed at once, is not told from files of others.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        places = {one for one in (tempfile.gettempdir(), "/tmp", "/dev/shm") if os.path.isdir(one)}
        common = {os.path.realpath(one) for one in places} - {os.path.realpath(folder)}
        self._common = [_Folder(one) for one in sorted(common)]
        self._pids: set[int] = set()
        self._found: set[str] = set()
        os.environ["TMPDIR"] = tempfile.tempdir = folder
        self._made = _made_by_python({f"{one}/" for one in places | common}, f"{folder}/")

    def own(self) -> list[str]:
        """The names of what lies in the folder, and in the folders there."""
        return [name for _, folders, files in os.walk(self._folder) for name in (*folders, *files)]

    def common(self, started: Iterable[int]) -> list[str]:
        """The paths of files of these processes in the machine's folders. started: the others than this one."""
        pids = {os.getpid(), *started}
        self._pids |= pids
        for gone in [path for path in self._made.copy() if not os.path.lexists(path)]:
            self._made.discard(gone)
        new = {path for folder in self._common for path in folder.new()}
        self._found &= new
        unknown = {path for path in new - self._found - self._made if _is_mine(path)}
        self._found |= {path for path in unknown if self._has_id(path)}
        if unknown:
            self._found |= unknown & {path for pid in pids for path in _held_by(pid)}
        return [*self._found, *(self._made.copy() - self._found)]

    def _has_id(self, path: str) -> bool:
        return any(int(number) in self._pids for number in re.findall(r"(?<!\d)[1-9]\d*(?!\d)", os.path.basename(path)))


class _Folder:
    """A folder of the machine's, and what is new there."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._changed_at = self._next_at = 0.0
        self._old: frozenset[str] = frozenset()
        self._new: frozenset[str] = frozenset()
        self._list()
        self._old, self._new = self._new, frozenset()

    def new(self) -> list[str]:
        """The paths of what has come since the start. A big folder that keeps changing is listed now and then."""
        with contextlib.suppress(OSError):
            if os.stat(self._path).st_mtime_ns != self._changed_at and time.monotonic() >= self._next_at:
                self._list()
        return [f"{self._path}/{name}" for name in self._new]

    def _list(self) -> None:
        started_at = time.thread_time()
        self._changed_at = os.stat(self._path).st_mtime_ns
        self._new = frozenset(os.listdir(self._path)) - self._old
        self._next_at = time.monotonic() + (time.thread_time() - started_at) / _LISTING_COSTS_AT_MOST


def _made_by_python(places: set[str], excepted: str) -> set[str]:
    """A set that receives, from now on, each path below one of `places` where Python code of this process makes a file.

    For the rest of this process's life: an audit hook cannot be taken away.
    """
    made: set[str] = set()
    prefixes, pid = tuple(places), os.getpid()

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        path_of = _PATHS.get(event)
        if path_of is None or os.getpid() != pid:
            return
        with contextlib.suppress(Exception):  # an exception of a hook would be the env's
            path = os.path.abspath(os.fsdecode(path_of(arguments) or ""))
            is_made = path.startswith(prefixes) and not path.startswith(excepted)
            if is_made and (event == "mmap.__new__" or not os.path.lexists(path)):
                made.add(path)

    sys.addaudithook(note)
    return made


def _opened(arguments: tuple[Any, ...]) -> Any:
    return arguments[0] if arguments[2] & os.O_CREAT else None


def _mapped(arguments: tuple[Any, ...]) -> Any:
    """The file of memory that processes share, which `shm_open` has made without an event of its own."""
    path = os.readlink(f"/proc/self/fd/{arguments[0]}") if arguments[0] >= 0 else ""
    return path if path.startswith("/dev/shm/") else None


# What makes a file, by Python's audit event: the path among the event's arguments.
_PATHS: dict[str, Callable[[tuple[Any, ...]], Any]] = {
    "open": _opened,
    "os.mkdir": lambda arguments: arguments[0],
    "os.rename": lambda arguments: arguments[1],
    "os.link": lambda arguments: arguments[1],
    "os.symlink": lambda arguments: arguments[1],
    "sqlite3.connect": lambda arguments: arguments[0],
    "socket.bind": lambda arguments: arguments[1] if isinstance(arguments[1], (str, bytes)) else None,
    "mmap.__new__": _mapped,
}


def _is_mine(path: str) -> bool:
    with contextlib.suppress(OSError):
        return os.lstat(path).st_uid == os.geteuid()
    return False


def _held_by(pid: int) -> set[str]:
    """The paths of files that the process has open or mapped."""
    held = {line.split(maxsplit=5)[-1] for line in read_text(Path(f"/proc/{pid}/maps")).splitlines() if "/" in line}
    with contextlib.suppress(OSError):
        newest = sorted(map(int, os.listdir(f"/proc/{pid}/fd")))[-_MOST_HANDLES:]
        for fd in newest:
            with contextlib.suppress(OSError):
                held.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return held
