"""The example with four collectors of multiwalker, as a person runs it, under every start method."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pettingzoo.sisl")
EXAMPLE = Path(__file__).parents[2] / "examples" / "multiwalker.py"


@pytest.mark.parametrize("context", ["fork", *(pytest.param(c, marks=pytest.mark.slow) for c in ("auto", "spawn"))])
def test_it_gives_two_batches(context: str, tmp_path: Path):
    environment = {**os.environ, "SDL_VIDEODRIVER": "dummy", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, EXAMPLE, context],
        capture_output=True, text=True, timeout=110, cwd=tmp_path, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    # PettingZoo says there, too, which actions of an untrained network it clips.
    assert [line for line in done.stdout.splitlines() if not line.startswith("[WARNING]")] == [
        "batch 0: 25 steps of 4 envs, 3 walkers",
        "batch 1: 25 steps of 4 envs, 3 walkers",
        "frames: 200",
    ]
