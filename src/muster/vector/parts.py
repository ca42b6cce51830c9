"""The parts that make a vector env; its spaces, made from those of its envs, which have to agree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_differing_spaces, batch_space

from muster.backends.base import Backend
from muster.backends.recovery import Recovery
from muster.envs.layout import layout_difference
from muster.errors import SpecMismatch
from muster.hosts.env_facts import EnvFacts
from muster.pool.limits import Limits
from muster.spaces.tree import Space, SpaceNode
from muster.transport.infos import InfoReader
from muster.vector.action_writers import ActionWriter
from muster.vector.checks import require_agreement
from muster.vector.raisers import Raiser
from muster.vector.replaying import Replaying


@dataclass(frozen=True)
class BatchedSpaces:
    """The spaces of one env (``single_...``), and of all envs, ``[N, ...]``."""

    single_observation: Space
    single_action: Space
    observation: Space
    action: Space


@dataclass(frozen=True)
class Parts:
    """The parts in which one kind of vector env differs from another.

    spaces: makes the vector env's spaces from those of its envs; raises SpecMismatch for an env that does not agree.
    trees: makes the trees of one env's observations and actions.
    writer: makes the object that writes the actions that the core does not write.
    raiser: raises the exception for envs that failed.
    lenient: whether other libraries' vector envs are followed in what they take: envs may be stepped before their
        first reset, and rewards and flags be whatever numbers and bools can be made of.
    reward_key: the key of the infos that have an env's reward of several numbers; None where it is an error.
    raise_closed: raises the ClosedError for a call after `close`, where its words are not Muster's own.
    """

    spaces: Callable[[Sequence[EnvFacts]], BatchedSpaces]
    trees: Callable[[EnvFacts, BatchedSpaces], tuple[SpaceNode, SpaceNode]]
    writer: Callable[..., ActionWriter]
    raiser: Raiser
    lenient: bool
    reward_key: str | None = None
    raise_closed: Callable[[], NoReturn] | None = None


@dataclass(frozen=True)
class SteppingOptions:
    """The options of one vector env's stepping. max_restarts: None where a failure is an error at once.

    limits: of a vector env that recycles its workers.  replayable: whether its envs have states, see `EnvState`.
    replays: whether failed steps are played again.
    """

    autoreset_mode: AutoresetMode
    copy: bool = True
    check_finite: bool = False
    max_restarts: int | None = None
    caller_steps: bool = False
    limits: Limits | None = None
    replayable: bool = False
    replays: bool = False


@dataclass(frozen=True)
class Assembled:
    """The parts of one vector env, put together by `assemble`. facts: those of env 0."""

    backend: Backend
    parts: Parts
    options: SteppingOptions
    facts: EnvFacts
    spaces: BatchedSpaces
    writer: ActionWriter
    info_reader: InfoReader
    recovery: Recovery | None
    replaying: Replaying | None = None


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
