"""The contract of every backend for envs of several agents. It is used like `BackendContract`."""

from __future__ import annotations

import functools
import os
import signal

import numpy as np
import pytest
from agent_envs import Away, Failing, Masked, Script, Structured, Turns, ones
from backend_under_test import BackendUnderTest, MakeVec

import muster
from muster.errors import ActionError, ClosedError, EnvError, PendingError, WorkerDied


class MultiAgentBackendContract(BackendUnderTest):
    """The tests of `MultiAgentVectorEnv` that every backend has to pass unchanged."""

    def test_agents_stand_in_fixed_slots_and_absent_ones_are_zero(self, make: MakeVec) -> None:
        with make(Script, 2) as envs:
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

    def test_the_step_of_an_agents_death_carries_its_last_observation(self, make: MakeVec) -> None:
        with make(Script, 2) as envs:
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

    def test_an_agent_that_leaves_without_an_end_pauses_until_it_returns(self, make: MakeVec) -> None:
        with make(Away, 2) as envs:
            envs.reset(seed=0)
            with pytest.warns(RuntimeWarning, match=r"env 0: \['a_1'\] left env.agents, but .* pause, ") as told:
                rows = [envs.step(ones(2)) for _ in range(4)]
            assert len(told) == 1
            alive, acting = (np.array([row[4][name]["a"][1, 1] for row in rows]) for name in ("alive", "acting"))
            assert alive.tolist() == [True, False, True, True]
            assert acting.tolist() == [False, False, True, False]
            assert [row[0]["a"][1, 1].tolist() for row in rows] == [[1, 1], [0, 0], [3, 1], [4, 1]]
            np.testing.assert_allclose([row[1]["a"][1, 1] for row in rows], [1.1, 0, 3.1, 4.1], rtol=1e-6)
            assert rows[3][2].all()
            assert "agents_away" not in rows[0][4]

    def test_agents_get_their_own_actions_and_only_live_ones_do(self, make: MakeVec) -> None:
        with make(Script, 2) as envs:
            envs.reset(seed=0)
            envs.step({"b": np.array([[3], [2]]), "a": np.array([[1, 2], [2, 3]])})
            envs.step({"b": np.array([[1], [1]]), "a": np.array([[2, 3], [3, 1]])})
            assert envs.get_attr("got") == (
                [{"a_0": 1, "b_0": 3}, {"a_0": 2, "a_1": 3, "b_0": 1}],
                [{"a_0": 2, "b_0": 2}, {"a_0": 3, "a_1": 1, "b_0": 1}],
            )
            assert type(envs.get_attr("got")[0][0]["a_0"]) is np.int64

    def test_actions_are_checked_before_anything_is_sent_but_not_those_of_agents_that_do_not_act(
        self, make: MakeVec
    ) -> None:
        with make(Script, 2) as envs:
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

    @pytest.mark.parametrize("copy", [True, False])
    def test_next_step_autoreset_returns_the_reset_as_a_row_of_its_own(self, make: MakeVec, copy: bool) -> None:
        with make(Script, 2, copy=copy) as envs:
            envs.reset(seed=0)
            rows = [envs.step(ones(2)) for _ in range(4)]
            assert rows[-1][3].all()
            obs, rewards, terminated, truncated, infos = envs.step(ones(2))
            assert obs["a"][0].tolist() == [[0, 0], [0, 0]]
            assert infos["alive"]["a"][0].tolist() == [True, False]
            assert not any(part.any() for part in (rewards["a"], rewards["b"], terminated, truncated))
            assert not infos["agent_terminated"]["a"].any()
            assert envs.episode_lengths.tolist() == [0, 0]

    def test_same_step_autoreset_keeps_the_end_of_the_old_episode(self, make: MakeVec) -> None:
        with make(Script, 2, autoreset_mode="same_step") as envs:
            envs.reset(seed=0)
            for _ in range(3):
                *_, infos = envs.step(ones(2))
                assert "final_obs" not in infos
            obs, rewards, _, truncated, infos = envs.step(ones(2))
            assert truncated.all()
            assert obs["a"][0].tolist() == [[0, 0], [0, 0]]  # of the new episode, like alive and acting
            assert infos["alive"]["a"][0].tolist() == [True, False]
            assert infos["acting"]["a"][0].tolist() == [True, False]
            np.testing.assert_allclose(rewards["a"], [[4.0, 4.1]] * 2)  # of the step, like the agents' ends
            assert infos["agent_terminated"]["a"].all()
            assert infos["final_obs"]["a"][0].tolist() == [[4, 0], [4, 1]]
            assert infos["_final_obs"].all()
            assert infos["final_info"]["alive"]["a"].all()
            assert not infos["final_info"]["acting"]["a"].any()
            assert infos["final_info"]["agent_terminated"]["a"].all()

    def test_disabled_autoreset_waits_for_reset_masks(self, make: MakeVec) -> None:
        short = functools.partial(Script, ["a_0 b_0", ""], {(1, "a_0"): "terminated", (1, "b_0"): "terminated"})
        with make([short, Script], autoreset_mode="disabled") as envs:
            envs.reset(seed=0)
            _, _, terminated, truncated, _ = envs.step(ones(2))
            assert terminated.tolist() == [True, False]
            with pytest.raises(muster.MusterError, match="reset_mask"):
                envs.step(ones(2))
            obs, infos = envs.reset(options={"reset_mask": terminated | truncated})
            assert obs["b"][:, 0, 0].tolist() == [0, 1]  # env 1 goes on
            assert infos["acting"]["b"].all()
            envs.step(ones(2))

    def test_masks_and_states_are_where_the_env_gives_them(self, make: MakeVec) -> None:
        with make([Masked, Masked], state=True) as envs:
            _, infos = envs.reset(seed=0)
            assert infos["action_mask"]["b"].tolist() == [[[False, True, True]]] * 2
            # a_1 is not there
            assert infos["action_mask"]["a"].tolist() == [[[False, True, True], [True, True, True]]] * 2
            np.testing.assert_array_equal(infos["state"], [[0, 0.5]] * 2)
            *_, infos = envs.step(ones(2))
            assert infos["action_mask"]["a"].all(-1).tolist() == [[False, True]] * 2  # a mask is never all False
            np.testing.assert_array_equal(infos["state"], [[0.1, 0.5]] * 2)
            assert infos["_state"].all()
            assert infos["agent_infos"]["b_0"]["t"].tolist() == [1, 1]
            assert infos["agent_infos"]["b_0"]["who"].tolist() == ["b_0", "b_0"]
            assert "action_mask" not in infos["agent_infos"]["b_0"]

    def test_structured_observations_and_actions(self, make: MakeVec) -> None:
        factories = [functools.partial(Structured, flip) for flip in (False, True)]
        with make(factories) as envs:
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

    def test_turns_name_the_agent_that_acts_and_tell_rewards_when_its_turn_comes(self, make: MakeVec) -> None:
        with make(Turns, 2) as envs:
            obs, infos = envs.reset(seed=0)
            act = {"p": np.zeros((2, 3, 1), np.float32)}
            assert obs["p"][0].tolist() == [[0, 0], [0, 1], [0, 2]]  # not the array that all agents share
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

    def test_send_and_recv_deliver_what_is_ready(self, make: MakeVec) -> None:
        with make(Script, 3, **({} if self.other_num_workers is None else {"num_workers": 2})) as envs:
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

    def test_an_error_names_the_env_and_holds_the_others_rows(self, make: MakeVec) -> None:
        with make(Failing, 2) as envs:
            last = len(envs.stats()["workers"]) - 1
            envs.reset(seed=0)
            envs.step(ones(2))
            with pytest.raises(EnvError, match=rf"env 1 \(worker {last}, step 1\).*b_0 fell over") as raised:
                envs.step(ones(2))
            assert raised.value.batch.env_ids.tolist() == [0]
            assert raised.value.batch.obs["b"].tolist() == [[[2, 2]]]
            assert raised.value.batch.rewards["b"].shape == (1, 1)

    def test_a_killed_worker_is_named_and_nothing_hangs(self, make: MakeVec) -> None:
        if not self.has_worker_processes:
            pytest.skip("has no worker processes")
        envs = make(Script, 2)
        envs.reset(seed=0)
        pids = [worker["pid"] for worker in envs.stats()["workers"] if worker["pid"] != os.getpid()]
        os.kill(pids[-1], signal.SIGKILL)
        envs.send(ones(2))
        with pytest.raises(WorkerDied, match=f"env {len(pids) - 1}"):
            envs.recv()
        envs.close()

    def test_call_render_attributes_and_close_reach_the_env(self, make: MakeVec) -> None:
        with make(Script, 2) as envs:
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
