"""Which agents form a group."""

from __future__ import annotations

import numpy as np
import pytest
from gymnasium import spaces

from muster.envs.groups import group_agents, group_name, sorted_space
from muster.errors import SpecMismatch

SMALL, LARGE = spaces.Box(-1, 1, (2,), np.float32), spaces.Box(-1, 1, (3,), np.float32)
TWO, THREE = spaces.Discrete(2), spaces.Discrete(3)


def grouped(agents, obs=SMALL, act=TWO, groups=None):
    obs_of = {agent: obs[agent] if isinstance(obs, dict) else obs for agent in agents}
    act_of = {agent: act[agent] if isinstance(act, dict) else act for agent in agents}
    return group_agents(agents, obs_of, act_of, groups)


@pytest.mark.parametrize(
    ("agent", "name"),
    [
        ("walker_0", "walker"),
        ("lead_adversary_12", "lead_adversary"),
        ("player1", "player"),
        ("red.3", "red"),
        ("a_1_2", "a_1"),
        ("alice", "agents"),
        ("0", "agents"),
        (7, "agents"),
        ("", "agents"),
        ("shared_0", "shared_agents"),
    ],
)
def test_an_agents_kind_is_what_stands_before_its_number(agent, name) -> None:
    assert group_name(agent) == name


def test_groups_are_sorted_and_agents_keep_their_order() -> None:
    agents = ["wolf_1", "sheep_0", "wolf_0", "sheep_1"]
    assert grouped(agents) == {"sheep": ("sheep_0", "sheep_1"), "wolf": ("wolf_1", "wolf_0")}
    assert list(grouped(agents)) == ["sheep", "wolf"]


def test_agents_of_one_name_with_unequal_spaces_are_split() -> None:
    agents = ["a_0", "a_1", "a_2", "a_3"]
    assert grouped(agents, obs=dict(zip(agents, [SMALL, LARGE, SMALL, LARGE], strict=True))) == {
        "a_a": ("a_0", "a_2"),
        "a_b": ("a_1", "a_3"),
    }
    assert list(grouped(agents, act=dict(zip(agents, [TWO, TWO, THREE, TWO], strict=True)))) == ["a_a", "a_b"]


def test_groups_can_be_given() -> None:
    agents = ["a_0", "b_0", "c_0"]
    assert grouped(agents, groups={"a_0": "us", "b_0": "them", "c_0": "us"}) == {"them": ("b_0",), "us": ("a_0", "c_0")}


@pytest.mark.parametrize("groups", [{"a_0": "us"}, {"a_0": "us", "b_0": "shared"}, {"a_0": "us", "b_0": 3}])
def test_given_groups_must_name_a_group_for_every_agent(groups) -> None:
    with pytest.raises(ValueError, match="'b_0' is"):
        grouped(["a_0", "b_0"], groups=groups)


def test_given_groups_must_not_mix_spaces() -> None:
    with pytest.raises(SpecMismatch, match="'a_0' and 'b_0' into group 'us', but their action spaces differ"):
        grouped(["a_0", "b_0"], act={"a_0": TWO, "b_0": THREE}, groups={"a_0": "us", "b_0": "us"})


def test_dict_keys_are_sorted_at_every_depth() -> None:
    space = spaces.Dict([("z", TWO), ("a", spaces.Dict([("y", TWO), ("b", THREE)]))])
    assert [*sorted_space(space).spaces, *sorted_space(space)["a"].spaces] == ["a", "z", "b", "y"]


def test_the_parts_of_a_split_group_take_no_other_groups_name() -> None:
    agents = ["x_0", "x_1", "x_a_0", "x_c_0"]
    assert grouped(agents, obs=dict(zip(agents, [SMALL, LARGE, SMALL, SMALL], strict=True))) == {
        "x_a": ("x_a_0",),
        "x_b": ("x_0",),
        "x_c": ("x_c_0",),
        "x_d": ("x_1",),
    }
