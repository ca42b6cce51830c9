"""`MultiAgentVectorEnv`: the layout of agents, and the same verbs as for single agents."""

from __future__ import annotations

import functools
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agent_envs import Masked, Script, Structured, Turns
from gymnasium import spaces

import muster
from muster.errors import ActionError, ClosedError, EnvError, PendingError, SpecMismatch, WorkerDied, WorkerError

BACKENDS: dict[str, dict[str, Any]] = {
    "serial": {"backend": "serial"},
    "thread": {"backend": "thread", "num_workers": 2},
    "process": {"num_workers": 2},
    "caller_steps": {"num_workers": 1, "caller_steps": True},
}


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> dict[str, Any]:
    return BACKENDS[request.param]


def ones(n: int) -> dict[str, Any]:
    return {"a": np.ones((n, 2), np.int64), "b": np.ones((n, 1), np.int64)}


def test_agents_stand_in_fixed_slots_and_absent_ones_are_zero(backend: dict[str, Any]) -> None:
    with muster.make_vec(Script, 2, **backend) as envs:
        assert isinstance(envs, muster.MultiAgentVectorEnv)
        assert envs.groups == {"a": ["a_0", "a_1"], "b": ["b_0"]}
        assert envs.observation_space["a"].shape == (2, 2, 2)
        obs, infos = envs.reset(seed=3)
        assert envs.get_attr("seed") == (3, 4)
        np.testing.assert_array_equal(obs["a"], [[[0, 0], [0, 0]]] * 2)
        np.testing.assert_array_equal(obs["b"], [[[0, 2]]] * 2)
        np.testing.assert_array_equal(infos["alive"]["a"], [[True, False]] * 2)
        np.testing.assert_array_equal(infos["acting"]["a"], [[True, False]] * 2)
        obs, rewards, *_, infos = envs.step(ones(2))  # a_1 joins
        np.testing.assert_array_equal(obs["a"], [[[1, 0], [1, 1]]] * 2)
        np.testing.assert_allclose(rewards["a"], [[1.0, 1.1]] * 2)
        assert rewards["a"].dtype == np.float32
        assert infos["acting"]["a"].all()


def test_the_step_of_an_agents_death_carries_its_last_observation(backend: dict[str, Any]) -> None:
    with muster.make_vec(Script, 2, **backend) as envs:
        envs.reset(seed=0)
        envs.step(ones(2))
        obs, rewards, terminated, truncated, infos = envs.step(ones(2))  # a_0 dies
        assert obs["a"][0].tolist() == [[2, 0], [2, 1]]
        assert infos["alive"]["a"][0].tolist() == [True, True]
        assert infos["acting"]["a"][0].tolist() == [False, True]
        assert infos["agent_terminated"]["a"][0].tolist() == [True, False]
        assert not terminated.any()
        assert not truncated.any()
        obs, rewards, *_, infos = envs.step(ones(2))  # b_0 is truncated, a_0 returns
        assert infos["agent_truncated"]["b"][0].tolist() == [True]
        assert infos["acting"]["a"][0].tolist() == [True, True]
        assert not infos["agent_terminated"]["a"].any()
        obs, rewards, terminated, truncated, infos = envs.step(ones(2))  # all are gone
        assert obs["b"][0].tolist() == [[0, 0]]
        assert rewards["b"][0].tolist() == [0]
        assert not infos["alive"]["b"].any()
        assert infos["alive"]["a"].all()
        assert not infos["acting"]["a"].any()


def test_an_env_is_terminated_if_nobody_was_truncated_on_the_way() -> None:
    ends = {(1, "a_0"): "terminated", (2, "b_0"): "terminated"}
    clean = functools.partial(Script, ["a_0 b_0", "b_0", ""], ends)
    cut = functools.partial(Script, ["a_0 b_0", "b_0", ""], ends | {(1, "a_0"): "truncated"})
    vanishing = functools.partial(Script, ["a_0 b_0", "b_0", ""], {(2, "b_0"): "terminated"})
    with muster.make_vec([clean, cut, vanishing], backend="serial") as envs:
        envs.reset(seed=0)
        envs.step(ones(3))
        _, _, terminated, truncated, _ = envs.step(ones(3))
        assert terminated.tolist() == [True, False, False]
        assert truncated.tolist() == [False, True, True]


