"""The handover of rows between the caller and workers, under ThreadSanitizer: handover.cpp."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("handover.cpp")
CORE = Path(__file__).parents[2] / "src" / "muster" / "_core"
SECONDS = 5
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++ with ThreadSanitizer"),
]


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Builds handover.cpp on the core's headers, and runs it."""
    program = folder / "handover"
    # -Wno-tsan: it does not know fences, on which only waking up depends.
    flags = ["-std=c++20", "-O2", "-g", "-fsanitize=thread", "-Wno-tsan", "-pthread", f"-I{CORE}"]
    subprocess.run(["g++", *flags, *options, str(SOURCE), "-o", str(program)], check=True)
    # -R: older ThreadSanitizers do not start where the kernel places a program's memory too randomly.
    return subprocess.run(
        ["setarch", "-R", str(program), str(SECONDS)], check=False, capture_output=True, text=True, timeout=120
    )


def test_no_byte_is_read_while_the_other_side_may_write_it(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    found = re.fullmatch(r"(\d+) rows right, (\d+) restarts\n", done.stdout)
    assert found is not None
    assert min(map(int, found.groups())) > 100


def test_a_read_after_the_handover_is_noticed(tmp_path: Path) -> None:
    assert "WARNING: ThreadSanitizer: data race" in run(tmp_path, "-DREADS_EARLY").stderr
