"""Ways straight to an env, past wrappers around it that only check, count or announce its steps.

Such wrappers take a third of a step of simple_spread, a fifth of multiwalker's and commons_harvest's, 6 % of
CartPole's. They stay in place: resets, calls and attributes go through them as ever, and so does a step whose actions
they would not let pass. See docs/adr/0008-shortcuts.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from muster._core import Unchanged
from muster.envs.known_wrappers import is_known
from muster.spec import Space

_TIME_LIMIT = "gymnasium.wrappers.common.TimeLimit"
_ORDER_ENFORCING = "gymnasium.wrappers.common.OrderEnforcing"
_PASSIVE_CHECKER = "gymnasium.wrappers.common.PassiveEnvChecker"
_AEC_TO_PARALLEL = "pettingzoo.utils.conversions.aec_to_parallel_wrapper"
_AEC_ORDER_ENFORCING = "pettingzoo.utils.wrappers.order_enforcing.OrderEnforcingWrapper"
_AEC_CHECKS = (
    _AEC_ORDER_ENFORCING,
    "pettingzoo.utils.wrappers.assert_out_of_bounds.AssertOutOfBoundsWrapper",
    "pettingzoo.utils.wrappers.clip_out_of_bounds.ClipOutOfBoundsWrapper",
)
# What a PettingZoo wrapper would hand out in place of the env's, if it had it itself.
_OF_THE_ENV = {"agents", "agent_selection", "rewards", "terminations", "truncations", "infos", "_cumulative_rewards"}
# From the outermost to the one around Lab2D, which is rebuilt for each episode.
SUBSTRATE_WRAPPERS = (
    "meltingpot.utils.substrates.substrate.Substrate",
    "meltingpot.utils.substrates.wrappers.collective_reward_wrapper.CollectiveRewardWrapper",
    "meltingpot.utils.substrates.wrappers.discrete_action_wrapper.Wrapper",
    "meltingpot.utils.substrates.wrappers.multiplayer_wrapper.Wrapper",
    "meltingpot.utils.substrates.wrappers.observables_wrapper.ObservablesWrapper",
)
_SUBJECTS = ("_action_subject", "_timestep_subject", "_events_subject")
_COLLECTIVE_REWARD = "COLLECTIVE_REWARD"

# Instances, names of their attributes, and the values that these have to keep: what `Unchanged` watches over.
LookedAt = tuple[tuple[Any, str, Any], ...]


class Shortcut(NamedTuple):
    """To the env that a Gymnasium env steps in the end."""

    looked_at: LookedAt
    env: Any
    time_limit: Any  # the TimeLimit that is passed by, whose steps go on being counted; or None


def gymnasium_shortcut(env: Any) -> Shortcut | None:
    """Past the wrappers that `gymnasium.make` puts around an env; None if there is none, or some have yet to check."""
    looked_at: list[tuple[Any, str, Any]] = []
    time_limit = None
    while True:
        if time_limit is None and is_known(env, _TIME_LIMIT):
            time_limit = env
        elif is_known(env, _ORDER_ENFORCING):
            looked_at.append((env, "_has_reset", True))
        elif is_known(env, _PASSIVE_CHECKER):
            flags = [name for name in ("checked_step", "checked_data_reuse") if name in vars(env)]
            looked_at += [(env, name, True) for name in flags]
        else:
            break
        looked_at.append((env, "env", env.env))
        env = env.env
    if not looked_at or any(getattr(one, name) is not value for one, name, value in looked_at):
        return None
    return Shortcut(tuple(looked_at), env, time_limit)


class PastChecks:
    """To the turn-based env inside PettingZoo's wrappers that enforce order and bounds, if it is in any.

    Every read of an env's attribute goes through each of them, in Python, dozens of times a step.

    env: a turn-based env, or PettingZoo's parallel env around one.  action_spaces: by group.
    """

    def __init__(self, env: Any, action_spaces: Mapping[str, Space]) -> None:
        self._of = env
        # A single number is an array only to some of them. What is discrete has been checked by the caller.
        self._boxes = [(name, space) for name, space in action_spaces.items() if isinstance(space, spaces.Box)]
        self._knows_bounds = all(
            isinstance(space, spaces.Discrete) or (isinstance(space, spaces.Box) and space.shape)
            for space in action_spaces.values()
        )
        self._look()

    def _look(self) -> None:
        env, looked_at = self._of, []
        if is_known(env, _AEC_TO_PARALLEL):
            looked_at.append((env, "aec_env", env.aec_env))
            env = env.aec_env
        self.wrapped = env
        self._enforcing = []
        while any(is_known(env, name) for name in _AEC_CHECKS) and not _OF_THE_ENV & {*vars(env), *dir(type(env))}:
            if is_known(env, _AEC_ORDER_ENFORCING):
                self._enforcing.append(env)
            looked_at.append((env, "env", env.env))
            env = env.env
        # The wrappers do not hand `last` on, they have it from their base class.
        same_last = getattr(type(env), "last", None) is getattr(type(self.wrapped), "last", None)
        passes = self._knows_bounds and same_last and "last" not in vars(env)
        self._inner = env if passes else self.wrapped
        self._unchanged = Unchanged(tuple(looked_at)) if self._inner is not self.wrapped else None

    def reach(self) -> Any:
        """The env inside; `wrapped`, the outermost wrapper, where one might do more than check."""
        if self._unchanged is not None and not self._unchanged.holds():
            self._look()
        return self._inner

    def reach_with(self, actions: Mapping[str, Any]) -> Any:
        """The env to step with actions ``[A, ...]`` by group: `wrapped` is to clip or refuse those out of bounds."""
        inner = self.reach()
        if inner is self.wrapped:
            return inner
        for name, box in self._boxes:
            action = actions[name]
            if not ((box.low <= action) & (action <= box.high)).all():
                return self.wrapped
        for one in self._enforcing:
            one._has_updated = True
        return inner


def is_made_of_turns(env: Any) -> bool:
    """Whether `env` is PettingZoo's own parallel env around a turn-based one."""
    return is_known(env, _AEC_TO_PARALLEL)


