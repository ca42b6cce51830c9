"""The preparation of envs in workers of the TorchRL drop-in. Imports no torch: not all envs need it."""

from __future__ import annotations

import sys
from typing import Any

import gymnasium

from muster.envs.adapt import Adapter, is_torchrl
from muster.envs.agents import AgentsEnv
from muster.errors import RecipeError
from muster.introspection import type_name

# The metadata key that reports to the caller whether discrete actions are integers.
ENCODING = "torchrl_categorical_action_encoding"


def inner_env_of(env: Any) -> Any:
    """The env inside one of TorchRL's wrappers, or `env` itself, adapted for the stepping loop. Raises RecipeError."""
    groups, categorical, state = None, None, True
    if _is_a(env, "gym", "GymWrapper"):
        if env.frame_skip != 1:
            raise RecipeError(
                f"frame_skip={env.frame_skip} of GymEnv is not done here; skip frames in a wrapper of the Gymnasium env"
            )
        inner, categorical = env._env, bool(env._categorical_action_encoding)
    elif _is_a(env, "pettingzoo", "PettingZooWrapper"):
        inner, categorical, state = env._env, bool(env.categorical_actions), bool(env.return_state)
        groups = {agent: group for group, agents in env.group_map.items() for agent in agents}
    else:
        inner = env
    adapted = None if is_torchrl(inner) else Adapter(groups, state)(inner)
    if not isinstance(adapted, (gymnasium.Env, AgentsEnv)):
        raise RecipeError(
            f"create_env_fn returned a {type_name(env)}; expected TorchRL's GymEnv or "
            "PettingZooEnv, or an env that muster.make_vec takes. Put transforms around the batch, "
            "TransformedEnv(ParallelEnv(...), ...); for other envs use torchrl.envs.ParallelEnv"
        )
    if categorical is not None:
        adapted.metadata = {**adapted.metadata, ENCODING: categorical}
    return adapted


def _is_a(env: Any, module: str, name: str) -> bool:
    """Whether `env` is an instance of TorchRL's class `name`. No env is one before `module` was imported."""
    libs = sys.modules.get(f"torchrl.envs.libs.{module}")
    return libs is not None and isinstance(env, getattr(libs, name))
