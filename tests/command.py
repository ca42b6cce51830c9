"""The ``muster`` command in this process: what it prints, and its exit status."""

from __future__ import annotations

import contextlib
import io
import os
import re
from dataclasses import dataclass
from unittest.mock import patch

from muster import cli


@dataclass(frozen=True)
class Result:
    exit_code: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        return self.stdout + self.stderr


def muster(*words: str, columns: int = 200) -> Result:
    """The result of ``muster WORDS`` in a terminal of so many columns, without colours.

    What is said where envs take long to start is left out: a busy machine has it said, and a quiet one has not.
    """
    out, err = io.StringIO(), io.StringIO()
    environment = patch.dict(os.environ, {"COLUMNS": str(columns), "NO_COLOR": "1"})
    with environment, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.run(words)
    said = [line for line in out.getvalue().splitlines(keepends=True) if not re.match(r"starting \d+ envs? ", line)]
    return Result(status, "".join(said), err.getvalue())
