"""The things of the machine that an env's processes hold, and that another env may want: ports, files, devices, ..."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from muster.pool.resources import descendants, read_text
from muster.pool.worker_process import print_at_once
from muster.worker_info import get_worker_info

PORTS = ("TCP port", "UDP port")
ADDRESSES = (*PORTS, "Unix socket")
# Every process opens these: memory (null, random, ...), terminals.
_COMMON_DEVICES = (1, 5, *range(136, 144))
_LISTENS, _UNCONNECTED = "0A", "07"
_NOT_OF_ENVS = ("/proc/", "/sys/", "/memfd:")
# Open for writing (O_WRONLY, O_RDWR), or locked.
_USED = re.compile(r"^flags:.*[12]$|^lock:", re.MULTILINE)
_PASSING = re.compile(r"/__pycache__/| \(deleted\)$")


class Held(NamedTuple):
    """A thing that a process holds. name: a port's number or a path."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


def held(pid: int) -> set[Held]:
    """The things that a process and its children hold now: what they listen on, write to, lock and share.

    Reads /proc. A process that has ended, or is another user's, holds nothing.
    """
    found: set[Held] = set()
    for one in (pid, *(descendants(pid) or ())):
        inodes = set()
        with contextlib.suppress(OSError):
            for fd in os.listdir(f"/proc/{one}/fd"):
                with contextlib.suppress(OSError):
                    target = os.readlink(f"/proc/{one}/fd/{fd}")
                    if target.startswith("socket:["):
                        inodes.add(target[8:-1])
                    elif target.startswith("/") and _USED.search(read_text(Path(f"/proc/{one}/fdinfo/{fd}"))):
                        found |= of_path(target)
        for line in read_text(Path(f"/proc/{one}/maps")).splitlines():
            _, rights, *_, path = line.split(maxsplit=5)
            if rights[1] + rights[3] == "ws":  # written to, and shared
                found |= of_path(path)
        found |= {address for inode, address in _addresses(one) if inode in inodes}
    return found


def of_path(path: str) -> set[Held]:
    """The thing of that path; empty for what is everybody's, or a process's own."""
    if path.startswith(_NOT_OF_ENVS) or _PASSING.search(path):
        return set()
    if path.startswith("/dev/shm/"):
        return {Held("shared memory", path)}
    try:
        found = os.stat(path)
    except OSError:
        return {Held("file", path)}  # not there yet, or not any more
    mode = found.st_mode
    if stat.S_ISSOCK(mode):
        return {Held("Unix socket", path)}
    if stat.S_ISREG(mode):
        return {Held("file", path)}
    is_common = stat.S_ISDIR(mode) or (stat.S_ISCHR(mode) and os.major(found.st_rdev) in _COMMON_DEVICES)
    return set() if is_common else {Held("device", path)}


def files_in(folders: Iterable[str]) -> set[Held]:
    """The files that lie in the folders, such as pid files, which are closed again as soon as they are written."""
    found: set[Held] = set()
    for folder in folders:
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            found |= {Held("file", os.path.abspath(entry.path)) for entry in entries if entry.is_file()}
    return found


def _addresses(pid: int) -> Iterator[tuple[str, Held]]:
    for kind, state in zip(PORTS, (_LISTENS, _UNCONNECTED), strict=True):
        for file in (kind[:3].lower(), f"{kind[:3].lower()}6"):
            for line in read_text(Path(f"/proc/{pid}/net/{file}")).splitlines()[1:]:
                fields = line.split()
                if fields[3] == state:
                    yield fields[9], Held(kind, str(int(fields[1].partition(":")[2], 16)))
    for line in read_text(Path(f"/proc/{pid}/net/unix")).splitlines()[1:]:
        if len(words := line.split(maxsplit=7)) == 8:
            yield words[6], Held("Unix socket", words[7])


class HeldRecorder:
    """Has a worker note in a file what Python code in it opens for writing, and binds, even where it fails in that.

    Call it in the worker. What the worker prints is not kept back either. folder: of the files, one for each worker.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def __call__(self) -> None:
        info = get_worker_info()
        self._file = f"{self._folder}/{info.worker_index if info is not None else 0}"
        print_at_once()
        sys.addaudithook(self._note)

    def noted(self, worker: int) -> set[Held]:
        """The things that a worker has noted."""
        lines = read_text(Path(f"{self._folder}/{worker}")).splitlines()
        return {Held(kind, name) for kind, _, name in (line.partition("\t") for line in lines)}

    def _note(self, event: str, args: Sequence[Any]) -> None:
        if event not in ("open", "sqlite3.connect", "socket.bind"):
            return
        with contextlib.suppress(Exception):  # the env does not notice
            for one in _bound(*args) if event == "socket.bind" else _opened(*args):
                if not one.name.startswith(self._folder):
                    with open(self._file, "a") as file:  # not kept open: an env may close what it has not opened
                        file.write(f"{one.kind}\t{one.name}\n")


def _opened(path: Any, mode: str | None = None, flags: int = os.O_RDWR) -> set[Held]:
    if isinstance(path, int) or flags & os.O_ACCMODE == os.O_RDONLY:
        return set()
    name = os.fsdecode(path)
    return of_path(os.path.abspath(name)) if name and not name.startswith((":memory:", "file:")) else set()


def _bound(bound: socket.socket, address: Any) -> set[Held]:
    if bound.family == socket.AF_UNIX:
        name = os.fsdecode(address)
        return {Held("Unix socket", f"@{name[1:]}" if name.startswith("\0") else os.path.abspath(name))}
    is_port = bound.family in (socket.AF_INET, socket.AF_INET6) and address[1]
    return {Held(PORTS[bound.type == socket.SOCK_DGRAM], str(address[1]))} if is_port else set()
