"""The dicts by agent that parallel envs return: wrong keys are errors that name them, and no zeros."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
from agent_envs import Masked, Script, Turns, ones
from gymnasium import spaces

import muster
from muster.errors import SpecMismatch

DICTS = ("observations", "rewards", "terminations", "truncations", "infos")
EVERY = ("red_0", "red_1", "blue_0")
Told = dict[str, dict[Any, Any]]
Change = Callable[[dict[str, Any]], dict[Any, Any]]


class Team:
    """A parallel env of two kinds of agents that all end with step 3: terminated, or truncated.

    edit: changes what ``reset`` and each step say, and the env, which are its arguments.
    """

    metadata: ClassVar[dict[str, Any]] = {"name": "team"}
    render_mode = None

    def __init__(self, edit: Callable[[Team, Told], None] = lambda env, told: None, cut: bool = False) -> None:
        self.possible_agents, self.edit, self.cut = list(EVERY), edit, cut

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Box(-100, 100, (1,), np.float32)

    def action_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Discrete(3)

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.t, self.agents = 0, list(EVERY)
        return self._edited({"observations": self._seen(), "infos": {agent: {} for agent in EVERY}})

    def step(self, actions: dict[str, Any]) -> Any:
        self.t += 1
        there, over = self.agents, self.t == 3
        values = (self._seen(), *(dict.fromkeys(there, one) for one in (1.0, over, over, {})))
        told = dict(zip(DICTS, values, strict=True))
        told["terminations" if self.cut else "truncations"] = dict.fromkeys(there, False)
        self.agents = [] if over else there
        return self._edited(told)

    def close(self) -> None:
        pass

    def _seen(self) -> dict[str, Any]:
        return {agent: np.full(1, self.t + 1, np.float32) for agent in self.agents}

    def _edited(self, told: Told) -> Any:
        self.edit(self, told)
        return tuple(told.values())


def by_index(told: dict[str, Any]) -> dict[Any, Any]:
    return dict(enumerate(told.values()))


def by_group(told: dict[str, Any]) -> dict[Any, Any]:
    return {agent.split("_")[0]: one for agent, one in told.items()}


def misspelt(told: dict[str, Any]) -> dict[Any, Any]:
    return {"red_01" if agent == "red_1" else agent: one for agent, one in told.items()}


def one_missing(told: dict[str, Any]) -> dict[Any, Any]:
    return {agent: one for agent, one in told.items() if agent != "red_1"}


def empty(told: dict[str, Any]) -> dict[Any, Any]:
    return {}


NO_AGENT = {by_index: "0", by_group: "'red'", misspelt: "'red_01'"}
MISSING = {one_missing: "'red_1'", empty: "'red_0'"}


def changed(change: Change, *names: str, at_reset: bool = False) -> Callable[[Team, Told], None]:
    """An edit of the dicts `names` of each step, or of the reset."""

    def edit(env: Team, told: Told) -> None:
        if at_reset == (env.t == 0):
            told |= {name: change(told[name]) for name in names}

    return edit


def steps(edit: Callable[[Team, Told], None], count: int = 3, cut: bool = False) -> list[Any]:
    """What the steps of one env return."""
    with muster.make_vec(lambda: Team(edit, cut), 1, backend="serial", autoreset_mode="disabled") as envs:
        envs.reset(seed=0)
        actions = {group: np.zeros((1, len(agents)), np.int64) for group, agents in envs.groups.items()}
        return [envs.step(actions) for _ in range(count)]


@pytest.mark.parametrize("name", DICTS[:4])
@pytest.mark.parametrize("how", NO_AGENT)
def test_a_key_that_is_no_agent_is_named(name: str, how: Change) -> None:
    told = rf"env 0 \(worker 0, step 0\): step's {name} name {NO_AGENT[how]}, .*among \['blue_0', 'red_0', 'red_1'\]"
    with pytest.raises(SpecMismatch, match=told):
        steps(changed(how, name))


@pytest.mark.parametrize("how", MISSING)
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("observations", "step's observations have no entry for {}, which has a reward and goes on: expected the keys"),
        ("rewards", "step's rewards have no entry for {}, which acted: expected the keys"),
        ("terminations", "{} has left env.agents, but has not ended: expected True in step's terminations or"),
        ("truncations", "{} has left env.agents, but has not ended: expected True in step's terminations or"),
    ],
)
def test_an_agent_without_an_entry_is_named(name: str, told: str, how: Change) -> None:
    with pytest.raises(SpecMismatch, match=told.format(MISSING[how])):
        steps(changed(how, name), cut=name == "truncations")


@pytest.mark.parametrize("how", [*NO_AGENT, *MISSING])
def test_so_are_those_of_a_reset(how: Change) -> None:
    agent = NO_AGENT[how] if how in NO_AGENT else MISSING[how]
    told = f"reset's observations (name|have no entry for) {agent}, .*expected .*, got"
    with pytest.raises(SpecMismatch, match=told):
        steps(changed(how, "observations", at_reset=True))


def test_a_reset_that_shows_nobody_anything_is_an_error() -> None:
    with pytest.raises(SpecMismatch, match=r"any agent that is to act: .* \['red_0', 'red_1', 'blue_0'\], got \[\]"):
        steps(changed(empty, "observations", "infos", at_reset=True))
    with pytest.raises(SpecMismatch, match=r"env.agents, \[\], got \['red_0', 'red_1', 'blue_0'\]"):
        steps(lambda env, told: env.agents.clear())


def ending(*names: str, mourns: bool = False) -> Callable[[Team, Told], None]:
    """red_1 ends with the first step. names: the dicts that name it then.  mourns: it is shown something for ever."""

    def edit(env: Team, told: Told) -> None:
        if env.t == 1:
            env.agents = ["red_0", "blue_0"]
            told["terminations"]["red_1"] = True
            for name in set(DICTS) - {*names, "terminations"}:
                del told[name]["red_1"]
        if env.t and mourns:
            told["observations"] = dict.fromkeys(EVERY, np.zeros(1, np.float32)) | told["observations"]

    return edit


def test_one_that_ends_needs_a_reward_and_no_observation() -> None:
    obs, rewards, *_, infos = steps(ending("rewards"))[0]
    assert (obs["red"].tolist(), rewards["red"].tolist()) == ([[[2], [1]]], [[1, 1]])
    assert infos["agent_terminated"]["red"].tolist() == [[False, True]]
    with pytest.raises(SpecMismatch, match="step's rewards have no entry for 'red_1', which acted"):
        steps(ending("observations"))


def test_agents_that_are_gone_may_stay_in_the_dicts() -> None:
    *_, (_, _, terminated, truncated, infos) = steps(ending("rewards", mourns=True))
    assert infos["alive"]["red"].tolist() == [[True, False]]
    assert (terminated.tolist(), truncated.tolist()) == ([True], [False])


def test_the_warning_names_the_env_also_where_agents_leave_with_its_last_step() -> None:
    still = functools.partial(Script, ["a_0 a_1"] * 9)
    leaving = functools.partial(Script, ["a_0 a_1", "a_0"], {(1, "a_0"): "terminated"})
    with muster.make_vec([still, leaving], backend="serial", autoreset_mode="same_step") as envs:
        envs.reset(seed=0)
        envs.send(ones(1), [1])
        with pytest.warns(RuntimeWarning, match=r"env 1: \['a_1'\] left"):
            infos = envs.recv().infos
    assert "agents_away" not in infos | infos.get("final_info", {})


def pausing(listed: str = "infos", rewarded: bool = True) -> Callable[[Team, Told], None]:
    """red_1 is in no dict but the infos of steps 1 and 2; in step 3 it is shown something again.

    listed: a dict that names it in step 1 all the same.  rewarded: whether it has a reward in step 3.
    """

    def edit(env: Team, told: Told) -> None:
        if env.t == 0:
            return
        env.agents = list(EVERY)
        told["terminations"] = dict.fromkeys(EVERY, False)
        for name in DICTS[:4]:
            if env.t < 3 and not (env.t == 1 and name == listed):
                del told[name]["red_1"]
        if env.t == 3 and not rewarded:
            del told["rewards"]["red_1"]

    return edit


@pytest.mark.parametrize("rewarded", [True, False])
def test_agents_may_pause_and_come_back(rewarded: bool) -> None:
    _, second, third, fourth = steps(pausing(rewarded=rewarded), 4)
    assert second[4]["alive"]["red"].tolist() == second[4]["acting"]["red"].tolist() == [[True, False]]
    assert third[4]["acting"]["red"].tolist() == [[True, True]]
    assert third[1]["red"].tolist() == [[1, float(rewarded)]]
    assert fourth[0]["red"].tolist() == [[[5], [5]]]


@pytest.mark.parametrize(
    ("listed", "told"),
    [
        ("observations", "step's rewards have no entry for 'red_1', which acted"),
        ("rewards", "step's observations have no entry for 'red_1', which has a reward and goes on"),
        ("truncations", "step's rewards have no entry for 'red_1', which acted.*Leave an agent that pauses out of all"),
    ],
)
def test_one_that_pauses_is_left_out_of_all_dicts(listed: str, told: str) -> None:
    with pytest.raises(SpecMismatch, match=told):
        steps(pausing(listed))


def test_not_all_may_pause_at_once() -> None:
    with pytest.raises(SpecMismatch, match="step's observations have no entry for any agent that is to act"):
        steps(lambda env, told: told.update({name: {} for name in told} if env.t == 2 else {}))


def test_one_that_joins_needs_no_reward() -> None:
    def join(env: Team, told: Told) -> None:
        if env.t == 0:
            env.agents.remove("blue_0")
            told |= {"observations": env._seen(), "infos": {}}
        elif env.t == 1:
            env.agents = list(EVERY)
            told["observations"]["blue_0"] = np.full(1, 9, np.float32)

    first, *_ = steps(join)
    assert (first[0]["blue"].tolist(), first[1]["blue"].tolist()) == ([[[9]]], [[0]])
    assert first[4]["acting"]["blue"].tolist() == [[True]]


@pytest.mark.parametrize("cut", [False, True])
def test_all_may_end_with_one_entry(cut: bool) -> None:
    edit = changed(lambda told: {"__all__": all(told.values())}, "terminations", "truncations")
    *_, (_, rewards, terminated, truncated, infos) = steps(edit, cut=cut)
    assert (terminated.tolist(), truncated.tolist()) == ([not cut], [cut])
    assert rewards["red"].tolist() == [[1, 1]]
    assert infos["agent_truncated" if cut else "agent_terminated"]["red"].all()


@pytest.mark.parametrize("made", [collections.defaultdict(float, red_0=5.0), collections.Counter(red_0=5)])
def test_what_a_dict_makes_up_for_an_agent_counts(made: Any) -> None:
    *_, (_, rewards, terminated, _, _) = steps(changed(lambda told: made, "rewards"))
    assert (rewards["red"].tolist(), rewards["blue"].tolist(), terminated.tolist()) == ([[5, 0]], [[0]], [True])


REWARDED = {  # the dead red_1's reward of step 3, before and after the others', and in a dict that makes up others
    "first": lambda told: {"red_1": 7.5, **told},
    "last": lambda told: {**told, "red_1": np.float32(7.5)},
    "alone": lambda told: {"red_1": 7.5},
    "made up": lambda told: collections.defaultdict(float, {"red_1": 7.5}),
}


@pytest.mark.parametrize("how", [*REWARDED, "of 0", "of nobody yet"])
def test_a_reward_after_the_end_of_its_agent_is_named_unless_it_is_0(how: str) -> None:
    class Rewarded(Script):
        def step(self, actions: dict[str, Any]) -> Any:
            obs, rewards, *rest = super().step(actions)
            if self.t == 3:
                rewards = REWARDED.get(how, lambda told: {**told, "a_1": 0.0, "b_0": np.zeros(())})(rewards)
            return obs, {"a_1" if agent == "red_1" else agent: one for agent, one in rewards.items()}, *rest

    ends = dict.fromkeys([(2, "a_1"), (4, "a_0"), (4, "b_0")], "terminated")
    there = ["a_0 a_1 b_0", "a_0 a_1 b_0", "a_0 b_0", "a_0 b_0", ""]
    if how == "of nobody yet":
        ends, there = {}, ["a_0 b_0"] * 5
    make = functools.partial(Rewarded, there, ends)

    def play() -> None:
        with muster.make_vec(make, 1, backend="serial", autoreset_mode="disabled") as envs:
            envs.reset(seed=0)
            for _ in range(4):
                envs.step(ones(1))

    if how in REWARDED:
        with pytest.raises(SpecMismatch, match=r"env 0 .*step 2.*rewards give .*7\.5.* to 'a_1', .*has ended"):
            play()
    else:
        play()


class Blaming(Masked):
    """Gives a_0's info to nobody that exists, in the call `since` and later ones."""

    def __init__(self, since: int, key: str) -> None:
        super().__init__()
        self.since, self.key = since, key

    def _info(self, agent: str) -> dict[str, Any]:
        return {self.key: super()._info(agent)["action_mask"]}

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        obs, infos = super().reset(seed, options)
        return obs, self._blamed(infos)

    def step(self, actions: dict[str, Any]) -> Any:
        *rest, infos = super().step(actions)
        return (*rest, self._blamed(infos))

    def _blamed(self, infos: dict[str, Any]) -> dict[str, Any]:
        return infos if self.t < self.since else {"a" if key == "a_0" else key: one for key, one in infos.items()}


