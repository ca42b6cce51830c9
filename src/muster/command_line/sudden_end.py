"""The line about a command whose process an env has ended, by a process that outlives it."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

_WATCH = 'read -r word || echo "$1" >&2'  # without a word the process that was to write it is gone


@contextmanager
def sudden_end_said(command: str, env: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Encloses work on envs: where one of them ends this process, that is said.

    options: of `make_vec`, by which the envs are made; where they have processes of their own nothing is watched.
    """
    if options.get("backend", "process") == "process" and not options.get("caller_steps"):
        yield
        return
    text = (
        f"{command}: error: an env in this process, or a library that it uses, has ended the process (os._exit, exit, "
        f"or a crash in native code), unless somebody else has. To try it in processes of its own: "
        f"muster doctor {shlex.quote(env)}"
    )
    watch = ["/bin/sh", "-c", _WATCH, "sh", text]
    # In a session of its own: Ctrl-C in a terminal is for the command alone.
    with subprocess.Popen(watch, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True) as watching:
        try:
            yield
        finally:
            assert watching.stdin is not None
            with suppress(OSError):
                watching.stdin.write(b"ended\n")
                watching.stdin.flush()
