"""What collectors print on a node: its lines, which travel as log records."""

from __future__ import annotations

import fcntl
import os
import sys
import threading

from muster.pool.logs import of_print

_MOST_BYTES = 4 << 20  # that a file keeps of what was taken


class NodePrints:
    """Takes the place of this process's stdout and stderr for the workers that it starts: files, which take all."""

    def __init__(self) -> None:
        self._files = {name: os.memfd_create(f"muster-{name}") for name in ("stdout", "stderr")}
        self._taken, self._using = dict.fromkeys(self._files, 0), threading.Lock()
        for name, fd in self._files.items():
            fcntl.fcntl(fd, fcntl.F_SETFL, os.O_APPEND)
            setattr(sys, f"__{name}__", open(fd, "w"))  # noqa: SIM115 - workers get it as long as this process lives

    def take(self, place: str, *, ends_lines: bool) -> bytes:
        """The lines so far, as log records. place: begins each.  ends_lines: takes those that have no end yet, too."""
        with self._using:
            return b"".join(
                of_print(name, f"{place}: {line.decode(errors='replace')}")
                for name, fd in self._files.items()
                for line in self._lines(name, fd, ends_lines)
            )

    def _lines(self, name: str, fd: int, ends_lines: bool) -> list[bytes]:
        size, taken = os.fstat(fd).st_size, self._taken[name]
        data = os.pread(fd, size - taken, taken)
        data = data if ends_lines else data[: data.rfind(b"\n") + 1]
        self._taken[name] += len(data)
        if self._taken[name] > _MOST_BYTES and self._taken[name] == os.fstat(fd).st_size:
            os.ftruncate(fd, 0)
            self._taken[name] = 0
        return data.removesuffix(b"\n").split(b"\n") if data else []