def test_agents_get_their_own_actions_and_only_live_ones_do(backend: dict[str, Any]) -> None:
    with muster.make_vec(Script, 2, **backend) as envs:
        envs.reset(seed=0)
        envs.step({"b": np.array([[3], [2]]), "a": np.array([[1, 2], [2, 3]])})
        envs.step({"b": np.array([[1], [1]]), "a": np.array([[2, 3], [3, 1]])})
        assert envs.get_attr("got") == (
            [{"a_0": 1, "b_0": 3}, {"a_0": 2, "a_1": 3, "b_0": 1}],
            [{"a_0": 2, "b_0": 2}, {"a_0": 3, "a_1": 1, "b_0": 1}],
        )
        assert type(envs.get_attr("got")[0][0]["a_0"]) is np.int64


def test_actions_are_checked_before_anything_is_sent_but_not_those_of_agents_that_do_not_act() -> None:
    with muster.make_vec(Script, 2) as envs:
        envs.reset(seed=0)
        idle = ones(2)
        idle["a"][:, 1] = -1  # a_1 is not there yet
        envs.step(idle)
        for wrong, match in (
            (idle, "for env 0 is -1, expected 1 to 3"),
            ({"a": ones(2)["a"]}, r"keys \['a', 'b'\]"),
            (ones(2) | {"b": np.ones((2, 2), np.int64)}, r"expected shape \(2, 1\), got \(2, 2\)"),
            (ones(3), "expected 2 actions, one for each env"),
            (ones(2) | {"a": np.full((2, 2), 1.5)}, "dtype"),
            (None, "expected a dict"),
            (np.ones((2, 3)), "expected a dict"),
        ):
            with pytest.raises(ActionError, match=match):
                envs.step(wrong)
        envs.step(ones(2))
        assert [len(got) for got in envs.get_attr("got")] == [2, 2]


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


def test_without_copies_rewards_and_flags_stay_as_they_were() -> None:
    with muster.make_vec(Script, 1, backend="serial", copy=False) as envs:
        envs.reset(seed=0)
        _, rewards, *_, infos = envs.step(ones(1))
        before = rewards["a"].copy(), infos["acting"]["a"].copy()
        envs.step(ones(1))
        np.testing.assert_array_equal(rewards["a"], before[0])
        np.testing.assert_array_equal(infos["acting"]["a"], before[1])


@pytest.mark.parametrize("copy", [True, False])
def test_next_step_autoreset_returns_the_reset_as_a_row_of_its_own(backend: dict[str, Any], copy: bool) -> None:
    with muster.make_vec(Script, 2, copy=copy, **backend) as envs:
        envs.reset(seed=0)
        rows = [envs.step(ones(2)) for _ in range(4)]
        assert rows[-1][3].all()
        obs, rewards, terminated, truncated, infos = envs.step(ones(2))
        assert obs["a"][0].tolist() == [[0, 0], [0, 0]]
        assert infos["alive"]["a"][0].tolist() == [True, False]
        assert not any(part.any() for part in (rewards["a"], rewards["b"], terminated, truncated))
        assert not infos["agent_terminated"]["a"].any()
        assert envs.episode_lengths.tolist() == [0, 0]


def test_same_step_autoreset_keeps_the_end_of_the_old_episode(backend: dict[str, Any]) -> None:
    with muster.make_vec(Script, 2, autoreset_mode="same_step", **backend) as envs:
        envs.reset(seed=0)
        for _ in range(3):
            *_, infos = envs.step(ones(2))
            assert "final_obs" not in infos
        obs, rewards, _, truncated, infos = envs.step(ones(2))
        assert truncated.all()
        assert obs["a"][0].tolist() == [[0, 0], [0, 0]]  # of the new episode, as alive and acting
        assert infos["alive"]["a"][0].tolist() == [True, False]
        assert infos["acting"]["a"][0].tolist() == [True, False]
        np.testing.assert_allclose(rewards["a"], [[4.0, 4.1]] * 2)  # of the step, as how agents ended
        assert infos["agent_terminated"]["a"].all()
        assert infos["final_obs"]["a"][0].tolist() == [[4, 0], [4, 1]]
        assert infos["_final_obs"].all()
        assert infos["final_info"]["alive"]["a"].all()
        assert not infos["final_info"]["acting"]["a"].any()
        assert infos["final_info"]["agent_terminated"]["a"].all()


def test_disabled_autoreset_waits_for_reset_masks() -> None:
    short = functools.partial(Script, ["a_0 b_0", ""], {(1, "a_0"): "terminated", (1, "b_0"): "terminated"})
    with muster.make_vec([short, Script], autoreset_mode="disabled", num_workers=2) as envs:
        envs.reset(seed=0)
        _, _, terminated, truncated, _ = envs.step(ones(2))
        assert terminated.tolist() == [True, False]
        with pytest.raises(muster.MusterError, match="reset_mask"):
            envs.step(ones(2))
        obs, infos = envs.reset(options={"reset_mask": terminated | truncated})
        assert obs["b"][:, 0, 0].tolist() == [0, 1]  # env 1 goes on
        assert infos["acting"]["b"].all()
        envs.step(ones(2))


