"""What workers of the TorchRL drop-in do to an env. Imports no torch: envs that need none are spared it."""

from __future__ import annotations

import sys
from typing import Any

import gymnasium

from muster.errors import RecipeError

# The metadata key that tells the caller whether discrete actions are integers.
ENCODING = "torchrl_categorical_action_encoding"


def gymnasium_env_of(env: Any) -> Any:
    """The Gymnasium env inside TorchRL's `GymEnv` or `GymWrapper`, or `env` itself. Raises RecipeError."""
    if isinstance(env, gymnasium.Env):
        return env
    libs = sys.modules.get("torchrl.envs.libs.gym")
    if libs is not None and isinstance(env, libs.GymWrapper):
        if env.frame_skip != 1:
            raise RecipeError(
                f"frame_skip={env.frame_skip} of GymEnv is not done here; skip frames in a wrapper of the Gymnasium env"
            )
        inner = env._env
        if isinstance(inner, gymnasium.Env):
            inner.metadata = {**inner.metadata, ENCODING: bool(env._categorical_action_encoding)}
            return inner
    raise RecipeError(
        f"create_env_fn returned a {type(env).__module__}.{type(env).__qualname__}; expected TorchRL's GymEnv or "
        "GymWrapper around a Gymnasium env, or a Gymnasium env. Put transforms around the batch, "
        "TransformedEnv(ParallelEnv(...), ...); for other envs use torchrl.envs.ParallelEnv"
    )
