"""Standard streams as a command finds them: closed, broken, full, or of few letters."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys

_OF_STREAMS = (errno.EPIPE, errno.ENOSPC, errno.EIO, errno.EBADF, errno.EDQUOT)


def prepare_streams() -> None:
    """Opens /dev/null for the streams that are closed: the next file would take their numbers, and be printed into."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # it stays open, as a stream does
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # names of envs and paths may have letters that ASCII has not


def say_error(text: str) -> None:
    """Prints the text on stderr, if anything can be printed there."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        _drop(2)


def about_stdout(error: OSError) -> str | None:
    """What to say of an error that is stdout's, which takes nothing more then; None for errors of something else.

    Empty where its reader has gone, as `head` does, and wants to hear no more.
    """
    if error.filename is not None or error.errno not in _OF_STREAMS:
        return None
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    _drop(1)
    if error.errno == errno.EPIPE:
        return ""
    return f"stdout cannot be written to: {error.strerror}; send it elsewhere, such as to a file or to /dev/null"


def _drop(number: int) -> None:
    """Lets a stream end in /dev/null, so that what is left in its buffer ends without an error of Python's own."""
    sink = os.open(os.devnull, os.O_WRONLY)
    os.dup2(sink, number)
    os.close(sink)
