"""Standard streams that are closed, broken or full, behind the ``muster`` command."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

MUSTER = f"{sys.executable} -P -m muster"
FULL = "stdout cannot be written to: No space left on device; send it elsewhere, such as to a file or to /dev/null"


@pytest.mark.parametrize(
    ("line", "status", "said"),
    [
        ("{ sleep 0.2; muster --version; } | true", 1, ""),
        ("muster --version >/dev/full", 1, f"muster: error: {FULL}\n"),
        ("muster --version >&-", 0, ""),
        ("muster eval --help >&-", 0, ""),
        ("muster plott 2>&-", 2, ""),
        ("muster plott 2>/dev/full", 2, ""),
    ],
)
def test_streams_that_take_nothing_end_a_command_without_pythons_own_lines(line: str, status: int, said: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    script = f"set -o pipefail; {line.replace('muster', MUSTER, 1)}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (status, "", said)
