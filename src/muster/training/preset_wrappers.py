"""The wrappers that presets put around envs, applied in the workers. OpenCV is imported in none but those of images."""

from __future__ import annotations

from operator import itemgetter, methodcaller
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces, wrappers

from muster.extras import require
from muster.spaces.masks import MASK

PIXELS = 84  # of each side, as in Mnih et al. 2015


def atari_frames(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    """84 x 84 grey frames, the last 4 of them stacked, each the maximum of two after 4 frames of one action.

    The env has to show every frame: ``frameskip=1``.
    """
    return wrappers.FrameStackObservation(wrappers.AtariPreprocessing(env, frame_skip=4, screen_size=PIXELS), 4)


def small_images(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    """Images of 0 to 255, grey or channels last, of more than 84 x 84 pixels scaled to that; others as they are."""
    space = env.observation_space
    assert isinstance(space, spaces.Box)
    shape = space.shape
    grey_or_channels_last = len(shape) == 2 or (len(shape) == 3 and shape[2] <= shape[0])
    all_bytes = not space.low.any() and bool((space.high == 255).all())  # what ResizeObservation takes
    if not grey_or_channels_last or min(shape[:2]) <= PIXELS or not all_bytes:
        return env
    require("Larger images than 84 x 84 need", "muster-rl[train]", "cv2")
    return wrappers.ResizeObservation(env, (PIXELS, PIXELS))


def image_alone(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    """The "image" of a Dict observation, without the rest; other observations as they are."""
    space = env.observation_space
    if not isinstance(space, spaces.Dict) or "image" not in space.spaces:
        return env
    return wrappers.TransformObservation(env, itemgetter("image"), space["image"])


def flat(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    """The parts of a Dict or Tuple observation, one after the other in one Box of float32; codes are one-hot.

    Observations that no Box can hold, such as those with a Sequence or a Graph in them, stay as they are; so do those
    with an action mask.
    """
    space = env.observation_space
    is_masked = isinstance(space, spaces.Dict) and MASK in space.spaces
    if is_masked or not space.is_np_flattenable or not spaces.flatdim(space):
        return env
    flattened = wrappers.FlattenObservation(env)
    box = flattened.observation_space
    assert isinstance(box, spaces.Box)
    with np.errstate(over="ignore"):
        bounds = box.low.astype(np.float32), box.high.astype(np.float32)
    return wrappers.TransformObservation(
        flattened, methodcaller("astype", np.float32), spaces.Box(*bounds, dtype=np.float32)
    )
