"""What agents' rows hold where envs say more, less or something else than usual."""

from __future__ import annotations

import functools
import types
from typing import Any, ClassVar

import dm_env
import numpy as np
import pytest
from agent_envs import Turns
from dm_env import specs
from gymnasium import spaces

import muster
from muster.errors import EnvError, SpecMismatch

ACTIONS = {"player": np.ones((1, 2), np.int32)}


class Players:
    """A dm_env env of two players with int32 actions, which it checks. `keys`: what players are shown."""

    def __init__(self, *keys: str, extra: tuple[str, ...] = (), mapping: Any = dict) -> None:
        self.keys, self.shown, self.mapping, self.t = keys, (*keys, *extra), mapping, 0

    def action_spec(self) -> Any:
        return [specs.DiscreteArray(3), specs.DiscreteArray(3)]

    def observation_spec(self) -> Any:
        known = {
            "x": specs.Array((2,), np.float32, "x"),
            "WORLD.RGB": specs.Array((2, 2, 3), np.uint8, "world"),
            "action_mask": specs.BoundedArray((3,), np.int8, 0, 1),
        }
        return [{key: known[key] for key in self.keys}] * 2

    def _observation(self) -> Any:
        told = {
            "x": np.full(2, self.t, np.float32),
            "WORLD.RGB": np.full((2, 2, 3), self.t, np.uint8),
            "action_mask": np.array([1, 0, 1], np.int8),
        }
        return tuple(self.mapping({key: told[key] for key in self.shown}) for _ in range(2))

    def reset(self) -> Any:
        self.t = 0
        return dm_env.TimeStep(dm_env.StepType.FIRST, None, None, self._observation())

    def step(self, actions: Any) -> Any:
        for spec, action in zip(self.action_spec(), actions, strict=True):
            spec.validate(action)
        self.t += 1
        return dm_env.TimeStep(dm_env.StepType.MID, (1.0, np.array(0.5)), 1.0, self._observation())

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    "make",
    [
        functools.partial(Players, "x"),
        functools.partial(Players, "x", "WORLD.RGB"),
        functools.partial(Players, "x", extra=("WORLD.RGB",)),
        functools.partial(Players, "x", "WORLD.RGB", mapping=types.MappingProxyType),
    ],
    ids=["plain", "shared", "more than its spec says", "no dicts"],
)
def test_players_of_any_env_of_lists(make: Any) -> None:
    with muster.make_vec(make, backend="serial") as envs:
        envs.reset(seed=0)
        obs, rewards, *_ = envs.step(ACTIONS)
        assert obs["player"]["x"].tolist() == [[[1, 1], [1, 1]]]
        assert rewards["player"].tolist() == [[1, 0.5]]
        if "WORLD.RGB" in make.args:
            assert obs["shared"]["WORLD.RGB"][0, 0, 0].tolist() == [1, 1, 1]
            assert envs.render()[0].tolist() == obs["shared"]["WORLD.RGB"][0].tolist()


def test_players_masks_become_infos() -> None:
    with muster.make_vec(lambda: Players("x", "WORLD.RGB", "action_mask")) as envs:
        _, infos = envs.reset(seed=0)
        assert infos["action_mask"]["player"].tolist() == [[[True, False, True]] * 2]


class Boards:
    """A parallel env of two agents with masks in their observations. Ends silently, or goes on showing the dead."""

    metadata: ClassVar[dict[str, Any]] = {"name": "boards"}
    render_mode = None

    def __init__(self, shows_the_dead: bool) -> None:
        self.possible_agents = ["a_0", "a_1"]
        self.shows_the_dead = shows_the_dead

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Dict({"observation": spaces.Box(-9, 9, (1,)), "action_mask": spaces.Box(0, 1, (3,), np.int8)})

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(3)

    def _shown(self, agents: list[str]) -> dict[str, Any]:
        one = {"observation": np.array([self.t], np.float32), "action_mask": np.array([1, 0, 0], np.int8)}
        return dict.fromkeys(agents, one)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.t, self.agents = 0, list(self.possible_agents)
        return self._shown(self.agents), {}

    def step(self, actions: dict[str, Any]) -> Any:
        self.t += 1
        before = self.agents
        if self.shows_the_dead:
            self.agents = ["a_0"]
            shown = self._shown(self.possible_agents)
        else:
            self.agents = [] if self.t == 2 else before
            shown = self._shown(self.agents)
        rewards, ends = dict.fromkeys(before, 1.0), {agent: agent not in self.agents for agent in before}
        return shown, rewards, ends, dict.fromkeys(before, False), {}

    def close(self) -> None:
        pass


