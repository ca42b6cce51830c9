"""Ways straight to an env, past wrappers around it that only check, count or announce its steps.

Such wrappers, and the observations that they have made for nobody, take half of a step of pistonball, two fifths of
simple_spread's, a fifth of multiwalker's and commons_harvest's, 6 % of CartPole's. They stay in place: resets, calls
and attributes go through them as ever, and so does a step whose actions they would not let pass. See
docs/adr/0008-shortcuts.md.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from gymnasium import spaces

from muster._core import Unchanged
from muster.envs.known_classes import OBSERVERS, is_known
from muster.introspection import type_name
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
_LAB2D_ENGINE = "dmlab2d.dmlab2d_pybind.Lab2d"
_SUBJECTS = ("_action_subject", "_timestep_subject", "_events_subject")
_COLLECTIVE_REWARD = "COLLECTIVE_REWARD"

# How often an env is looked at that changes within its episodes, before it is stepped as it is.
_MOST_LOOKS = 100

# Instances, names of their attributes, and the values that these have to keep, or None and None: what `Unchanged`
# watches over.
LookedAt = tuple[tuple[Any, str | None, Any], ...]
Way = TypeVar("Way")


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


class _Past(ABC, Generic[Way]):
    """Knows a way past an env's wrappers as long as they are what they were when it looked at them."""

    def __init__(self) -> None:
        self._env: Any = None
        self._way: Way | None = None
        self._unchanged: Unchanged | None = None
        self._looks_left = 0

    def way(self, env: Any) -> Way | None:
        """What `_look` says of the way past the wrappers of `env`; None if there is none."""
        if env is not self._env:
            self._env, self._looks_left = env, _MOST_LOOKS
        elif self._unchanged is None or self._unchanged.holds():
            return self._way
        self._way = self._unchanged = None
        if self._looks_left:
            self._looks_left -= 1
            looked_at, way = self._look(env)
            if looked_at:
                self._way, self._unchanged = way, Unchanged(looked_at)
        return self._way

    def begin_episode(self) -> None:
        """What a reset makes anew is looked at again, also after hundreds of resets."""
        self._looks_left = max(self._looks_left, 1)

    def let_go(self) -> None:
        """Keeps nothing of the env alive, and looks again when it is next asked."""
        self._env = self._way = self._unchanged = None

    @abstractmethod
    def _look(self, env: Any) -> tuple[LookedAt, Way | None]:
        """Returns what has to stay as it is, and the way; nothing at all if there is no way."""


class _PastChecks(NamedTuple):
    inner: Any  # the turn-based env
    enforcing: Sequence[Any]  # the wrappers that are to know that there was a step
    unseen_last: Callable[..., Any] | None  # its `last`, without an observation by default; None if it has to observe