@pytest.mark.parametrize("since", [0, 1])
def test_a_mask_for_nobody_is_an_error_and_other_infos_are_kept(since: int) -> None:
    def play(key: str) -> Any:
        with muster.make_vec(functools.partial(Blaming, since, key), 1, backend="serial") as envs:
            envs.reset(seed=0)
            return envs.step(ones(1))[4]

    with pytest.raises(SpecMismatch, match=r"infos have an action mask for 'a', .*expected keys among .*, got \['a',"):
        play("action_mask")
    assert play("map")["agent_infos"]["a"]["map"].tolist() == [[0, 1, 1]]


class Leaving(Turns):
    """An env of turns that drops all agents with the fourth turn. ends: what it says of p_1 then, and of the others."""

    def __init__(self, *ends: bool) -> None:
        super().__init__()
        self.ends = ends

    def step(self, action: Any) -> None:
        super().step(action)
        first, rest = self.ends
        self.terminations, self.truncations = {"p_0": rest, "p_1": first, "p_2": rest}, {}
        self.rewards = self.owed
        if self.t == 4:
            self.agents = []


def test_agents_that_leave_an_env_of_turns_at_once_have_their_ends_and_rewards() -> None:
    with muster.make_vec(functools.partial(Leaving, True, True), 1, backend="serial") as envs:
        envs.reset(seed=0)
        for _ in range(4):
            obs, rewards, terminated, truncated, infos = envs.step({"p": np.zeros((1, 3, 1), np.float32)})
        assert (terminated.tolist(), truncated.tolist()) == ([True], [False])
        assert obs["p"].tolist() == [[[4, 0], [4, 1], [4, 2]]]
        assert rewards["p"].tolist() == [[0, 2, 1]]
        assert infos["agent_terminated"]["p"].all()
    with muster.make_vec(functools.partial(Leaving, False, True), 1, backend="serial") as envs:
        envs.reset(seed=0)
        with pytest.raises(SpecMismatch, match="'p_1' has left env.agents, but has not ended"):
            for _ in range(4):
                envs.step({"p": np.zeros((1, 3, 1), np.float32)})


