"""The picture exists, and shows what the CSV says."""

from __future__ import annotations

import fcntl
import math
import os
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import pytest

from muster.training.picture import Picture, learning_curve
from muster.training.run_folder import RunFolder

PNG = b"\x89PNG"
NOTEBOOK = "module://matplotlib_inline.backend_inline"  # which cannot be imported outside of one


def run_of(path: Path, returns: list[float]) -> Path:
    with RunFolder(path) as folder:
        for i, value in enumerate(returns):
            folder.append_metrics(
                {"steps": 1000 * (i + 1), "mean_return": value, "low_return": value, "high_return": value}
            )
    return path


@pytest.mark.parametrize("goal", [None, 475.0])
@pytest.mark.parametrize("returns", [[1.0], [math.nan, 2.0, -3.5e6]], ids=len)
def test_a_picture_is_drawn(tmp_path: Path, returns: list[float], goal: float | None):
    png = tmp_path / "curve.png"
    learning_curve(run_of(tmp_path / "run", returns), title="CartPole-v1 $x_1 $y", goal=goal).save(png)
    height, width, _ = matplotlib.image.imread(png).shape
    assert width > height > 600


@pytest.mark.parametrize("returns", [[], [math.nan, math.nan]], ids=["no rows", "no episode"])
def test_a_picture_is_drawn_before_the_first_episode_ends(tmp_path: Path, returns: list[float]):
    png = tmp_path / "curve.png"
    learning_curve(run_of(tmp_path / "run", returns), title="CartPole-v1", goal=475.0).save(png)
    assert matplotlib.image.imread(png).min() < 0.8


def test_a_pipe_is_written_to(tmp_path: Path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 1 << 20)  # room for all of it
    Picture("a run").save(pipe)
    with open(reader, "rb") as read:
        assert read.read(1 << 20).startswith(PNG)
    assert pipe.is_fifo()


def test_a_device_is_written_to_and_stays():
    before = os.stat("/dev/null").st_rdev
    Picture("a run").save(Path("/dev/null"))
    assert os.stat("/dev/null").st_rdev == before


def test_matplotlibs_backend_and_pyplot_stay_out_of_it(tmp_path: Path):
    run, png = run_of(tmp_path / "run", [1.0, 2.0]), tmp_path / "curve.png"
    code = f"""
import os, sys
from pathlib import Path
from muster.training.picture import learning_curve
learning_curve(Path({str(run)!r}), title="t").save(Path({str(png)!r}))
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "MPLBACKEND": NOTEBOOK})
    assert png.exists()
