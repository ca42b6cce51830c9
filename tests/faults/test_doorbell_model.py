"""The doorbell's protocol, model-checked: docs/doorbell.pml."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

MODEL = Path(__file__).parents[2] / "docs" / "doorbell.pml"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("spin") is None, reason="needs spin; install it with: apt-get install spin"),
]


def check(folder: Path, *options: str) -> str:
    """The output of spin, which searches all states of the model."""
    subprocess.run(["spin", *options, "-a", str(MODEL)], cwd=folder, check=True)
    subprocess.run(["gcc", "-w", "-O2", "-DSAFETY", "-o", "pan", "pan.c"], cwd=folder, check=True)
    return subprocess.run(["./pan", "-m100000"], cwd=folder, check=True, capture_output=True, text=True).stdout


def test_no_interleaving_loses_a_wake_up(tmp_path: Path) -> None:
    report = check(tmp_path)
    assert "errors: 0" in report
    assert "not completed" not in report


def test_without_the_fences_the_model_finds_a_lost_wake_up(tmp_path: Path) -> None:
    assert "invalid end state" in check(tmp_path, "-DNO_FENCE")