def test_agents_that_end_unseen_keep_their_last_mask_and_dead_ones_have_none() -> None:
    actions = {"a": np.zeros((1, 2), np.int64)}
    with muster.make_vec(lambda: Boards(shows_the_dead=False), 1, backend="serial") as envs:
        envs.reset(seed=0)
        envs.step(actions)
        obs, *_, infos = envs.step(actions)
        assert obs["a"].tolist() == [[[1], [1]]]
        assert infos["agent_terminated"]["a"].all()
        assert infos["action_mask"]["a"].tolist() == [[[True, False, False]] * 2]
    with muster.make_vec(lambda: Boards(shows_the_dead=True), 1, backend="serial") as envs:
        envs.reset(seed=0)
        envs.step(actions)
        *_, infos = envs.step(actions)
        assert infos["alive"]["a"].tolist() == [[True, False]]
        assert infos["action_mask"]["a"].tolist() == [[[True, False, False], [True, True, True]]]


class Returning(Turns):
    """An agent that has ended is there again at once."""

    def step(self, action: Any) -> None:
        agent = self.agent_selection
        super().step(action)
        if action is None and not self.agents.count(agent):
            self.agents.append(agent)
            self.turns[agent], self.owed[agent], self.agent_selection = 0, 0.0, agent


def test_an_agent_that_ends_and_returns_within_one_turn_has_ended_with_its_reward() -> None:
    with muster.make_vec(Returning, 1, backend="serial") as envs:
        envs.reset(seed=0)
        rewards_at_ends = []
        for _ in range(8):
            _, rewards, *_, infos = envs.step({"p": np.zeros((1, 3, 1), np.float32)})
            assert infos["acting"]["p"].sum() == 1
            if infos["agent_terminated"]["p"][0].tolist() == [True, False, False]:
                rewards_at_ends.append(rewards["p"][0, 0])
        assert rewards_at_ends[0] == 2  # one for each turn of the two others


