"""Ways straight to an env, past wrappers around it that only check, count or announce its steps.

Such wrappers take a third of a step of simple_spread, a fifth of multiwalker's and commons_harvest's, 6 % of
CartPole's. They stay in place: resets, calls and attributes go through them as ever, and so does a step whose actions
they would not let pass. See docs/adr/0008-shortcuts.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from gymnasium import spaces

from muster._core import Unchanged
from muster.envs.known_wrappers import is_known
from muster.spec import Array, Space

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
# From the outermost to the one that rebuilds Lab2D for each episode.
_SUBSTRATE_WRAPPERS = (
    "meltingpot.utils.substrates.substrate.Substrate",
    "meltingpot.utils.substrates.wrappers.collective_reward_wrapper.CollectiveRewardWrapper",
    "meltingpot.utils.substrates.wrappers.discrete_action_wrapper.Wrapper",
    "meltingpot.utils.substrates.wrappers.multiplayer_wrapper.Wrapper",
    "meltingpot.utils.substrates.wrappers.observables_wrapper.ObservablesWrapper",
    "meltingpot.utils.substrates.wrappers.reset_wrapper.ResetWrapper",
)
_LAB2D = "dmlab2d.Environment"
_SUBJECTS = ("_action_subject", "_timestep_subject", "_events_subject")
_COLLECTIVE_REWARD = "COLLECTIVE_REWARD"

# How often an env's wrappers are looked at that change all the time, before they are stepped as they are.
_MOST_LOOKS = 100

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


class _Past(ABC):
    """Knows a way past an env's wrappers as long as they are what they were when it looked at them."""

    def __init__(self, env: Any) -> None:
        self._env: Any = None
        self._unchanged: Unchanged | None = None
        self._looks_left = 0
        # The first look reads what the wrappers say, which takes some ms: not in a step.
        self._knows(env)

    def _knows(self, env: Any) -> bool:
        """Whether there is a way past the wrappers of `env`, which `_look` has noted."""
        if env is not self._env:
            self._env, self._looks_left = env, _MOST_LOOKS
        elif self._unchanged is None or self._unchanged.holds():
            return self._unchanged is not None
        looked_at = self._look(env) if self._looks_left else ()
        self._looks_left -= 1
        self._unchanged = Unchanged(looked_at) if looked_at else None
        return self._unchanged is not None

    def let_go(self) -> None:
        """Keeps nothing of the env alive, and looks again when it is next asked."""
        self._env = self._unchanged = None

    @abstractmethod
    def _look(self, env: Any) -> LookedAt:
        """Notes the way. Returns what has to stay as it is; nothing if there is no way."""


class PastChecks(_Past):
    """To the turn-based env inside PettingZoo's wrappers that enforce order and bounds, if it is in any.

    Every read of an env's attribute goes through each of them, in Python, dozens of times a step.

    action_spaces: by group.
    """

    def __init__(self, env: Any, action_spaces: Mapping[str, Space]) -> None:
        # A single number is an array only to some of them. What is discrete has been checked by the caller.
        self._boxes = [(name, space) for name, space in action_spaces.items() if isinstance(space, spaces.Box)]
        self._knows_bounds = all(
            isinstance(space, spaces.Discrete) or (isinstance(space, spaces.Box) and space.shape)
            for space in action_spaces.values()
        )
        super().__init__(env)

    def reach(self, env: Any) -> Any:
        """The turn-based env inside `env`; `env` itself where a wrapper might do more than check."""
        return self._inner if self._knows(env) else env

    def reach_with(self, env: Any, actions: Mapping[str, Any]) -> Any:
        """The same, for a step with actions ``[A, ...]`` by group; `env` is to clip or refuse those out of bounds."""
        return self._inner if self._knows(env) and self._let_pass(actions) else env

    def step_parallel(self, env: Any, actions: Mapping[str, Any], chosen: Mapping[Any, Any]) -> Any:
        """``env.step(chosen)`` of a parallel env, which may be PettingZoo's own around a turn-based one.

        actions, chosen: the same by group and by agent.
        """
        if not (self._knows(env) and self._let_pass(actions)):
            return env.step(chosen)
        wrapped, inner = env.aec_env, self._inner
        try:
            env.aec_env = inner
            return env.step(chosen)
        finally:
            if env.aec_env is inner:
                env.aec_env = wrapped

    def _look(self, env: Any) -> LookedAt:
        looked_at: list[tuple[Any, str, Any]] = []
        if is_known(env, _AEC_TO_PARALLEL):
            looked_at.append((env, "aec_env", env.aec_env))
            env = env.aec_env
        wrapped = env
        self._enforcing = []
        while any(is_known(env, name) for name in _AEC_CHECKS) and not _OF_THE_ENV & {*vars(env), *dir(type(env))}:
            if is_known(env, _AEC_ORDER_ENFORCING):
                self._enforcing.append(env)
            looked_at.append((env, "env", env.env))
            env = env.env
        self._inner = env
        # The wrappers do not hand `last` on, they have it from their base class.
        same_last = getattr(type(env), "last", None) is getattr(type(wrapped), "last", None)
        passes = env is not wrapped and self._knows_bounds and same_last and "last" not in vars(env)
        return tuple(looked_at) if passes else ()

    def _let_pass(self, actions: Mapping[str, Any]) -> bool:
        """Whether the wrappers would leave these actions alone; if so, they have seen a step."""
        for name, box in self._boxes:
            action = actions[name]
            if not ((box.low <= action) & (action <= box.high)).all():
                return False
        for one in self._enforcing:
            one._has_updated = True
        return True


