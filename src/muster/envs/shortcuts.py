"""Ways straight to an env, past wrappers around it that only check, count or announce its steps.

Such wrappers take a third of a step of simple_spread, a fifth of multiwalker's and commons_harvest's, 6 % of
CartPole's. They stay in place: resets, calls and attributes go through them as ever, and so does a step that one of
them might not let pass. See docs/adr/0008-shortcuts.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from muster.envs.known_wrappers import is_known
from muster.spec import Space

_TIME_LIMIT = "gymnasium.wrappers.common.TimeLimit"
_ORDER_ENFORCING = "gymnasium.wrappers.common.OrderEnforcing"
_PASSIVE_CHECKER = "gymnasium.wrappers.common.PassiveEnvChecker"
_AEC_TO_PARALLEL = "pettingzoo.utils.conversions.aec_to_parallel_wrapper"
_PETTINGZOO_CHECKS = (
    "pettingzoo.utils.wrappers.order_enforcing.OrderEnforcingWrapper",
    "pettingzoo.utils.wrappers.assert_out_of_bounds.AssertOutOfBoundsWrapper",
    "pettingzoo.utils.wrappers.clip_out_of_bounds.ClipOutOfBoundsWrapper",
)
# What a PettingZoo wrapper would hand out in place of the env's, if it had it itself.
_OF_THE_ENV = {"agents", "agent_selection", "rewards", "terminations", "truncations", "infos", "_cumulative_rewards"}
# From the outermost to the one around Lab2D, which is rebuilt for each episode.
_SUBSTRATE_WRAPPERS = (
    "meltingpot.utils.substrates.substrate.Substrate",
    "meltingpot.utils.substrates.wrappers.collective_reward_wrapper.CollectiveRewardWrapper",
    "meltingpot.utils.substrates.wrappers.discrete_action_wrapper.Wrapper",
    "meltingpot.utils.substrates.wrappers.multiplayer_wrapper.Wrapper",
    "meltingpot.utils.substrates.wrappers.observables_wrapper.ObservablesWrapper",
)
_COLLECTIVE_REWARD = "COLLECTIVE_REWARD"


class Shortcut(NamedTuple):
    """To the env that a Gymnasium env steps in the end."""

    links: tuple[tuple[Any, Any], ...]  # wrappers that are passed by, each with the env in it when it was looked at
    env: Any
    time_limit: Any  # the TimeLimit among them, whose steps go on being counted; or None


def gymnasium_shortcut(env: Any) -> Shortcut | None:
    """Past the wrappers that `gymnasium.make` puts around an env; None if there is none, or some have yet to check."""
    links, time_limit = [], None
    while True:
        if time_limit is None and is_known(env, _TIME_LIMIT):
            time_limit = env
        elif is_known(env, _PASSIVE_CHECKER):
            if not (env.checked_step and getattr(env, "checked_data_reuse", True)):
                return None
        elif not (is_known(env, _ORDER_ENFORCING) and env._has_reset):
            break
        links.append((env, env.env))
        env = env.env
    return Shortcut(tuple(links), env, time_limit) if links else None


class PastChecks:
    """To the turn-based env inside PettingZoo's wrappers that enforce order and bounds.

    Every read of an env's attribute goes through each of them, in Python, dozens of times a step.
    """

    def __init__(self, wrapped: Any, action_spaces: Mapping[str, Space]) -> None:
        """action_spaces: by group."""
        self.wrapped = wrapped
        checked = all(isinstance(space, (spaces.Box, spaces.Discrete)) for space in action_spaces.values())
        self.env = _past_checks(wrapped) if checked else wrapped
        # What is discrete has been checked by the caller.
        self._boxes = [(name, space) for name, space in action_spaces.items() if isinstance(space, spaces.Box)]

    def let_pass(self, actions: Mapping[str, Any]) -> bool:
        """Whether the wrappers would leave alone what all agents do, ``[A, ...]`` by group."""
        for name, box in self._boxes:
            action = actions[name]
            if not ((box.low <= action) & (action <= box.high)).all():
                return False
        return True


def _past_checks(wrapped: Any) -> Any:
    inner = wrapped
    while any(is_known(inner, name) for name in _PETTINGZOO_CHECKS) and _OF_THE_ENV.isdisjoint(vars(inner)):
        inner = inner.env
    if inner is wrapped:
        return wrapped
    # The wrappers do not hand `last` on, they have it from their base class.
    same_last = getattr(type(inner), "last", None) is type(wrapped).last and "last" not in vars(inner)
    return inner if same_last else wrapped


def is_made_of_turns(env: Any) -> bool:
    """Whether `env` is PettingZoo's own parallel env around a turn-based one."""
    return is_known(env, _AEC_TO_PARALLEL)


def substrate_step(env: Any) -> Callable[[Sequence[int]], Any]:
    """The `step` of an env of many players, for a Melting Pot substrate without its wrappers."""
    wrapper, wrappers = env, []
    for name in _SUBSTRATE_WRAPPERS:
        if not is_known(wrapper, name):
            return env.step  # type: ignore[no-any-return]
        wrappers.append(wrapper)
        wrapper = wrapper._env
    substrate, _, choosing, splitting, announcing = wrappers
    return _PastSubstrate(substrate, choosing, splitting, announcing).step


class _PastSubstrate:
    """Makes the players' timesteps of Lab2D's own in one go, while nobody listens to the substrate."""

    def __init__(self, substrate: Any, choosing: Any, splitting: Any, announcing: Any) -> None:
        self._substrate = substrate
        self._lab2d = announcing._env
        self._subjects = [
            subject
            for one in (substrate, announcing)
            for subject in (one._action_subject, one._timestep_subject, one._events_subject)
        ]
        numbers = range(1, splitting._num_players + 1)
        self._actions = [
            [{f"{i}.{key}": value for key, value in action.items()} for action in choosing._action_table]
            for i in numbers
        ]
        self._rewards = [f"{i}.REWARD" for i in numbers]
        self._observations = [
            [(key, f"{i}.{key}") for key in splitting._individual_observation_suffixes]
            + [(key, key) for key in splitting._global_observation_names]
            for i in numbers
        ]

    def step(self, actions: Sequence[int]) -> Any:
        """As the substrate's own."""
        if any(subject.observers for subject in self._subjects):
            return self._substrate.step(actions)
        chosen: dict[str, Any] = {}
        for table, action in zip(self._actions, actions, strict=True):
            chosen.update(table[action])
        timestep = self._lab2d.step(chosen)
        source = timestep.observation
        rewards = [source.get(name) for name in self._rewards]
        total = np.sum(rewards)
        return timestep._replace(
            reward=rewards,
            discount=0.0 if timestep.discount is None else timestep.discount,
            observation=[
                {_COLLECTIVE_REWARD: total, **{key: source[name] for key, name in names if name in source}}
                for names in self._observations
            ],
        )