class PastChecks(_Past[_PastChecks]):
    """To the turn-based env inside PettingZoo's wrappers that enforce order and bounds, if it is in any.

    Every read of an env's attribute goes through each of them, in Python, dozens of times a step. And the converter
    that makes a parallel env of it has each agent observe once more in every step, and drops what it is shown.

    action_spaces: by group.
    """

    def __init__(self, env: Any, action_spaces: Mapping[str, Space]) -> None:
        super().__init__()
        # A single number is an array only to some of them. What is discrete has been checked by the caller.
        self._boxes = [(name, space) for name, space in action_spaces.items() if isinstance(space, spaces.Box)]
        self._knows_bounds = all(
            isinstance(space, spaces.Discrete) or (isinstance(space, spaces.Box) and space.shape)
            for space in action_spaces.values()
        )
        self.way(env)  # reads what the wrappers say, which takes some ms: not in a step

    def reach(self, env: Any) -> Any:
        """The turn-based env inside `env`; `env` itself where a wrapper might do more than check."""
        way = self.way(env)
        return env if way is None else way.inner

    def reach_with(self, env: Any, actions: Mapping[str, Any]) -> Any:
        """The same, for a step with actions ``[A, ...]`` by group: `env` is to clip or refuse those out of bounds."""
        way = self.way(env)
        return env if way is None or not self._let_pass(way, actions) else way.inner

    def step_parallel(self, env: Any, actions: Mapping[str, Any], chosen: Mapping[Any, Any]) -> Any:
        """``env.step(chosen)`` of a parallel env, which may be PettingZoo's own around a turn-based one.

        actions, chosen: the same by group and by agent.
        """
        way = self.way(env)
        if way is None or not self._let_pass(way, actions):
            return env.step(chosen)
        wrapped, inner, own = env.aec_env, way.inner, vars(way.inner)
        try:
            env.aec_env = inner
            if way.unseen_last is not None:
                own["last"] = way.unseen_last
            return env.step(chosen)
        finally:  # without a call, behind which Ctrl-C might come
            if env.aec_env is inner:
                env.aec_env = wrapped
            if "last" in own and own["last"] is way.unseen_last:
                del own["last"]

    def _let_pass(self, way: _PastChecks, actions: Mapping[str, Any]) -> bool:
        """Whether the wrappers would leave these actions alone; if so, they have seen a step."""
        for name, box in self._boxes:
            action = actions[name]
            if not ((box.low <= action) & (action <= box.high)).all():
                return False
        for one in way.enforcing:
            one._has_updated = True
        return True

    def _look(self, env: Any) -> tuple[LookedAt, _PastChecks | None]:
        looked_at: list[tuple[Any, str | None, Any]] = []
        converted = is_known(env, _AEC_TO_PARALLEL)
        if converted:
            looked_at.append((env, "aec_env", env.aec_env))
            env = env.aec_env
        wrapped, enforcing = env, []
        while any(is_known(env, name) for name in _AEC_CHECKS) and not _OF_THE_ENV & {*vars(env), *dir(type(env))}:
            if is_known(env, _AEC_ORDER_ENFORCING):
                enforcing.append(env)
            looked_at.append((env, "env", env.env))
            env = env.env
        # The wrappers do not hand `last` on, they have it from their base class.
        same_last = getattr(type(env), "last", None) is getattr(type(wrapped), "last", None)
        if env is wrapped or not self._knows_bounds or not same_last or "last" in vars(env):
            return (), None
        observing = _observing(env) if converted else ()
        return (*looked_at, *observing), _PastChecks(env, enforcing, _unseen_last(env) if observing else None)


def _unseen_last(env: Any) -> Callable[..., Any]:
    last = type(env).last
    return lambda observe=False: last(env, observe)


def _observing(env: Any) -> LookedAt:
    """What has to stay as it is for an `observe` of this turn-based env to change nothing; empty if it may do so."""
    name = type_name(env)
    if name not in OBSERVERS or not is_known(env, name):
        return ()
    asked = OBSERVERS[name]
    if asked is None:
        return ((env, None, None),)
    attribute, its_class = asked
    observer = getattr(env, attribute)
    return ((env, attribute, observer), (observer, None, None)) if is_known(observer, its_class) else ()


class _PastSubstrate(NamedTuple):
    rebuilding: Any  # the wrapper that holds Lab2D, another one in every episode
    subjects: Sequence[Any]  # whoever listens to them has to be told of a step
    to_lab2d: _ToLab2D
    rewards: Sequence[str]  # names of Lab2D's observations, by player
    own: Sequence[Sequence[tuple[str, str]]]  # the same of what a player sees: (its name there, Lab2D's name)
    shared: Sequence[str]


