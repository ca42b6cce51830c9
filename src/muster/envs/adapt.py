"""Finds the API of an env by the env's methods, in the worker that built the env, and adapts the env."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium

from muster.arguments import flags
from muster.envs import resolve_foreign_id
from muster.envs.agents import AgentsEnv
from muster.envs.dm_env import DmEnv, is_dm_env
from muster.envs.groups import Agent
from muster.envs.melting_pot import Players, is_list_shaped
from muster.envs.pettingzoo import ParallelAgents, is_pettingzoo, is_turn_based, specs_of
from muster.envs.pettingzoo_aec import TurnBasedAgents
from muster.errors import ConfigError, RecipeError
from muster.introspection import type_name
from muster.recipes.recipe import Recipe, make_recipes

# Stands above this module, and is imported by its name in a worker that meets such an env.
_OF_TORCHRL = "muster.interop.torchrl.env_bases:adapted"


@dataclass(frozen=True)
class Adapter:
    """A wrapper for recipes, applied last: turns an env of any API into one that the stepping loop knows.

    groups: for multi-agent envs, each agent's group; None groups agents as the env's own ``agent_groups`` says, else by
    name and spaces.
    state: whether the state of multi-agent envs that have one is read after every step.
    """

    groups: Mapping[Agent, str] | None = None
    state: bool = False

    def __call__(self, env: Any) -> Any:
        adapted = self._adapt(env)
        if self.groups is not None and not isinstance(adapted, AgentsEnv):
            raise ConfigError(f"groups= is for multi-agent envs; {type(env).__name__} has one agent. Leave it out")
        return adapted

    def _adapt(self, env: Any) -> Any:
        if isinstance(env, gymnasium.Env):
            _require(env, ("observation_space", "action_space"))
            return env
        if is_torchrl(env):
            raise RecipeError(
                f"the factory returned an env of TorchRL, a {type_name(env)}. Many of them are run by "
                "muster.interop.torchrl.ParallelEnv(num_envs, make_env), with TorchRL's keys; collectors take the "
                "factory as it is"
            )
        if (is_pettingzoo(env) or is_dm_env(env)) and inspect.iscoroutinefunction(env.step):
            raise RecipeError(
                f"{type_name(env)} has several agents, or dm_env's API, and its step is a coroutine function: Muster "
                "awaits envs with Gymnasium's API alone. Make step and reset ordinary methods, and use concurrent=True"
            )
        if is_pettingzoo(env):
            groups = getattr(env, "agent_groups", None) if self.groups is None else self.groups
            kind = TurnBasedAgents if is_turn_based(env) else ParallelAgents
            return kind(env, specs_of(env, self.state), groups)
        if is_dm_env(env):
            return Players(env, self.groups) if is_list_shaped(env) else DmEnv(env)
        _require(env, ("reset", "step", "observation_space", "action_space"))
        return env


def adapted_recipes(
    env: Any,
    num_envs: int | None,
    env_kwargs: Any,
    wrappers: Sequence[Callable[[Any], Any]] | None,
    groups: Mapping[Any, str] | None,
    state: bool,
) -> list[Recipe]:
    """The recipes of `make_recipes`, each with an Adapter as its last wrapper.

    Raises what `make_recipes` raises, and ConfigError for invalid groups and state.
    """
    (state,) = flags(state=state)
    if groups is not None and not isinstance(groups, Mapping):
        raise ConfigError(f"groups must be a dict of each agent's group, got {type(groups).__name__}: {groups!r}")
    if wrappers is None or isinstance(wrappers, (list, tuple)):  # else `make_recipes` refuses them
        wrappers = [*(wrappers or ()), Adapter(groups, state)]
    return make_recipes(env, num_envs, env_kwargs, wrappers, resolve_foreign_id=resolve_foreign_id)


def with_torchrl(wrappers: Any) -> Any:
    """`wrappers`, and after them `from_torchrl`; what is no list of wrappers stays as it is."""
    return [*(wrappers or ()), from_torchrl] if wrappers is None or isinstance(wrappers, (list, tuple)) else wrappers


def from_torchrl(env: Any) -> Any:
    """A wrapper for recipes: an env of TorchRL as collectors step it; any other as it is."""
    if not is_torchrl(env):
        return env
    module, _, name = _OF_TORCHRL.partition(":")
    return getattr(importlib.import_module(module), name)(env)


def is_torchrl(env: Any) -> bool:
    """Returns whether `env` is of TorchRL, by its class's methods: TorchRL need not be installed."""
    return hasattr(type(env), "full_action_spec") and hasattr(type(env), "rand_step")


def _require(env: Any, names: tuple[str, ...]) -> None:
    if missing := [name for name in names if not hasattr(env, name)]:
        raise RecipeError(
            f"the factory returned an object of type {type_name(env)}, which has no {' and no '.join(missing)}. "
            "Expected an env of Gymnasium, PettingZoo or dm_env"
        )
