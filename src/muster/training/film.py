"""A film of one episode that a policy plays."""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from muster.errors import UsageError
from muster.extras import imports_for
from muster.spaces.masks import MASK
from muster.training.run_envs import RunEnvs
from muster.training.run_folder import write_named
from muster.vector.vector_env import VectorEnv

_FRAMES_PER_SECOND = 30  # where the env's metadata say nothing

Frame = np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]


def require_filmable(path: Path) -> None:
    """Makes the folder of ``path``. Raises UsageError where no film can be written there."""
    _begun(path, _FRAMES_PER_SECOND)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise UsageError(f"{path} is a folder; choose the name of a file that ends in .mp4")
    if not os.access(path.parent, os.W_OK):
        raise UsageError(f"{path.parent} cannot be written to; choose another folder for the film")


def film_episode(envs: RunEnvs, policy: Callable[..., Any], path: Path, *, seed: int, max_steps: int) -> int:
    """Writes an episode as H.264 in the container that the suffix of ``path`` names; returns its number of frames.

    The film is at ``path`` once it is whole.

    envs: one env, with ``autoreset_mode="disabled"`` and ``render_mode="rgb_array"``.  policy: observations
    [1, *obs_shape] to actions, as a `RunPolicy`; with memory it also returns its state, and is given it.
    max_steps: after which the film ends even if the episode does not.

    Raises UsageError where the env renders no frames, and for a suffix that is no film's; ImportError without PyAV.
    """
    frames = _frames(envs, policy, seed, max_steps)
    first = next(frames)
    content, film, stream = _begun(path, round(envs.metadata.get("render_fps") or _FRAMES_PER_SECOND))
    import av

    height, width = (size - size % 2 for size in first.shape[:2])  # H.264 has even sizes
    count = 0
    with film:
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"  # what browsers play
        for frame in itertools.chain([first], frames):
            count += 1
            picture = np.ascontiguousarray(frame[:height, :width])
            film.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        film.mux(stream.encode())
    path.parent.mkdir(parents=True, exist_ok=True)
    write_named(path, content.getvalue())
    return count


def _begun(path: Path, rate: int) -> tuple[io.BytesIO, Any, Any]:
    """A file in memory, with a film and its stream of frames that are open in it."""
    with imports_for("Films need", "muster-rl[train]", "av"):
        import av
    content: Any = io.BytesIO()
    content.name = path.name  # FFmpeg chooses the container by it
    try:
        film = av.open(content, "w")
        return content, film, film.add_stream("libx264", rate=rate)
    except ValueError as error:
        raise UsageError(f"{path} cannot be written as a film: {error}. Choose a name that ends in .mp4") from None


def _frames(envs: RunEnvs, policy: Callable[..., Any], seed: int, max_steps: int) -> Iterator[Frame]:
    obs, infos = envs.reset(seed=seed)
    state: list[Any] = []
    yield _rendered(envs)
    for _ in range(max_steps):
        asks = (MASK,) if isinstance(envs, VectorEnv) else (MASK, "alive")
        asked = {"masks" if key == MASK else key: infos[key] for key in asks if key in infos}
        found = policy(obs, *state, **asked)
        actions, *state = found if isinstance(found, tuple) else (found,)
        obs, _, terminated, truncated, infos = envs.step(actions)
        yield _rendered(envs)
        if terminated[0] or truncated[0]:
            return


def _rendered(envs: RunEnvs) -> Frame:
    frame = envs.render()[0]
    if not isinstance(frame, np.ndarray) or frame.ndim != 3 or frame.dtype != np.uint8:
        got = f"{frame.dtype} {list(frame.shape)}" if isinstance(frame, np.ndarray) else type(frame).__name__
        raise UsageError(
            f"the env cannot be filmed: its render() gave {got}, expected an array of uint8 [height, width, 3], which "
            'it gives where it has the render_mode "rgb_array"'
        )
    return frame
