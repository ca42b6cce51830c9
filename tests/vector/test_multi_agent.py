"""`MultiAgentVectorEnv`: the layout of agents, and the same verbs as for single agents.

What holds on every backend is tested by `MultiAgentBackendContract`.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agent_envs import Failing, Masked, Script, ones
from gymnasium import spaces

import muster
from muster.errors import ActionError, EnvError, SpecMismatch, WorkerError
from slow import slow


def test_an_env_is_terminated_if_nobody_was_truncated_on_the_way() -> None:
    ends = {(1, "a_0"): "terminated", (2, "b_0"): "terminated"}
    clean = functools.partial(Script, ["a_0 b_0", "b_0", ""], ends)
    cut = functools.partial(Script, ["a_0 b_0", "b_0", ""], ends | {(1, "a_0"): "truncated"})
    with muster.make_vec([clean, cut], backend="serial") as envs:
        envs.reset(seed=0)
        envs.step(ones(2))
        _, _, terminated, truncated, _ = envs.step(ones(2))
        assert terminated.tolist() == [True, False]
        assert truncated.tolist() == [False, True]


@pytest.mark.parametrize(
    ("space", "allowed", "wrong"),
    [
        (spaces.Dict({"m": spaces.MultiDiscrete([3, 3])}), {"m": np.zeros((1, 2, 2), int)}, {"m": [[[0, 0], [-1, 9]]]}),
        (spaces.Tuple([spaces.Discrete(2)]), (np.zeros((1, 2), int),), ([[0, -1]],)),
        (spaces.MultiBinary(2), np.zeros((1, 2, 2), np.int8), [[[0, 1], [-1, 9]]]),
    ],
)
def test_no_kind_of_action_is_checked_where_the_agent_does_not_act(space: Any, allowed: Any, wrong: Any) -> None:
    class Acting(Script):
        def action_space(self, agent: str) -> spaces.Space[Any]:
            return space if agent.startswith("a") else super().action_space(agent)

    b = np.ones((1, 1), np.int64)
    with muster.make_vec(Acting, 1, backend="serial") as envs:
        envs.reset(seed=0)
        envs.step({"a": wrong, "b": b})  # a_1, whose action is wrong, is not there yet
        for refused in (wrong, None, 3):
            with pytest.raises(ActionError):
                envs.step({"a": refused, "b": b})
        envs.step({"a": allowed, "b": b})


def test_an_env_that_raises_an_action_error_of_its_own_does_not_have_the_others_stepped_again() -> None:
    class Counting(Script):
        raises, steps = False, 0

        def step(self, actions: Any) -> Any:
            self.steps += 1
            if self.raises:
                raise ActionError("of a vector env that this env uses itself")
            return super().step(actions)

    class Raising(Counting):
        raises = True

    with muster.make_vec([Raising, Counting], backend="serial") as envs:
        envs.reset(seed=0)
        with pytest.raises(ActionError, match="of a vector env that this env uses itself"):
            envs.step(ones(2))
        assert envs.get_attr("steps") == (1, 1)


def test_without_copies_rewards_and_flags_stay_as_they_were() -> None:
    with muster.make_vec(Script, 1, backend="serial", copy=False) as envs:
        envs.reset(seed=0)
        _, rewards, *_, infos = envs.step(ones(1))
        before = rewards["a"].copy(), infos["acting"]["a"].copy()
        envs.step(ones(1))
        np.testing.assert_array_equal(rewards["a"], before[0])
        np.testing.assert_array_equal(infos["acting"]["a"], before[1])


def test_a_mask_of_a_wrong_length_names_the_agent() -> None:
    class Broken(Masked):
        def _info(self, agent: str) -> dict[str, Any]:
            return {"action_mask": np.ones(1 if agent == "b_0" else 3, np.int8)}

    with (
        muster.make_vec(Broken, backend="serial") as envs,
        pytest.raises(SpecMismatch, match=r"mask of 'b_0' has shape \(1,\), expected \(3,\)"),
    ):
        envs.reset(seed=0)


def test_envs_without_masks_and_state_have_none() -> None:
    with muster.make_vec(Script, backend="serial") as envs:
        _, infos = envs.reset()
        assert set(infos) == {"alive", "acting", "agent_terminated", "agent_truncated"}
        assert envs.state_space is None


def test_actions_of_agents_that_do_not_act_may_be_anything_in_unsigned_integers_too() -> None:
    with muster.make_vec(Script, 1, backend="serial") as envs:
        envs.reset(seed=0)
        idle = {group: actions.astype(np.uint64) for group, actions in ones(1).items()}
        idle["a"][:, 1] = 9  # a_1 is not there yet
        envs.step(idle)


@pytest.mark.parametrize("mode", ["same_step", *slow("next_step")])
def test_a_restarted_env_truncates_whoever_was_left(mode: str) -> None:
    with muster.make_vec(Failing, 2, num_workers=2, on_failure="restart", autoreset_mode=mode) as envs:
        envs.reset(seed=0)
        envs.step(ones(2))
        obs, rewards, terminated, truncated, infos = envs.step(ones(2))
        assert truncated.tolist() == [False, True]
        assert not terminated.any()
        assert "fell over" in infos["restarted"][1]
        assert rewards["a"][1].tolist() == [0, 0]
        assert infos["agent_truncated"]["a"][1].tolist() == [True, True]
        assert infos["agent_terminated"]["a"][:, 0].tolist() == [True, False]
        assert infos["acting"]["a"][1].tolist() == ([False, False] if mode == "next_step" else [True, False])
        last = obs if mode == "next_step" else infos["final_obs"]
        assert last["a"][1].tolist() == [[1, 0], [1, 1]]
        envs.step(ones(2))


def test_a_reset_of_others_leaves_a_restarted_env_over() -> None:
    with muster.make_vec(Failing, 2, backend="serial", on_failure="restart") as envs:
        envs.reset(seed=0)
        envs.step(ones(2))
        *_, before = envs.step(ones(2))
        assert before["restarted"][1] is not None
        _, after = envs.reset(options={"reset_mask": np.array([True, False])})
        for flag in ("alive", "acting", "agent_terminated", "agent_truncated"):
            assert [after[flag][g][1].tolist() for g in "ab"] == [before[flag][g][1].tolist() for g in "ab"], flag


class ChangingItsAgents(Failing):
    """Built for a second time it has other agents, in as many slots: their rows would fit the slab."""

    def __init__(self, built: str, **options: Any) -> None:
        super().__init__(**options)
        if os.path.exists(built):
            self.possible_agents = [agent.replace("a_", "c_") for agent in self.possible_agents]
        else:
            Path(built).touch()


class DyingAndChangingItsAgents(ChangingItsAgents):
    def step(self, actions: dict[str, Any]) -> Any:
        if self.t == 1:
            os._exit(3)
        return super().step(actions)


@pytest.mark.parametrize("kind", [ChangingItsAgents, DyingAndChangingItsAgents])
def test_a_restarted_env_with_other_agents_is_an_error(kind: type[Script], tmp_path: Path) -> None:
    options = {"env_kwargs": {"built": str(tmp_path / "built")}, "on_failure": "restart", "max_restarts": 2}
    with muster.make_vec(kind, 1, **options) as envs:
        envs.reset(seed=1)
        envs.step(ones(1))
        with pytest.raises(WorkerError, match="env 0, built anew, is laid out otherwise than before: groups is .*c_0"):
            envs.step(ones(1))


def test_groups_can_be_chosen() -> None:
    with muster.make_vec(Script, backend="serial", groups={"a_0": "x", "b_0": "x", "a_1": "y"}) as envs:
        assert envs.groups == {"x": ["a_0", "b_0"], "y": ["a_1"]}
        obs, _ = envs.reset(seed=0)
        assert obs["x"].tolist() == [[[0, 0], [0, 2]]]
        envs.step({"x": np.ones((1, 2), np.int64), "y": np.ones((1, 1), np.int64)})


def test_groups_are_refused_for_one_agent_and_unknown_agents_are_named() -> None:
    with pytest.raises(EnvError, match="has one agent"):
        muster.make_vec("CartPole-v1", backend="serial", groups={"a": "b"})
    stranger = functools.partial(Script, ["a_0 b_0", "a_0 b_0 c_0", ""], {})
    with muster.make_vec(stranger) as envs:
        envs.reset(seed=0)
        with pytest.raises(SpecMismatch, match="agent 'c_0' is not among the env's possible_agents"):
            envs.step(ones(1))


class Other(Script):
    def __init__(self) -> None:
        super().__init__()
        self.possible_agents = ["a_0", "a_1", "b_0", "b_1"]


def test_envs_with_other_agents_do_not_fit_together() -> None:
    with pytest.raises(SpecMismatch, match="env 1 differs from env 0: groups is"):
        muster.make_vec([Script, Other])
    with pytest.raises(SpecMismatch, match="only one of them has several agents"):
        muster.make_vec([Script, "CartPole-v1"])


def test_check_finite_looks_at_every_agent() -> None:
    class Broken(Script):
        def _obs(self, agent: str) -> Any:
            obs = super()._obs(agent)
            obs[0] = np.nan if agent == "b_0" and self.t == 1 else obs[0]
            return obs

    with muster.make_vec(Broken, backend="serial", check_finite=True) as envs:
        envs.reset(seed=0)
        with pytest.raises(EnvError, match="NaN"):
            envs.step(ones(1))


def test_an_observation_of_a_wrong_shape_names_the_agent() -> None:
    class Broken(Script):
        def _obs(self, agent: str) -> Any:
            return np.zeros(3, np.float32) if agent == "b_0" and self.t else super()._obs(agent)

    with muster.make_vec(Broken, backend="serial") as envs:
        envs.reset(seed=0)
        with pytest.raises(SpecMismatch, match=r"observation\['b_0'\] has shape \(3,\)"):
            envs.step(ones(1))


def test_repr_says_what_it_is_and_whether_it_is_closed():
    envs = muster.make_vec("pettingzoo/mpe/simple_spread_v3", 2, backend="serial")
    assert repr(envs) == "MultiAgentVectorEnv(num_envs=2, agents=3)"
    envs.close()
    assert repr(envs) == "MultiAgentVectorEnv(num_envs=2, agents=3, closed)"
