"""The spaces of Gymnasium's vector envs: which sub-environments agree, and the exceptions for those that do not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gymnasium import spaces
from gymnasium.vector.utils import batch_differing_spaces, batch_space, create_shared_memory

from muster.errors import ConfigError
from muster.hosts.env_facts import EnvFacts
from muster.spaces.compare import first_difference
from muster.vector.parts import BatchedSpaces

ObservationMode = str | tuple[spaces.Space[Any], spaces.Space[Any]]
# The messages for sub-environments that differ: in observation spaces that must be equal, in observation spaces that
# must have the same shape and dtype, and in action spaces.
Complaints = tuple[str, str, str]

SYNC_COMPLAINTS: Complaints = (
    "SyncVectorEnv(..., observation_mode='same') however the sub-environments observation spaces are not "
    "equivalent. If this is intentional, use `observation_mode='different'` instead.",
    "SyncVectorEnv(..., observation_mode='different' or custom space) however the sub-environments observation "
    "spaces do not share a common shape and dtype.",
    "Sub-environment action space doesn't make the `single_action_space`.",
)
ASYNC_COMPLAINTS: Complaints = (
    "AsyncVectorEnv(..., observation_mode='same') however some of the sub-environments observation spaces are not "
    "equivalent. If this is intentional, use `observation_mode='different'` instead.",
    "AsyncVectorEnv(..., observation_mode='different' or custom space) however the sub-environment's observation "
    "spaces do not share a common shape and dtype.",
    "Some environments have an action space different from `single_action_space`. In order to batch actions, the "
    "action spaces from all environments must be equal.",
)


def agreed_spaces(mode: ObservationMode, complaints: Complaints, facts: Sequence[EnvFacts]) -> BatchedSpaces:
    """The spaces of Gymnasium's classes. Raises their exceptions, with `complaints`, for an env that does not agree."""
    first = facts[0]
    single = first.observation_space
    if isinstance(mode, tuple) and len(mode) == 2:
        if not all(isinstance(space, spaces.Space) for space in mode):
            raise TypeError(
                f"Expected both elements of observation_mode to be Spaces, got {type(mode[0])} and {type(mode[1])}"
            )
        observations, single = mode
    elif mode == "same":
        observations = batch_space(single, len(facts))
    elif mode == "different":
        observations = batch_differing_spaces([one.observation_space for one in facts])
    else:
        raise ValueError(
            "Invalid `observation_mode`, expected: 'same' or 'different' or tuple of single and batch observation "
            f"space, actual got {mode}"
        )
    same, fitting, actions = complaints
    for env, one in enumerate(facts):
        got = one.observation_space
        suffix = f" Sub-environment {env} has {got}, expected {single}."
        if mode == "same" and got != single:
            raise RuntimeError(same + suffix)
        if first_difference(single, got, "observation", bounds=False):
            raise RuntimeError(fitting + suffix)
        if one.action_space != first.action_space:
            raise RuntimeError(
                f"{actions} Sub-environment {env} has {one.action_space}, expected {first.action_space}."
            )
    return BatchedSpaces(single, first.action_space, observations, batch_space(first.action_space, len(facts)))


def shareable_spaces(mode: ObservationMode, complaints: Complaints, facts: Sequence[EnvFacts]) -> BatchedSpaces:
    """The spaces that `agreed_spaces` returns. Raises ConfigError for custom ones: shared memory cannot hold them."""
    agreed = agreed_spaces(mode, complaints, facts)
    if _is_custom(agreed.single_observation):
        raise ConfigError(
            f"the observation space {agreed.single_observation} is none of Gymnasium's: pass "
            "`shared_memory=False` to have observations pickled"
        )
    return agreed


def _is_custom(space: spaces.Space[Any]) -> bool:
    if isinstance(space, spaces.Dict):
        return any(_is_custom(child) for child in space.values())
    if isinstance(space, (spaces.Tuple, spaces.OneOf)):
        return any(_is_custom(child) for child in space.spaces)
    # Gymnasium's function for spaces that it does not know is the one for any object.
    return create_shared_memory.dispatch(type(space)) is create_shared_memory.dispatch(object)
