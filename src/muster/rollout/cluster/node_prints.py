"""What collectors print on a node: its lines, which travel as log records."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque

from muster.pool.logs import of_print
from muster.pool.worker_process import readable

_MOST_LINES, _LINE_BYTES = 20_000, 1 << 12
_READ_BYTES = 1 << 16  # all that a pipe holds


class NodePrints:
    """Takes the place of this process's stdout and stderr for the workers that it starts, which never wait for it.

    It keeps the last 20,000 lines until somebody takes them.
    """

    def __init__(self) -> None:
        self._lines, self._count = deque[tuple[str, bytes]](maxlen=_MOST_LINES), 0
        self._begun, self._names, self._using = dict[str, bytes](), dict[int, str](), threading.Lock()
        for name in ("stdout", "stderr"):
            read, write = os.pipe()
            self._names[read] = name
            setattr(sys, f"__{name}__", open(write, "w"))  # noqa: SIM115 - workers get it as long as this process lives
        threading.Thread(target=self._listen, name="muster-prints", daemon=True).start()

    def take(self, place: str, *, ends_lines: bool) -> bytes:
        """The lines so far, as log records. place: begins each.  ends_lines: takes those that have no end yet, too."""
        self._read()
        with self._using:
            begun = [(name, one) for name, one in self._begun.items() if one and ends_lines]
            lines, lost = [*self._lines, *begun], self._count - len(self._lines)
            self._begun = {} if ends_lines else self._begun
            self._lines.clear()
            self._count = 0
        if lost:
            said = f"{lost} printed lines before this one are lost: more than {_MOST_LINES:,} of them were waiting"
            lines.insert(0, ("stderr", said.encode()))
        return b"".join(of_print(name, f"{place}: {line.decode(errors='replace')}") for name, line in lines)

    def _listen(self) -> None:
        while True:
            readable(self._names, 60.0)
            self._read()

    def _read(self) -> None:
        with self._using:
            for fd in readable(self._names, 0.0):
                name = self._names[fd]
                *lines, begun = (self._begun.get(name, b"") + os.read(fd, _READ_BYTES)).split(b"\n")
                if len(begun) > _LINE_BYTES:
                    lines, begun = [*lines, begun], b""
                self._begun[name] = begun
                self._lines += [(name, line) for line in lines]
                self._count += len(lines)
