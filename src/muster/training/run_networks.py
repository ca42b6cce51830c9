"""The networks of a run, made from its config and its checkpoint, without its envs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium.spaces import flatdim

from muster.algorithms.actor_critic import Network
from muster.algorithms.encoder import ObservationNormalizer
from muster.algorithms.mappo import normalizers_of, policies_of, teams_of
from muster.algorithms.on_policy import OnPolicy, TrainingSpaces
from muster.algorithms.own_network import policy_of
from muster.algorithms.ppo_config import MAPPOConfig, PPOConfig
from muster.algorithms.teams import Networks
from muster.errors import ConfigError, RunConfigError, UsageError
from muster.nn.shared_copies import shared_copy
from muster.spaces.plain import from_plain, to_plain
from muster.training.checkpoints import read_checkpoint
from muster.training.plan import TrainingPlan, plan_of
from muster.training.run_folder import CHECKPOINT, read_config, reading, require_room

SPACES = ("observations", "actions")  # among what `plain_of` has


def plain_of(facts: TrainingSpaces) -> dict[str, Any]:
    """The facts of an algorithm's envs as JSON has them, for `facts_in`."""
    if not facts.groups:
        return {"observations": to_plain(facts.observation_space), "actions": to_plain(facts.action_space)}
    return {
        "groups": {group: list(map(str, agents)) for group, agents in facts.groups.items()},
        "observations": {group: to_plain(space) for group, space in facts.observation_space.items()},
        "actions": {group: to_plain(space) for group, space in facts.action_space.items()},
        "state": None if facts.state_space is None else to_plain(facts.state_space),
    }


def facts_in(run: Path, config: PPOConfig) -> TrainingSpaces:
    """The facts of the run's envs. Raises UsageError, also where no memory holds networks for them."""
    path, kept = run / "config.json", read_config(run).get("spaces")
    if not isinstance(kept, Mapping) or not {"observations", "actions"} <= kept.keys():
        raise UsageError(f"{path} says nothing of spaces, as that of no run of this version of Muster.")
    try:
        if isinstance(config, MAPPOConfig):
            facts = _facts_of_agents(kept)
        else:
            facts = TrainingSpaces(from_plain(kept["observations"]), from_plain(kept["actions"]), None)
    except UsageError as error:
        raise RunConfigError(f"{path}: {error}") from None
    _require_room(path, config, facts)
    return facts


def networks_in(state: Mapping[str, Any], facts: TrainingSpaces, plan: TrainingPlan) -> Network | Networks:
    """The networks with the weights and statistics of a checkpoint; of one that was handed over, a copy."""
    config, own = plan.config, plan.network
    own = shared_copy(own, {}).cpu() if isinstance(own, torch.nn.Module) else own  # it may hold a lock, or a socket
    if isinstance(config, MAPPOConfig):
        policies = policies_of(facts, config, np.random.SeedSequence(0), own)
        normalizers = normalizers_of(facts, config)
        for name, policy in policies.items():
            policy.eval().load_state_dict(state["teams"][name]["policy"])
        for name, normalizer in normalizers.items():
            normalizer.load(state["normalizers"][name])
        return Networks.of(teams_of(facts, config), policies, normalizers)
    network = policy_of(config, facts.observation_space, facts.action_space, torch.Generator(), own)
    network.eval().load_state_dict(state["policy"])
    if not config.normalize_observations:
        return Network(network, None)
    statistics = ObservationNormalizer(facts.observation_space)
    statistics.load(state["normalizers"]["observations"])
    return Network(network, statistics)


def adopt(algorithm: OnPolicy[Any], run: Path) -> list[str]:
    """Has the algorithm begin as `OnPolicy.adopt` says, with the newest state of ``run``, and returns what that does.

    Raises ConfigError where nothing fits, and for other spaces; only the bounds of Boxes and the agents may be others.
    """
    try:
        facts, state = facts_in(run, plan_of(run).config), read_checkpoint(run)
        both = (algorithm.facts, facts)
        own, other = (_layout({name: plain_of(of)[name] for name in SPACES}) for of in both)
        if own != other:
            here, there = (" ".join(f"{of.observation_space} and {of.action_space}".split()) for of in both)
            raise ConfigError("init_from", f"a run of the spaces {here}", f"{run}, of {there}")
        with reading(run / CHECKPOINT):
            return algorithm.adopt(state)
    except UsageError as error:
        raise ConfigError(f"init_from: {error}") from None


def _layout(plain: Any) -> Any:
    """The descriptions of spaces without the bounds of their Boxes."""
    if not isinstance(plain, Mapping):
        return plain
    left_out = ("low", "high") if plain.get("kind") == "Box" else ()
    return {name: _layout(part) for name, part in plain.items() if name not in left_out}


def _facts_of_agents(kept: Mapping[str, Any]) -> TrainingSpaces:
    groups, seen, acts, state = (kept.get(name) or {} for name in ("groups", "observations", "actions", "state"))
    named = isinstance(groups, dict) and all(isinstance(one, list) and one for one in groups.values()) and groups
    if not named or not all(isinstance(agent, str) for agents in groups.values() for agent in agents):
        raise UsageError("its groups are to be lists of the names of agents")
    if not all(isinstance(of, dict) and of.keys() == groups.keys() for of in (seen, acts)):
        raise UsageError("each of its groups of agents is to have an observation space and an action space")
    observations, actions = ({group: from_plain(space) for group, space in of.items()} for of in (seen, acts))
    return TrainingSpaces(observations, actions, None, groups, from_plain(state) if state else None)


def _require_room(path: Path, config: PPOConfig, facts: TrainingSpaces) -> None:
    """Raises RunConfigError where no memory holds the networks."""
    groups = facts.groups or {"": ("",)}
    seen, acts = (of if facts.groups else {"": of} for of in (facts.observation_space, facts.action_space))
    judged = 0  # what a critic sees that sees more than its agent
    if isinstance(config, MAPPOConfig) and config.critic == "centralised":
        of_all = sum(len(agents) * flatdim(seen[group]) for group, agents in groups.items())
        judged = of_all if facts.state_space is None else flatdim(facts.state_space)
    memory, size = config.memory_size if config.policy == "gru" else 0, 0
    for group, agents in groups.items():
        inputs, outputs = flatdim(seen[group]), flatdim(acts[group])
        widths = (max(memory or inputs, judged), *config.hidden_sizes, outputs)
        weights = 2 * sum(of * to for of, to in itertools.pairwise(widths)) + 3 * memory * (inputs + memory)
        count = 1 if isinstance(config, MAPPOConfig) and config.shares_params(group) else len(agents)
        # Layers are objects of 20 KB; and there are the bounds of the spaces.
        size += count * (4 * weights + 20_000 * len(widths)) + 40 * (inputs + outputs)
    require_room(path, size)