class PastSubstrate(_Past):
    """Past the wrappers of a Melting Pot substrate: makes the players' timesteps of Lab2D's own in one go."""

    _lab2d: _ToLab2D | None = None

    def begin_episode(self) -> None:
        """A reset is to build Lab2D anew: the last one, which takes memory and ms to free, is not to outlive it."""
        if self._lab2d is not None:
            self._lab2d.let_go()

    def step(self, env: Any, actions: Sequence[int]) -> Any:
        """``env.step(actions)`` of any env of many players: its own unless it is a substrate that nobody listens to."""
        if not self._knows(env) or any(subject.observers for subject in self._subjects):
            return env.step(actions)
        assert self._lab2d is not None
        timestep = self._lab2d.step(self._rebuilding._env, actions)
        source = timestep.observation
        rewards = [source.get(name) for name in self._rewards]
        shared = {_COLLECTIVE_REWARD: np.sum(rewards)} | {name: source[name] for name in self._shared}
        return timestep._replace(
            reward=rewards,
            discount=0.0 if timestep.discount is None else timestep.discount,
            observation=[{key: source[name] for key, name in own if name in source} | shared for own in self._own],
        )

    def _look(self, env: Any) -> LookedAt:
        wrappers = []
        for name in _SUBSTRATE_WRAPPERS:
            if not is_known(env, name):
                return ()
            wrappers.append(env)
            env = env._env
        substrate, _, to_actions, to_players, to_observables, self._rebuilding = wrappers
        self._subjects = [getattr(one, name) for one in (substrate, to_observables) for name in _SUBJECTS]
        num_players = to_players._num_players
        numbers = range(1, num_players + 1)
        self._lab2d = _ToLab2D(env, to_actions._action_table, num_players)
        self._rewards = [f"{i}.REWARD" for i in numbers]
        self._own = [[(key, f"{i}.{key}") for key in to_players._individual_observation_suffixes] for i in numbers]
        self._shared = tuple(to_players._global_observation_names)
        read = [(wrapper, "_env") for wrapper in wrappers[:-1]] + [(self._rebuilding, "_rebuild_environment")]
        read += [(one, name) for one in (substrate, to_observables) for name in _SUBJECTS]
        read += [(to_actions, "_action_table"), (to_players, "_num_players")]
        read += [(to_players, "_individual_observation_suffixes"), (to_players, "_global_observation_names")]
        return tuple((one, name, getattr(one, name)) for one, name in read)


class _ToLab2D(_Past):
    """Past the names of actions: Lab2D looks up 3 of each player, one by one, in every step.

    table: what the actions of all players stand for, numbers by name.
    """

    def __init__(self, env: Any, table: Sequence[Mapping[str, Any]], num_players: int) -> None:
        self._table = table
        self._players = range(1, num_players + 1)
        self._named = [
            [{f"{i}.{key}": value for key, value in action.items()} for action in table] for i in self._players
        ]
        super().__init__(env)

    def step(self, env: Any, actions: Sequence[int]) -> Any:
        """The next timestep of a `dmlab2d.Environment`."""
        if not self._knows(env):
            chosen: dict[str, Any] = {}
            for named, action in zip(self._named, actions, strict=True):
                chosen.update(named[action])
            return env.step(chosen)
        try:
            env._read_action = self._write
            return env.step(self._numbers[actions])
        finally:
            vars(env).pop("_read_action", None)

    def _write(self, spec: Any, numbers: Array) -> None:
        """In place of Lab2D's `_read_action`.  numbers: int32 ``[players, keys]``."""
        self._act_discrete[self._places] = numbers

    def _look(self, env: Any) -> LookedAt:
        keys = list(self._table[0])
        if not is_known(env, _LAB2D) or any(action.keys() != self._table[0].keys() for action in self._table):
            return ()
        specs = [[env._action_spec.get(f"{i}.{key}") for key in keys] for i in self._players]
        if any(spec is None or spec.dtype != np.int32 for row in specs for spec in row):
            return ()
        self._act_discrete = env._act_discrete
        self._places = np.array([[env._act_discrete_map[spec.name] for spec in row] for row in specs])
        self._numbers = np.array([[action[key] for key in keys] for action in self._table], np.int32)
        return ((env, "_act_discrete", env._act_discrete),)
