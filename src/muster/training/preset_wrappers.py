"""The wrappers that presets put around envs, applied in the workers. OpenCV is imported in none but those of images."""

from __future__ import annotations

from operator import itemgetter
from typing import Any

import gymnasium as gym
from gymnasium import spaces, wrappers

from muster.extras import require

PIXELS = 84  # of each side, as in Mnih et al. 2015


def atari_frames(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    """84 x 84 grey frames, the last 4 of them stacked, each the maximum of two after 4 frames of one action.

    The env has to show every frame: ``frameskip=1``.
    """
    return wrappers.FrameStackObservation(wrappers.AtariPreprocessing(env, frame_skip=4, screen_size=PIXELS), 4)


def small_images(env: gym.Env[Any, Any]) -> gym.Env[Any, Any]:
    """Images, channels last, of more than 84 x 84 pixels scaled down to that; others as they are."""
    height, width, channels = env.observation_space.shape or (0, 0, 0)
    if min(height, width) <= PIXELS or channels > min(height, width):
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
    """The parts of a Dict or Tuple observation, one after the other in one Box."""
    return wrappers.FlattenObservation(env)
