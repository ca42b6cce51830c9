"""The call of ``worker_init``: once in a process, before its first env."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from muster.pickling.main_module import own_main

Init = Callable[[], Any]

ABOUT_INIT = "Raised by worker_init, which is called once in each worker before its first env is built."

_called_in: int | None = None  # a process's id: a fork of it has to make its own call


def run_once(init: Init) -> None:
    """Calls `init`, unless this process has made such a call before. Exceptions pass through, with a note.

    Globals of the script that `init` sets stay as it has set them when recipes arrive after it.
    """
    global _called_in
    if _called_in == os.getpid():
        return
    _called_in = os.getpid()
    main = own_main()
    try:
        if main is None:
            init()
        else:
            main.keep_changes(init)
    except BaseException as error:
        error.add_note(ABOUT_INIT)
        raise