class PastSubstrate:
    """Past the wrappers of a Melting Pot substrate: makes the players' timesteps of Lab2D's own in one go.

    For any other env of many players, and while somebody listens to the substrate, its own `step`.
    """

    def __init__(self, env: Any) -> None:
        self._env = env
        self._look()

    def _look(self) -> None:
        self._unchanged: Unchanged | None = None
        wrapper, wrappers = self._env, []
        for name in SUBSTRATE_WRAPPERS:
            if not is_known(wrapper, name):
                return
            wrappers.append(wrapper)
            wrapper = wrapper._env
        substrate, _, choosing, splitting, announcing = wrappers
        read = [(wrapper, "_env") for wrapper in wrappers]
        read += [(one, name) for one in (substrate, announcing) for name in _SUBJECTS]
        read += [(choosing, "_action_table"), (splitting, "_num_players")]
        read += [(splitting, "_individual_observation_suffixes"), (splitting, "_global_observation_names")]
        self._unchanged = Unchanged(tuple((one, name, getattr(one, name)) for one, name in read))
        self._lab2d = wrapper
        self._subjects = [getattr(one, name) for one in (substrate, announcing) for name in _SUBJECTS]
        numbers = range(1, splitting._num_players + 1)
        self._actions = [
            [{f"{i}.{key}": value for key, value in action.items()} for action in choosing._action_table]
            for i in numbers
        ]
        self._rewards = [f"{i}.REWARD" for i in numbers]
        self._own = [[(key, f"{i}.{key}") for key in splitting._individual_observation_suffixes] for i in numbers]
        self._shared = tuple(splitting._global_observation_names)

    def step(self, actions: Sequence[int]) -> Any:
        """The env's next timestep."""
        if self._unchanged is not None and not self._unchanged.holds():
            self._look()
        if self._unchanged is None or any(subject.observers for subject in self._subjects):
            return self._env.step(actions)
        chosen: dict[str, Any] = {}
        for table, action in zip(self._actions, actions, strict=True):
            chosen.update(table[action])
        timestep = self._lab2d.step(chosen)
        source = timestep.observation
        rewards = [source.get(name) for name in self._rewards]
        shared = {_COLLECTIVE_REWARD: np.sum(rewards)} | {name: source[name] for name in self._shared}
        return timestep._replace(
            reward=rewards,
            discount=0.0 if timestep.discount is None else timestep.discount,
            observation=[{key: source[name] for key, name in own if name in source} | shared for own in self._own],
        )
