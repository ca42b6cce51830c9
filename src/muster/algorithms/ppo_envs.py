"""The envs of PPO: a vector env of the caller's, or those in collectors that PPO makes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import gymnasium as gym
import torch
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import VectorEnv

from muster.algorithms.encoder import MEASURED, kind_of, leaves_of
from muster.algorithms.ppo_config import MAPPOConfig, PPOConfig
from muster.errors import ConfigError, UsageError
from muster.rollout.collector import Collector
from muster.rollout.multi_collector import ENV_OPTIONS, MultiCollector, env_options
from muster.vector.make import make_vec
from muster.vector.multi_agent import MultiAgentVectorEnv

# What PPO leaves to the user of `MultiCollector`'s options; the first ones are those of `make_vec` for workers, too.
_OF_WORKERS = ("context", "start_timeout", "close_timeout")
OPTIONS = (
    *("num_collectors", "cluster", "make_vec_options", "on_failure", "max_restarts", *_OF_WORKERS),
    *("collect_timeout", "threads_per_collector", "preemptive_threshold"),
)
_INSTEAD = {
    "num_envs": "PPOConfig(num_envs=...)",
    "frames_per_batch": "PPOConfig(num_steps=...)",
    "total_frames": "PPOConfig(total_steps=...)",
    "seed": "PPOConfig(seed=...)",
    "episode_info": "PPOConfig(episode_info=...)",
    "policy": "PPO(policy=...)",
    "max_frames_per_traj": "gymnasium.wrappers.TimeLimit among the wrappers",
    "num_workers": "num_collectors",
    "threads_per_worker": "threads_per_collector",
    "step_timeout": "collect_timeout",
    **{name: f'"make_vec_options": {{"{name}": ...}}' for name in ENV_OPTIONS},
}


class TrainingSpaces(NamedTuple):
    """What PPO and MAPPO know of their envs, by one of them. Spaces are one agent's, of MAPPO's envs by group."""

    observation_space: Any
    action_space: Any
    spec: EnvSpec | None
    groups: Mapping[str, Sequence[Hashable]] = {}  # the agents of each
    state_space: gym.Space[Any] | None = None


def facts_of(envs: Any, config: PPOConfig, collectors: Mapping[str, Any] | None) -> TrainingSpaces:
    """The facts of envs; with `collectors` those of one that is made in a process of its own, and closed again.

    Raises UsageError for envs that PPO cannot train on, ConfigError for options that do not fit them, or are not PPO's.
    """
    if collectors is None:
        return _facts(envs, config, config.num_envs)
    require_options(collectors)
    options = env_options(collectors.get("make_vec_options"))
    if isinstance(changes := options.get("worker_env"), (list, tuple)):
        options["worker_env"] = changes[:1]
    options |= {name: collectors[name] for name in _OF_WORKERS if name in collectors}
    first = envs[:1] if isinstance(envs, (list, tuple)) else envs
    with closing(make_vec(first, 1, **{"state": True, **options})) as one:
        return _facts(one, config, 1)


def require_options(collectors: Mapping[str, Any]) -> None:
    """Raises ConfigError for options that PPO's collectors do not have, and without their number."""
    if not isinstance(collectors, Mapping) or "num_collectors" not in collectors:
        raise ConfigError('collectors: say how many there are to be, as in collectors={"num_collectors": 4}')
    for name in collectors:
        if name not in OPTIONS:
            instead = f"use {_INSTEAD[name]}" if name in _INSTEAD else f"leave it out. They have {', '.join(OPTIONS)}"
            raise ConfigError(f"collectors: PPO's collectors have no option {name!r}: {instead}")


def collector_over(
    envs: Any,
    explorer: Any,
    config: PPOConfig,
    device: torch.device,
    seed: int,
    collectors: Mapping[str, Any] | None,
) -> Collector | MultiCollector:
    """What collects PPO's rollouts, by an explorer that is the caller's own object, or by copies that follow it."""
    shared: dict[str, Any] = {"frames_per_batch": config.batch_size, "seed": seed, "compact": True}
    shared["episode_info"] = config.episode_info
    if device.type != "cpu":
        shared["device"] = device
    if collectors is None:
        return Collector(envs, explorer, **shared)
    return MultiCollector(envs, explorer, num_envs=config.num_envs, **shared, **collectors)


def _facts(envs: Any, config: PPOConfig, num_envs: int) -> TrainingSpaces:
    name, of_agents = ("MAPPO", True) if isinstance(config, MAPPOConfig) else ("PPO", False)
    if of_agents and not isinstance(envs, MultiAgentVectorEnv):
        raise UsageError(
            f"MAPPO trains several agents per env and needs a muster.MultiAgentVectorEnv, got {type(envs).__name__}. "
            "For one agent per env there is PPO."
        )
    if not of_agents and not isinstance(envs, VectorEnv):
        instead = " For several agents there is MAPPO." if isinstance(envs, MultiAgentVectorEnv) else ""
        raise UsageError(
            f"PPO trains one agent per env and needs a gymnasium VectorEnv, got {type(envs).__name__}.{instead}"
        )
    if envs.num_envs != num_envs:
        raise UsageError(
            f"envs has num_envs={envs.num_envs}, the config num_envs={num_envs}; "
            f"pass {name}Config(num_envs={envs.num_envs})."
        )
    spec = getattr(envs, "spec", None)
    if not isinstance(envs, MultiAgentVectorEnv):
        _require_fitting(config, envs.single_observation_space)
        return TrainingSpaces(envs.single_observation_space, envs.single_action_space, spec)
    seen, acts, groups = envs.single_observation_space.spaces, envs.single_action_space.spaces, envs.groups
    assert isinstance(config, MAPPOConfig)
    shared = config.share_params
    if unknown := [] if isinstance(shared, bool) else [name for name in shared if name not in groups]:
        raise ConfigError(f"share_params names {unknown}, and the envs have the groups {list(groups)}")
    _require_fitting(config, *(seen[group] for group in groups))
    return TrainingSpaces({g: seen[g] for g in groups}, {g: acts[g] for g in groups}, spec, groups, envs.state_space)


def _require_fitting(config: PPOConfig, *spaces: gym.Space[Any]) -> None:
    """Raises ConfigError where observations of codes or pixels are to be normalised, and for sprites without images."""
    leaves = [leaf for one in spaces for leaf in (leaves_of(one).values() if kind_of(one) == "mixed" else [one])]
    if config.sprite is not None and "images" not in map(kind_of, leaves):
        raise ConfigError("sprite", "left out where no observation is an image", config.sprite)
    for space in spaces if config.normalize_observations else ():
        if (kind := kind_of(space)) not in MEASURED:
            raise ConfigError(
                "normalize_observations is for measurements, such as positions and speeds: Boxes of floats, of large "
                f"whole numbers, and rows of bytes. This env observes {space}, which the policy reads as {kind}, in "
                "numbers of about 1 already. Leave it off."
            )
