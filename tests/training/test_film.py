"""A film shows what the env rendered, in what any browser plays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import av
import gymnasium as gym
import numpy as np
import pytest
from gymnasium import spaces

import muster
from muster.errors import UsageError
from muster.training.film import film_episode, require_filmable


class Fading(gym.Env[Any, Any]):
    """Renders a plane of odd size whose brightness is 20 times the step; its episodes have 10 steps."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 25}  # noqa: RUF012  # as Gymnasium has it
    observation_space = spaces.Box(0, 100, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, render_mode: str | None = None, endless: bool = False) -> None:
        self.render_mode, self.endless, self.t = render_mode, endless, 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self.t = 0
        return np.array([self.t], np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.t += 1
        return np.array([self.t], np.float32), 1.0, self.t == 10 and not self.endless, False, {}

    def render(self) -> Any:
        return None if self.render_mode is None else np.full((65, 97, 3), 20 * self.t % 256, np.uint8)


def zeros(obs: Any) -> Any:
    return np.zeros(len(obs), np.int64)


def filmed(path: Path, **options: Any) -> int:
    kwargs = {"render_mode": "rgb_array", **options}
    with muster.make_vec(Fading, 1, backend="serial", autoreset_mode="disabled", env_kwargs=kwargs) as envs:
        return film_episode(envs, zeros, path, seed=1, max_steps=30)


def test_every_frame_of_the_episode_is_shown_the_last_included(tmp_path: Path) -> None:
    path = tmp_path / "new" / "out.mp4"
    assert filmed(path) == 11
    with av.open(str(path)) as film:
        stream = film.streams.video[0]
        assert (stream.codec_context.name, stream.width, stream.height, stream.average_rate) == ("h264", 96, 64, 25)
        shown = [frame.to_ndarray(format="rgb24").mean() for frame in film.decode(stream)]
    assert shown == pytest.approx([20 * t for t in range(11)], abs=4)


def test_an_endless_episode_is_filmed_up_to_max_steps(tmp_path: Path) -> None:
    assert filmed(tmp_path / "out.mp4", endless=True) == 31


def test_an_env_without_frames_and_a_name_of_no_film_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot be filmed: its render\(\) gave NoneType.*rgb_array"):
        filmed(tmp_path / "out.mp4", render_mode=None)
    with pytest.raises(UsageError, match=r"out\.txt cannot be written as a film.*\.mp4"):
        filmed(tmp_path / "out.txt")


@pytest.mark.parametrize("name", ["out.gif", "out", "folder", "a:b.txt"])
def test_what_cannot_be_a_film_is_refused_beforehand_and_leaves_no_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match=r"ends in \.mp4"):
        require_filmable(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_an_earlier_film_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "a:b.mp4"
    path.write_text("earlier")
    require_filmable(path)
    with pytest.raises(UsageError):
        filmed(path, render_mode=None)
    assert path.read_text() == "earlier"
    path.rename(tmp_path / "mine")
    path.symlink_to(tmp_path / "mine")  # which is not followed
    filmed(path)
    assert sorted(one.name for one in tmp_path.iterdir()) == [path.name, "mine"]
    assert ((tmp_path / "mine").read_text(), path.is_symlink()) == ("earlier", False)
    assert path.stat().st_size > 100
