"""Programs that are looked at while they run."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SPINNING = Path(__file__).parent.parent / "spinning.py"
Spins = Callable[[str], int]


@pytest.fixture
def spins() -> Iterator[Spins]:
    """Starts spinning.py with a kind; returns its process's id once it steps."""
    with contextlib.ExitStack() as stack:

        def start(kind: str) -> int:
            command = [sys.executable, str(SPINNING), kind]
            process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL))
            stack.callback(process.terminate)
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            return process.pid

        yield start