class OverAtOnce(Turns):
    """All have ended when its episode begins."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> None:
        super().reset(seed, options)
        self.turns = dict.fromkeys(self.agents, 9)


def test_an_env_of_turns_that_ends_with_its_reset_is_over_after_a_step() -> None:
    with muster.make_vec(OverAtOnce, 1, backend="serial") as envs:
        _, infos = envs.reset(seed=0)
        assert not infos["acting"]["p"].any()
        over = [envs.step({"p": np.zeros((1, 3, 1), np.float32)})[2].item() for _ in range(3)]
        assert over == [True, False, True]


class FromBefore(Turns):
    def last(self, observe: bool = True) -> Any:
        obs, reward, terminated, truncated, info = super().last(observe)
        return obs, reward, terminated or truncated, info


def test_a_last_of_four_values_is_told() -> None:
    told = r"last\(\) must return \(observation, reward, .*got \(array"
    with muster.make_vec(FromBefore, 1, backend="serial") as envs, pytest.raises(SpecMismatch, match=told):
        envs.reset(seed=0)


class Twins(Turns):
    def __init__(self) -> None:
        super().__init__()
        self.possible_agents = [*self.possible_agents, self.possible_agents[0]]


def test_agents_of_one_name_are_refused() -> None:
    with pytest.raises(SpecMismatch, match="more than once in its possible_agents"):
        muster.make_vec(Twins, 1, backend="serial")


class Alike(Turns):
    """Shows all agents one array, in a tuple within a dict."""

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Dict({"x": spaces.Tuple([super().observation_space(agent)])})

    def observe(self, agent: str) -> Any:
        return {"x": (super().observe(agent),)}


def test_agents_that_are_shown_one_array_in_turn_each_keep_what_they_saw() -> None:
    with muster.make_vec(Alike, 1, backend="serial") as envs:
        obs, _ = envs.reset(seed=0)
        assert obs["p"]["x"][0].tolist() == [[[0, 0], [0, 1], [0, 2]]]


class HalfBlind(Turns):
    def observe(self, agent: str) -> Any:
        return None if agent == "p_1" else super().observe(agent)


def test_agents_that_are_shown_none_in_turn_have_zeros() -> None:
    with muster.make_vec(HalfBlind, 1, backend="serial") as envs:
        obs, _ = envs.reset(seed=0)
        assert obs["p"].tolist() == [[[0, 0], [0, 0], [0, 2]]]
        obs, *_ = envs.step({"p": np.ones((1, 3, 1), np.float32)})
        assert obs["p"].tolist() == [[[1, 0], [0, 0], [1, 2]]]


class Judged(Players):
    """It ends with its first step, with a discount for each player."""

    def __init__(self, *discounts: float) -> None:
        super().__init__("x")
        self.discounts = list(discounts)

    def step(self, actions: Any) -> Any:
        return super().step(actions)._replace(step_type=dm_env.StepType.LAST, discount=self.discounts)


@pytest.mark.parametrize(("discounts", "terminates"), [((0.0, 0.0), True), ((0.0, 1.0), False)])
def test_players_have_ended_for_good_if_no_discount_is_left(discounts: tuple[float, ...], terminates: bool) -> None:
    with muster.make_vec(functools.partial(Judged, *discounts), 1, backend="serial") as envs:
        envs.reset(seed=0)
        _, _, terminated, truncated, infos = envs.step(ACTIONS)
        assert (terminated.tolist(), truncated.tolist()) == ([terminates], [not terminates])
        assert ("discount" in infos) == (not terminates)


class Lives(Players):
    """Step t has the t-th of the `discounts`: one for both players, or one for each. The last one ends the episode."""

    def __init__(self, *discounts: Any) -> None:
        super().__init__("x")
        self.discounts = discounts

    def step(self, actions: Any) -> Any:
        kind = dm_env.StepType.LAST if self.t + 1 == len(self.discounts) else dm_env.StepType.MID
        return super().step(actions)._replace(step_type=kind, discount=self.discounts[self.t - 1])


@pytest.mark.parametrize("mode", ["disabled", "same_step"])
@pytest.mark.parametrize("groups", [None, {"player_0": "b", "player_1": "a"}])
def test_players_discounts_are_reported_where_the_flags_do_not_tell_them(groups: Any, mode: str) -> None:
    told = [1.0, 0.0, [0.5, 1.0], (1.0, 1.0), None, np.array([None, 0]), np.float32(1), np.array(0.25), [0.75, 1.0]]
    expected = {1: (0, 0), 2: (0.5, 1), 5: (1, 0), 7: (0.25, 0.25), 8: (0.75, 1)}
    options = {"backend": "serial", "autoreset_mode": mode, "groups": groups}
    with muster.make_vec(functools.partial(Lives, *told), 2, **options) as envs:
        envs.reset(seed=0)
        for t in range(len(told)):
            *_, infos = envs.step({name: np.ones((2, len(agents)), np.int32) for name, agents in envs.groups.items()})
            infos = infos.get("final_info", infos)
            assert ("discount" in infos) == (t in expected), t
            for agent, discount in zip(("player_0", "player_1"), expected.get(t, ()), strict=t in expected):
                group = groups[agent] if groups else "player"
                column = infos["discount"][group][:, envs.groups[group].index(agent)]
                assert (column.dtype, column.tolist()) == (np.float64, [discount] * 2)


class Unrewarded(Boards):
    def step(self, actions: dict[str, Any]) -> Any:
        obs, rewards, *rest = super().step(actions)
        return (obs, dict.fromkeys(rewards, None), *rest)


def test_a_reward_of_none_is_an_error_and_no_nan() -> None:
    with muster.make_vec(lambda: Unrewarded(shows_the_dead=False), 1, backend="serial") as envs:
        envs.reset(seed=0)
        with pytest.raises(EnvError, match="the reward of .* is None, expected a number"):
            envs.step({"a": np.zeros((1, 2), np.int64)})
