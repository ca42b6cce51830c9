"""Errors as every command reports them, with an exit status, and the standard streams that it finds."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys

import gymnasium as gym

from muster.arguments import option_of
from muster.errors import DISK_FULL, ConfigError, EnvError, MusterError, RecipeError, printable_lines
from muster.pool.launcher import fill_standard_fds

FAILED, MISUSED, SIGNALLED = 1, 2, 128  # the last one less the signal's number
REPORTED = (MusterError, gym.error.Error, ImportError, OSError, MemoryError)  # what is no fault of Muster's

_OF_STREAMS = (*DISK_FULL, errno.EPIPE, errno.EIO, errno.EBADF)
_UNKNOWN = (gym.error.NameNotFound, gym.error.NamespaceNotFound)


def report(command: str, error: BaseException) -> int:
    """Prints one of REPORTED on stderr, after the traceback of an env that raised. Returns the exit status."""
    if isinstance(error, OSError) and (broken := about_stdout(error)) is not None:
        if broken:
            say_error(f"{command}: error: {broken}")
        return FAILED
    if isinstance(error, EnvError) and error.worker_traceback:
        say_error(error.worker_traceback.rstrip())
    say_error(f"{command}: error: {_said_of(error)}")
    return MISUSED if isinstance(error, (ConfigError, RecipeError)) else FAILED


def _said_of(error: BaseException) -> str:
    if isinstance(error, ConfigError):
        return error.naming(option_of(error.option)) if error.expected else str(error)
    if isinstance(error, gym.error.Error):
        notes = getattr(error, "__notes__", [])  # which id may be meant
        if isinstance(error, _UNKNOWN) and not notes:
            notes = ["If it is of a package that is installed, write the module before it: module:Id-v0."]
        return " ".join([str(error), *notes])
    if isinstance(error, MemoryError) and not isinstance(error, MusterError):
        return f"there is not enough memory; choose smaller numbers ({type(error).__name__}: {error})"
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return str(error)


def prepare_streams() -> None:
    """Opens /dev/null for the streams that are closed: the next file would take their numbers, and be printed into."""
    fill_standard_fds()
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # it stays open, as a stream does
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # names of envs and paths may have letters that ASCII does not have


def say_error(text: str) -> None:
    """Prints the text on stderr, if anything can be printed there; control characters but tabs as escapes."""
    try:
        print(printable_lines(text), file=sys.stderr, flush=True)
    except OSError:
        _drop(2)


def about_stdout(error: OSError) -> str | None:
    """The sentence for an error that is stdout's, which takes nothing more then; None for errors of something else.

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
