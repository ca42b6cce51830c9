"""The examples run as a person would run them, and print what they promise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("example", "printed"),
    [
        ("zeromq.py", ["positions: [-2.0, 0.0, 2.0, 2.0]"]),
        ("one_instance_library.py", ["heights: [2.0, 4.0, 6.0]", "processes: 3"]),
        (
            "files_and_locks.py",
            ["own files: ['0', '11', '20', '31']", "one lock: True", "one file: [0, 11, 20, 31]"],
        ),
    ],
)
def test_example(example: str, printed: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-W", "error", ROOT / "examples" / example]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == printed
    assert done.stderr == ""


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("example", "options", "printed"),
    [
        ("mpe2_groups.py", [], r"adversary: adversary_0, adversary_1, adversary_2; observations \(8, 3, 16\)"),
        (
            "melting_pot.py",
            ["--num-steps", "20"],
            r"6 envs reset in .* groups \{'player': \['player_0', (.*\n)*\d+ MB for each env",
        ),
    ],
)
def test_example_of_agents(example: str, options: list[str], printed: str, tmp_path: Path) -> None:
    pytest.importorskip("mpe2" if example.startswith("mpe2") else "dmlab2d")
    command = [sys.executable, "-W", "ignore", ROOT / "examples" / example, *options]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert re.search(printed, done.stdout), done.stdout


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "problems").glob("*.md")), ids=lambda page: page.stem)
def test_python_on_the_problem_pages_compiles(page: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        compile(block, page.name, "exec")
