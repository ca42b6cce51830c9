"""The spaces of a vector env, made from those of its envs, and the properties in which the envs have to agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gymnasium.vector.utils import batch_differing_spaces, batch_space

from muster.envs.layout import layout_difference
from muster.errors import SpecMismatch
from muster.hosts.env_facts import EnvFacts
from muster.spaces.tree import Space
from muster.vector.checks import require_agreement


@dataclass(frozen=True)
class BatchedSpaces:
    """The spaces of one env (``single_...``), and of all envs, ``[N, ...]``."""

    single_observation: Space
    single_action: Space
    observation: Space
    action: Space


def equal_spaces(facts: Sequence[EnvFacts], *, bounds: bool = True) -> BatchedSpaces:
    """The spaces of envs that agree in them. Raises SpecMismatch for the first env that differs from env 0.

    bounds: whether those of observations have to be equal, too.
    """
    first, observations = facts[0], [one.observation_space for one in facts]
    require_agreement(observations, [one.action_space for one in facts], bounds=bounds)
    batched = batch_space(first.observation_space, len(facts)) if bounds else batch_differing_spaces(observations)
    return BatchedSpaces(
        first.observation_space, first.action_space, batched, batch_space(first.action_space, len(facts))
    )


def first_envs_spaces(facts: Sequence[EnvFacts]) -> BatchedSpaces:
    """The spaces of env 0, used for all envs.

    Bounds may differ; an env with another layout could not be stored, so it raises SpecMismatch.
    """
    observations, actions = [one.observation_space for one in facts], [one.action_space for one in facts]
    require_agreement(observations, actions, bounds=False, action_bounds=False)
    return equal_spaces([facts[0]] * len(facts))


def agents_spaces(rest: Callable[[Sequence[EnvFacts]], BatchedSpaces], facts: Sequence[EnvFacts]) -> BatchedSpaces:
    """The spaces of multi-agent envs, made by `rest`. Raises SpecMismatch where the agents, or other parts, differ."""
    for env, other in enumerate(facts[1:], 1):
        if found := layout_difference(facts[0].agents, other.agents):
            raise SpecMismatch(f"env {env} differs from env 0: {found}", env_index=env)
    return rest(facts)
