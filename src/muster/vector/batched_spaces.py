"""The spaces of a vector env, made of its envs' spaces: who has to agree in what."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gymnasium.vector.utils import batch_differing_spaces, batch_space

from muster.envs.layout import layout_difference
from muster.errors import SpecMismatch
from muster.spaces.tree import Space
from muster.vector.checks import require_agreement
from muster.workers.env_facts import EnvFacts


@dataclass(frozen=True)
class BatchedSpaces:
    """Of one env (single_...) and of all, ``[N, ...]``."""

    single_observation: Space
    single_action: Space
    observation: Space
    action: Space


def equal_spaces(facts: Sequence[EnvFacts]) -> BatchedSpaces:
    """Spaces of envs that agree in all. Raises SpecMismatch for the first that differs from env 0."""
    return _agreed(facts, "same")


def alike_spaces(facts: Sequence[EnvFacts]) -> BatchedSpaces:
    """Spaces of envs whose observations may have bounds of their own. Raises SpecMismatch."""
    return _agreed(facts, "different")


def first_envs_spaces(facts: Sequence[EnvFacts]) -> BatchedSpaces:
    """Env 0's spaces for all: bounds may differ, a different layout could not be stored. Raises SpecMismatch."""
    observations, actions = [one.observation_space for one in facts], [one.action_space for one in facts]
    require_agreement(observations, actions, bounds=False, action_bounds=False)
    return _agreed([facts[0]] * len(facts), "same")


def agents_spaces(rest: Callable[[Sequence[EnvFacts]], BatchedSpaces], facts: Sequence[EnvFacts]) -> BatchedSpaces:
    """Spaces of multi-agent envs that agree in their agents, and in the `rest`. Raises SpecMismatch."""
    for env, other in enumerate(facts[1:], 1):
        if found := layout_difference(facts[0].agents, other.agents):
            raise SpecMismatch(f"env {env} differs from env 0: {found}", env_index=env)
    return rest(facts)


def _agreed(facts: Sequence[EnvFacts], observation_mode: str) -> BatchedSpaces:
    first, observations = facts[0], [one.observation_space for one in facts]
    require_agreement(observations, [one.action_space for one in facts], bounds=observation_mode == "same")
    if observation_mode == "same":
        batched = batch_space(first.observation_space, len(facts))
    else:
        batched = batch_differing_spaces(observations)
    return BatchedSpaces(
        first.observation_space, first.action_space, batched, batch_space(first.action_space, len(facts))
    )
