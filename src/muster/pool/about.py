"""The about file of a pool: a memfd by which other processes of this user, such as ``muster top``, know it."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from muster.extras import VERSION
from muster.pool.deaths import Nouns
from muster.pool.worker_process import open_files


def about_file(content: Mapping[str, Any]) -> int:
    """A new about file with `content`, of this process. Of all versions of Muster `version` and `python` are the same.

    It is the caller's to close, by `close_own`.
    """
    named = {"version": VERSION, "python": sys.executable, "pid": os.getpid(), "since": time.time()}
    files: dict[str, int] = {}
    open_files(files, "about")
    os.write(files["about"], json.dumps({**named, **content}).encode())
    return files["about"]


def about_pool(content: Mapping[str, Any] | None, nouns: Nouns, count: int, files: Mapping[str, int]) -> int | None:
    """The about file of a pool with `count` workers; None where its owner says nothing. files: fds by name."""
    if content is None:
        return None
    names = [nouns.process_name(index) for index in range(count)]
    inodes = {name: os.fstat(files[name]).st_ino for name in ("activity", "slab") if name in files}
    return about_file({**content, "names": names, "files": inodes})