def test_masks_and_states_are_where_the_env_gives_them(backend: dict[str, Any]) -> None:
    with muster.make_vec([Masked, Masked], state=True, **backend) as envs:
        _, infos = envs.reset(seed=0)
        assert infos["action_mask"]["b"].tolist() == [[[False, True, True]]] * 2
        assert infos["action_mask"]["a"].tolist() == [[[False, True, True], [True, True, True]]] * 2  # a_1 is not there
        np.testing.assert_array_equal(infos["state"], [[0, 0.5]] * 2)
        *_, infos = envs.step(ones(2))
        assert infos["action_mask"]["a"].all(-1).tolist() == [[False, True]] * 2  # a mask is never all False
        np.testing.assert_array_equal(infos["state"], [[0.1, 0.5]] * 2)
        assert infos["_state"].all()
        assert infos["agent_infos"]["b_0"]["t"].tolist() == [1, 1]
        assert infos["agent_infos"]["b_0"]["who"].tolist() == ["b_0", "b_0"]
        assert "action_mask" not in infos["agent_infos"]["b_0"]


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


def test_structured_observations_and_actions(backend: dict[str, Any]) -> None:
    factories = [functools.partial(Structured, flip) for flip in (False, True)]
    with muster.make_vec(factories, **backend) as envs:
        obs, infos = envs.reset(seed=0)
        assert list(obs["a"]) == ["map", "pair"]
        assert obs["a"]["map"].shape == (2, 2, 2, 3)
        assert obs["a"]["pair"][0].tolist() == [[0, 1], [0, 1]]
        assert obs["a"]["pair"][1].shape == (2, 2, 2)
        assert infos["action_mask"]["a"].tolist() == [[[True, False, False, False], [True, False, False, True]]] * 2
        envs.action_space.seed(0)
        actions = envs.action_space.sample()
        obs, *_ = envs.step(actions)
        assert obs["b"]["map"][1, 0, 0, 0] == 12
        got = envs.get_attr("got")[1][0]["a_1"]
        np.testing.assert_array_equal(got["move"], actions["a"]["move"][1, 1])
        np.testing.assert_array_equal(got["pick"], actions["a"]["pick"][1, 1])


def test_turns_name_the_agent_that_acts_and_tell_rewards_when_its_turn_comes(backend: dict[str, Any]) -> None:
    with muster.make_vec(Turns, 2, **backend) as envs:
        obs, infos = envs.reset(seed=0)
        act = {"p": np.zeros((2, 3, 1), np.float32)}
        assert obs["p"][0].tolist() == [[0, 0], [0, 1], [0, 2]]  # not the array that all were shown
        assert infos["acting"]["p"][0].tolist() == [True, False, False]
        obs, rewards, *_, infos = envs.step(act)
        assert infos["alive"]["p"].all()
        assert infos["acting"]["p"][0].tolist() == [False, True, False]
        assert rewards["p"][0].tolist() == [0, 1, 0]
        envs.step(act)
        obs, rewards, *_ = envs.step(act)
        assert rewards["p"][0].tolist() == [2, 0, 0]  # both others have acted since
        totals, ends = rewards["p"][0] + [0, 1, 2], []
        over = False
        while not over:
            obs, rewards, terminated, truncated, infos = envs.step(act)
            totals += rewards["p"][0]
            for a in np.flatnonzero(infos["agent_terminated"]["p"][0]):
                ends.append(int(a))
                assert infos["alive"]["p"][0, a]
                assert obs["p"][0, a, 1] == a
            over = bool(terminated[0] or truncated[0])
        assert ends == [0, 1, 2]
        assert terminated[0]
        assert totals.tolist() == [4, 5, 5]
        assert envs.episode_lengths[0] == 9


def test_actions_of_agents_that_do_not_act_may_be_anything_in_unsigned_integers_too() -> None:
    with muster.make_vec(Script, 1, backend="serial") as envs:
        envs.reset(seed=0)
        idle = {group: actions.astype(np.uint64) for group, actions in ones(1).items()}
        idle["a"][:, 1] = 9  # a_1 is not there yet
        envs.step(idle)