class Won(Turns):
    """An env of turns in which p_0 ends first. told: what it says of p_0's reward at later turns. kept: at its end."""

    def __init__(self, name: str, told: float, kept: float) -> None:
        super().__init__()
        self.name, self.told, self.kept = name, told, kept

    def step(self, action: Any) -> None:
        ends = self.agent_selection == "p_0" and action is None
        super().step(action)
        there = {agent: self.owed[agent] for agent in self.agents}
        gone = {} if "p_0" in self.agents else {"p_0": self.kept if ends else self.told}
        setattr(self, self.name, {**there, **gone})


@pytest.mark.parametrize("name", ["rewards", "_cumulative_rewards"])
@pytest.mark.parametrize(("told", "kept"), [(10.0, 0.0), (12.0, 2.0), (0.0, 2.0), (2.0, 2.0)])
def test_a_reward_of_turns_after_the_end_is_named_unless_it_was_handed_over(
    name: str, told: float, kept: float
) -> None:
    with muster.make_vec(functools.partial(Won, name, told, kept), 1, backend="serial") as envs:
        envs.reset(seed=0)

        def play() -> float:
            return sum(float(envs.step({"p": np.zeros((1, 3, 1), np.float32)})[1]["p"][0, 0]) for _ in range(9))

        if told in (0.0, kept):
            play()
        else:
            with pytest.raises(SpecMismatch, match=rf"env 0 .*step \d+.*rewards give {told} to 'p_0'"):
                play()
