"""A film of one episode that a policy plays."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from muster.errors import UsageError
from muster.extras import imports_for
from muster.spaces.masks import MASK
from muster.training.run_envs import RunEnvs
from muster.training.run_folder import naming, write_named
from muster.vector.vector_env import VectorEnv

_FRAMES_PER_SECOND = 30  # where the env's metadata say nothing

Frame = np.ndarray[tuple[int, int, int], np.dtype[np.uint8]]


def require_filmable(path: Path) -> None:
    """Makes the folder of ``path``. Raises UsageError, or OSError, where no film can be written there."""
    aside, film, _ = _begun(path, _FRAMES_PER_SECOND)
    film.close()
    aside.unlink(missing_ok=True)


def film_episode(
    envs: RunEnvs, policy: Callable[..., Any], path: Path, *, seed: int, max_steps: int | None = None
) -> int:
    """Writes an episode as H.264 in the container that the suffix of ``path`` names; returns its number of frames.

    The film is at ``path`` once it is whole.

    envs: one env, with ``autoreset_mode="disabled"``, whose ``render_mode`` is "rgb_array".  policy: observations
    [1, *obs_shape] to actions, as a `RunPolicy`; with memory it returns its state besides, and is given it.
    max_steps: after which the film ends even if the episode has not; None for no limit.

    Raises UsageError where the env renders no frames, and for a suffix that is no film's; ImportError without PyAV.
    """
    frames = _frames(envs, policy, seed, max_steps)
    first = next(frames)
    aside, film, stream = _begun(path, round(envs.metadata.get("render_fps") or _FRAMES_PER_SECOND))
    import av

    height, width = (size - size % 2 for size in first.shape[:2])  # H.264 has even sizes
    count = 0
    try:
        with naming(path, aside=aside), film:
            stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"  # what browsers play
            for frame in itertools.chain([first], frames):
                count += 1
                picture = np.ascontiguousarray(frame[:height, :width])
                film.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
            film.mux(stream.encode())
        write_named(path, aside.read_bytes())
    finally:
        aside.unlink(missing_ok=True)
    return count


def _begun(path: Path, rate: int) -> tuple[Path, Any, Any]:
    """A file beside ``path``, of its suffix, with the film and its stream of frames that are open in it."""
    with imports_for("Films need", "muster-rl[train]", "av"):
        import av
    if path.is_dir():
        raise UsageError(f"{path} is a folder; choose the name of a file that ends in .mp4")
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.absolute().with_name(f".{secrets.token_hex(8)}-{path.name}")
    try:
        with naming(path, aside=aside):
            # A new file, no link. And av has no word for a folder that cannot be written to.
            aside.touch(exist_ok=False)
            film = av.open(str(aside), "w")
        return aside, film, film.add_stream("libx264", rate=rate)
    except ValueError as error:
        aside.unlink(missing_ok=True)
        said = getattr(error, "strerror", None) or error  # FFmpeg's own errors name the file aside, too
        raise UsageError(f"{path} cannot be written as a film: {said}. Choose a name that ends in .mp4") from None


def _frames(envs: RunEnvs, policy: Callable[..., Any], seed: int, max_steps: int | None) -> Iterator[Frame]:
    obs, infos = envs.reset(seed=seed)
    state: list[Any] = []
    yield _rendered(envs)
    for _ in itertools.count() if max_steps is None else range(max_steps):
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
        raise UsageError(
            f"the env cannot be filmed: its render() gave {_kind(frame)}, expected an array of uint8 [height, width, "
            '3], which it gives where it has the render_mode "rgb_array"'
        )
    if min(frame.shape[:2]) < 2:
        raise UsageError(
            f"the env cannot be filmed: its frames are {_kind(frame)}, and films have 2 x 2 pixels at least"
        )
    return frame


def _kind(frame: Any) -> str:
    return f"{frame.dtype} {list(frame.shape)}" if isinstance(frame, np.ndarray) else type(frame).__name__