def test_send_and_recv_deliver_what_is_ready(backend: dict[str, Any]) -> None:
    with muster.make_vec(Script, 3, **{**backend, **({"num_workers": 2} if "num_workers" in backend else {})}) as envs:
        envs.reset(seed=0)
        envs.send(ones(2), env_ids=[2, 0])
        batch = envs.recv()
        assert batch.env_ids.tolist() == [0, 2]
        assert batch.obs["a"].shape == (2, 2, 2)
        assert batch.rewards["b"].tolist() == [[np.float32(1.2)]] * 2
        assert batch.infos["alive"]["a"].shape == (2, 2)
        idle = ones(1)
        idle["a"][0, 1] = 9
        for wrong in ([7], [0.5], [], "a"):
            with pytest.raises(ActionError, match="env_ids"):
                envs.send(idle, env_ids=wrong)
        envs.send(idle, env_ids=[1])
        with pytest.raises(PendingError):
            envs.step(ones(3))
        assert envs.recv(1).obs["b"].tolist() == [[[1, 2]]]
        envs.step_async(ones(3))
        assert envs.step_wait()[0]["b"][:, 0, 0].tolist() == [2, 1 + 1, 2]


class Failing(Script):
    def step(self, actions: dict[str, Any]) -> Any:
        if self.t == 1 and muster.get_worker_info() is None:
            raise RuntimeError("never")
        if self.t == 1 and self.seed == 1:
            raise RuntimeError("b_0 fell over")
        return super().step(actions)


def test_an_error_names_the_env_and_holds_the_others_rows() -> None:
    with muster.make_vec(Failing, 2, num_workers=2) as envs:
        envs.reset(seed=0)
        envs.step(ones(2))
        with pytest.raises(EnvError, match=r"env 1 \(worker 1, step 1\).*b_0 fell over") as raised:
            envs.step(ones(2))
        assert raised.value.batch.env_ids.tolist() == [0]
        assert raised.value.batch.obs["b"].tolist() == [[[2, 2]]]
        assert raised.value.batch.rewards["b"].shape == (1, 1)


@pytest.mark.parametrize("mode", ["next_step", "same_step"])
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


def test_without_state_the_env_is_not_asked_for_it() -> None:
    class Stating(Script):
        state_space = spaces.Box(-1, 1, (3,), np.float32)

        def state(self) -> Any:
            return np.full(3, 0.5, np.float32)

    with muster.make_vec(Stating, 2, backend="serial") as envs:
        assert "state" not in envs.reset(seed=0)[1]
        assert "state" not in envs.step(ones(2))[4]
        assert envs.state_space is None


def test_a_killed_worker_is_named_and_nothing_hangs() -> None:
    envs = muster.make_vec(Script, 2, num_workers=2)
    envs.reset(seed=0)
    os.kill(envs.stats()["workers"][1]["pid"], signal.SIGKILL)
    envs.send(ones(2))
    with pytest.raises(WorkerDied, match="env 1"):
        envs.recv()
    envs.close()


def test_call_render_attributes_and_close_reach_the_env(backend: dict[str, Any]) -> None:
    with muster.make_vec(Script, 2, **backend) as envs:
        envs.reset(seed=0, options={"level": 3})
        envs.step(ones(2))
        assert envs.get_attr("options") == ({"level": 3},) * 2
        envs.set_attr("t", [0, 2])
        assert envs.get_attr("t") == (0, 2)
        assert [frame[0, 0, 0] for frame in envs.render()] == [0, 2]
        assert envs.call("observation_space", "a_0")[0].shape == (2,)
        with pytest.raises(EnvError, match="no_such_thing"):
            envs.get_attr("no_such_thing")
        assert envs.render_mode == "rgb_array"
        assert envs.stats()["env_steps"] == 2
    assert envs.closed
    with pytest.raises(ClosedError):
        envs.step(ones(2))


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


@pytest.mark.parametrize(
    "options", [{"num_workers": 1}, {"num_workers": 3}, {"context": "spawn"}, {"backend": "serial"}]
)
def test_every_backend_gives_the_same_rows(options: dict[str, Any]) -> None:
    def rollout(**how: Any) -> list[Any]:
        with muster.make_vec("pettingzoo/mpe/simple_tag_v3", 3, **how) as envs:
            envs.action_space.seed(1)
            rows = [envs.reset(seed=7)]
            return rows + [envs.step(envs.action_space.sample()) for _ in range(30)]

    def flat(row: Any) -> list[Any]:
        return (
            [x for one in row for x in flat(one)]
            if isinstance(row, (list, tuple))
            else ([x for key in row for x in flat(row[key])] if isinstance(row, dict) else [row])
        )

    for ours, theirs in zip(flat(rollout(**options)), flat(rollout(num_workers=2)), strict=True):
        np.testing.assert_array_equal(ours, theirs)
