"""Curves of several runs, and what seeds reach together."""

from __future__ import annotations

from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from scipy.stats import trim_mean

from command import muster
from muster.errors import UsageError
from muster.training.comparison import interquartile_mean, interval, plot_comparison
from muster.training.run_folder import RunFolder


@pytest.mark.parametrize("runs", [1, 2, 3, 4, 5, 8, 11])
def test_the_interquartile_mean_is_scipys(runs: int) -> None:
    scores = np.random.default_rng(runs).normal(size=(runs, 6))
    np.testing.assert_allclose(interquartile_mean(scores), trim_mean(scores, 0.25, axis=0))


@pytest.mark.slow
def test_the_interval_is_where_such_means_lie() -> None:
    rng = np.random.default_rng(0)
    held = 0
    for seed in range(100):
        low, high = interval(rng.normal(size=(20, 1)), seed=seed)
        held += bool(low[0] <= 0 <= high[0])
    assert 85 <= held <= 100  # a bootstrap of 20 runs is somewhat narrow
    low, high = interval(np.array([[3.0, 4.0]]))
    assert low.tolist() == high.tolist() == [3.0, 4.0]


def test_runs_of_different_lengths_are_drawn_as_far_as_all_have_come(tmp_path: Path) -> None:
    paths = []
    for number, length in enumerate((5, 9, 1, 0)):
        with RunFolder(tmp_path / str(number)) as folder:
            for i in range(length):
                row = {"mean_return": float(i), "low_return": 0.0, "high_return": 9.0}
                folder.append_metrics({"steps": 100 * (i + 1), **row})
            if not length:
                folder.append_metrics({"steps": 1, "mean_return": float("nan"), "low_return": 0.0, "high_return": 0.0})
            paths.append(folder.path)
    png = tmp_path / "out.png"
    plot_comparison({"three $\\frac$ \x1b": paths[:3], "a_1": paths[:1], "none": paths[3:]}, png, title="Env_1")
    height, width, _ = matplotlib.image.imread(png).shape
    assert width > height > 600
    plot_comparison({"none": paths[3:]}, png, title="Env_1")


def test_runs_that_differ_in_their_seeds_alone_are_one_curve(tmp_path: Path) -> None:
    short = ("--total-steps", "64", "--num-envs", "2", "--num-steps", "32", "--backend", "serial")
    for name, *options in (("some/a", "--seed", "1"), ("some/b", "--seed", "2"), ("c", "--gamma", "0.9")):
        assert muster("train", "CartPole-v1", *short, "--run-dir", str(tmp_path / name), *options).exit_code == 0
    png = tmp_path / "out.png"
    result = muster("plot", str(tmp_path / "some"), str(tmp_path / "c"), "--output", str(png))
    assert result.exit_code == 0
    labels = "preset classic control num_envs=2 num_steps=32"
    assert result.stdout.splitlines() == [f"2 runs  {labels}", f"1 run  {labels} gamma=0.9", f"picture: {png}"]
    assert matplotlib.image.imread(png).ndim == 3


def test_what_cannot_be_compared_is_named(tmp_path: Path) -> None:
    said = {words: muster("plot", *words) for words in ((), (str(tmp_path),), (str(tmp_path / "absent"),))}
    assert [result.exit_code for result in said.values()] == [2, 1, 1]
    assert "name the folder of a RUN" in said[()].stderr
    assert f"{tmp_path} holds no run" in said[str(tmp_path),].stderr
    with RunFolder(tmp_path / "run") as folder:
        folder.append_metrics({"steps": 1, "mean_return": 1.0, "low_return": 1.0, "high_return": 1.0})
    with pytest.raises(UsageError, match=r"out\.foo cannot be written as a picture"):
        plot_comparison({"one": [folder.path]}, tmp_path / "out.foo", title="")
