"""The example with four collectors of multiwalker, as a person runs it, under every start method."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import programs

pytest.importorskip("pettingzoo.sisl")
EXAMPLE = Path(__file__).parents[2] / "examples" / "multiwalker.py"


@pytest.mark.parametrize("context", ["fork", *(pytest.param(c, marks=pytest.mark.slow) for c in ("auto", "spawn"))])
def test_it_gives_two_batches(context: str, tmp_path: Path):
    environment = {**os.environ, "SDL_VIDEODRIVER": "dummy"}
    how: Any = {"cwd": tmp_path, "env": environment, "imports": programs.TORCH}
    done = programs.run("-W", "ignore", EXAMPLE, context, check=True, **how)
    # PettingZoo says there, too, which actions of an untrained network it clips.
    assert [line for line in done.stdout.splitlines() if not line.startswith("[WARNING]")] == [
        "batch 0: 25 steps of 4 envs, 3 walkers",
        "batch 1: 25 steps of 4 envs, 3 walkers",
        "frames: 200",
    ]
