"""The way of what workers print: ``worker_output``."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from muster.errors import ConfigError

_log = logging.getLogger("muster")

INHERIT, QUIET = "inherit", "quiet"
MOST_BYTES = 16 << 20
"""What a worker's log may grow to before the worker begins it anew, and keeps it as ``.1``."""
_LOOK_S = 0.25


def checked_output(value: Any) -> str:
    """``worker_output`` as text; a folder is made, and absolute. Raises ConfigError."""
    if value in (INHERIT, QUIET):
        return str(value)
    expected = f'"{INHERIT}", "{QUIET}" or a folder that can be written'
    named = os.fsdecode(value) if isinstance(value, (str, os.PathLike)) else ""
    if not named or "://" in named or "\0" in named:
        raise ConfigError("worker_output", expected, value)
    folder = Path(named).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):  # the root of all users may write where nothing can be made
            return str(folder)
    except (OSError, ValueError) as error:
        raise ConfigError("worker_output", f"{expected} ({getattr(error, 'strerror', error)})", value) from None


def open_output(output: str, name: str) -> int:
    """An fd for the stdout and stderr of a worker. name: of its log. One that cannot be opened now costs a warning."""
    if output != QUIET:
        try:
            return os.open(f"{output}/{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            _log.warning("%s/%s.log: %s; what that worker prints is lost", output, name, error.strerror)
    return os.open(os.devnull, os.O_WRONLY)


def head_log(fd: int, about: str) -> None:
    """Begins a worker's part of its log. about: the worker, and why it is started; of that the first line."""
    line = f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {about.splitlines()[0]}\n".encode()
    with contextlib.suppress(OSError), open(f"/proc/self/fd/{fd}", "rb") as log:  # the worker warns of a full disk
        size = log.seek(0, os.SEEK_END)
        log.seek(max(0, size - 1))
        os.write(fd, (b"\n" if log.read(1) not in (b"", b"\n") else b"") + line)


class _Stream(io.FileIO):
    """stdout or stderr of a worker. Where that cannot be written, the text is lost, and no step fails."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd, "w", closefd=False)
        self._has_warned = False

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if not self._has_warned:
                self._has_warned, path = True, os.readlink(f"/proc/self/fd/{self.fileno()}")
                _log.warning("%s: %s; what that worker prints is lost", path, error.strerror)
            return len(data)


def take_output(output: str) -> None:
    """Has this worker print to its fds 1 and 2, also where what it was forked from had other streams.

    A log, its fd 1, does not grow without end.
    """
    for fd, name in ((1, "stdout"), (2, "stderr")):
        encoding, errors = (getattr(getattr(sys, name), one, None) for one in ("encoding", "errors"))
        setattr(sys, name, io.TextIOWrapper(io.BufferedWriter(_Stream(fd)), encoding, errors, line_buffering=True))
    if output != QUIET:
        log = os.dup(1)  # the env may have another file there one day
        threading.Thread(target=_turn_over, args=(log,), name="muster-log", daemon=True).start()


def _turn_over(log: int) -> None:
    here = f"/proc/self/fd/{log}"  # also where the file has been removed, or moved, since
    path = os.readlink(here)
    while True:
        time.sleep(_LOOK_S)
        if (size := os.fstat(log).st_size) > MOST_BYTES:
            with (
                contextlib.suppress(OSError),
                open(here, "rb") as written,
                open(f"{path}.1", "wb", buffering=0) as kept,
            ):
                # To the end of what is written meanwhile, unless that is as fast.
                while written.tell() < size + MOST_BYTES and (part := written.read(1 << 20)):
                    kept.write(part)
            with contextlib.suppress(OSError):
                os.ftruncate(log, 0)