class PastSubstrate(_Past[_PastSubstrate]):
    """Past the wrappers of a Melting Pot substrate: makes the players' timesteps of Lab2D's own in one go."""

    def __init__(self, env: Any) -> None:
        super().__init__()
        self.way(env)  # reads what the wrappers say, which takes some ms: not in a step

    def begin_episode(self) -> None:
        """A reset is to build Lab2D anew: the last one, which takes memory and ms to free, is not to outlive it."""
        super().begin_episode()
        if self._way is not None:
            self._way.to_lab2d.let_go()

    def step(self, env: Any, actions: Sequence[int]) -> Any:
        """``env.step(actions)`` of any env of many players: its own unless it is a substrate that nobody listens to."""
        way = self.way(env)
        if way is None or any(subject.observers for subject in way.subjects):
            return env.step(actions)
        timestep = way.to_lab2d.step(way.rebuilding._env, actions)
        if timestep is None:
            return env.step(actions)
        source = timestep.observation
        rewards = [source.get(name) for name in way.rewards]
        shared = {_COLLECTIVE_REWARD: np.sum(rewards)} | {name: source[name] for name in way.shared}
        return timestep._replace(
            reward=rewards,
            discount=0.0 if timestep.discount is None else timestep.discount,
            observation=[{key: source[name] for key, name in own if name in source} | shared for own in way.own],
        )

    def _look(self, env: Any) -> tuple[LookedAt, _PastSubstrate | None]:
        wrappers = []
        for name in _SUBSTRATE_WRAPPERS:
            if not is_known(env, name):
                return (), None
            wrappers.append(env)
            env = env._env
        substrate, _, to_actions, to_players, to_observables, rebuilding = wrappers
        numbers = range(1, to_players._num_players + 1)
        rewards = [f"{i}.REWARD" for i in numbers]
        own = [[(key, f"{i}.{key}") for key in to_players._individual_observation_suffixes] for i in numbers]
        shared = tuple(to_players._global_observation_names)
        needed = {*rewards, *shared, *(name for names in own for _, name in names)}
        to_lab2d = _ToLab2D(to_actions._action_table, to_players._num_players, needed)
        to_lab2d.way(env)
        subjects = [getattr(one, name) for one in (substrate, to_observables) for name in _SUBJECTS]
        way = _PastSubstrate(rebuilding, subjects, to_lab2d, rewards, own, shared)
        read = [(wrapper, "_env") for wrapper in wrappers[:-1]] + [(rebuilding, "_rebuild_environment")]
        read += [(one, name) for one in (substrate, to_observables) for name in _SUBJECTS]
        read += [(to_actions, "_action_table"), (to_players, "_num_players")]
        read += [(to_players, "_individual_observation_suffixes"), (to_players, "_global_observation_names")]
        return tuple((one, name, getattr(one, name)) for one, name in read), way


class _LeanStep(NamedTuple):
    act_discrete: Array  # where Lab2D keeps what was chosen
    places: Array  # in it, int [players, keys]
    numbers: Array  # for them, int32 [actions, keys]
    all_names: Sequence[str]  # of Lab2D's observations
    needed_names: Sequence[str]


class _ToLab2D(_Past[_LeanStep]):
    """Past what Lab2D does by name in every step: it looks up 3 actions of each player, one by one, and makes all its
    observations, also those that a substrate shows to nobody.

    table: what the actions of all players stand for, numbers by name.  needed: names of the observations to be made.
    """

    def __init__(self, table: Sequence[Mapping[str, Any]], num_players: int, needed: Collection[str]) -> None:
        super().__init__()
        self._table = table
        self._players = range(1, num_players + 1)
        self._needed = needed

    def step(self, lab2d: Any, actions: Sequence[int]) -> Any:
        """Lab2D's timestep, with the observations that are needed; None where it has to be stepped as ever."""
        way = self.way(lab2d)
        if way is None:
            return None
        way.act_discrete[way.places] = way.numbers[actions]
        try:
            lab2d._obs_names = way.needed_names
            return lab2d.step({})  # it takes the actions that it is not given from where they were just written
        finally:
            if lab2d._obs_names is way.needed_names:  # else the step has set its own
                lab2d._obs_names = way.all_names

    def _look(self, env: Any) -> tuple[LookedAt, _LeanStep | None]:
        keys = list(self._table[0])
        if not is_known(env, _LAB2D) or any(action.keys() != self._table[0].keys() for action in self._table):
            return (), None
        # Whatever else makes the observations may count them, or make one of another.
        if type_name(env._env) != _LAB2D_ENGINE:
            return (), None
        specs = [[env._action_spec.get(f"{i}.{key}") for key in keys] for i in self._players]
        if any(spec is None or spec.dtype != np.int32 for row in specs for spec in row):
            return (), None
        places = np.array([[env._act_discrete_map[spec.name] for spec in row] for row in specs])
        numbers = np.array([[action[key] for key in keys] for action in self._table], np.int32)
        needed_names = [name for name in env._obs_names if name in self._needed]
        looked_at = tuple((env, name, getattr(env, name)) for name in ("_env", "_act_discrete", "_obs_names"))
        return looked_at, _LeanStep(env._act_discrete, places, numbers, env._obs_names, needed_names)
