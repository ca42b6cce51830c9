"""What collectors print on a node: its lines, which travel as log records."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque

from muster.pool.logs import of_print
from muster.pool.worker_process import readable

_MOST_BYTES, _LINE_BYTES = 4 << 20, 64  # a line takes so much besides its text
_READ_BYTES = 1 << 16  # all that a pipe holds


class NodePrints:
    """Takes the place of this process's stdout and stderr for the workers that it starts, which never wait for it.

    It keeps the last 4 MB of lines until somebody takes them.
    """

    def __init__(self) -> None:
        self._lines, self._size, self._lost = deque[tuple[str, bytes]](), 0, 0
        self._begun, self._names, self._using = dict[str, bytes](), dict[int, str](), threading.Lock()
        for name in ("stdout", "stderr"):
            read, write = os.pipe()
            self._names[read] = name
            setattr(sys, f"__{name}__", open(write, "w"))  # noqa: SIM115 - workers get it as long as this process lives
        threading.Thread(target=self._listen, name="muster-prints", daemon=True).start()

    def take(self, place: str, *, ends_lines: bool) -> bytes:
        """The lines so far, as log records. place: begins each.  ends_lines: takes those that have no end yet, too."""
        with self._using:
            self._read()
            for name, begun in [*self._begun.items()] if ends_lines else ():
                self._keep(name, b"\n" if begun else b"")
            lines, lost = [*self._lines], self._lost
            self._lines.clear()
            self._size = self._lost = 0
        if lost:
            text = (
                f"{lost} printed lines before this one are lost: more than {_MOST_BYTES >> 20} MB of them were waiting"
            )
            lines.insert(0, ("stderr", text.encode()))
        return b"".join(of_print(name, f"{place}: {line.decode(errors='replace')}") for name, line in lines)

    def _listen(self) -> None:
        while True:
            readable(self._names, 60.0)
            with self._using:
                self._read()

    def _read(self) -> None:
        for fd in readable(self._names, 0.0):
            self._keep(self._names[fd], os.read(fd, _READ_BYTES))

    def _keep(self, name: str, data: bytes) -> None:
        *lines, begun = (self._begun.get(name, b"") + data).split(b"\n")
        if len(begun) > _READ_BYTES:
            lines, begun = [*lines, begun], b""
        self._begun[name] = begun
        self._lines += [(name, line) for line in lines]
        self._size += sum(len(line) + _LINE_BYTES for line in lines)
        while self._size > _MOST_BYTES:  # the last words count
            self._size -= len(self._lines.popleft()[1]) + _LINE_BYTES
            self._lost += 1
