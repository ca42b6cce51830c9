"""Parallel envs that show an agent nothing in the step that ends it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from agent_envs import Script
from gymnasium import spaces

import muster


class Unseen(Script):
    """Those that are gone after a step are shown nothing of it: a_1 after step 2, the others after step 4."""

    def __init__(self) -> None:
        ends = dict.fromkeys([(2, "a_1"), (4, "a_0"), (4, "b_0")], "terminated")
        super().__init__(["a_0 a_1 b_0", "a_0 a_1 b_0", "a_0 b_0", "a_0 b_0", ""], ends)

    def step(self, actions: dict[str, Any]) -> Any:
        obs, *rest = super().step(actions)
        return ({agent: one for agent, one in obs.items() if agent in self.agents}, *rest)


class UnseenMasked(Unseen):
    """The same with the action mask in the observation."""

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        return spaces.Dict({"observation": super().observation_space(agent), "action_mask": spaces.MultiBinary(3)})

    def _obs(self, agent: str) -> Any:
        return {"observation": super()._obs(agent), "action_mask": np.array([0, 1, 1], np.int8)}


class NeverSeen(Unseen):
    """b_0 pauses until its end, in step 4, in which it has a reward and no observation."""

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return tuple(map(self._without, super().reset(seed, options)))

    def step(self, actions: dict[str, Any]) -> Any:
        obs, *rest = super().step(actions)
        return (self._without(obs), *(rest if self.t == 4 else map(self._without, rest)))

    def _without(self, told: dict[str, Any]) -> dict[str, Any]:
        return {agent: one for agent, one in told.items() if agent != "b_0"}


@pytest.mark.parametrize("env", [Unseen, UnseenMasked])
def test_an_agent_keeps_its_last_reward_and_its_end(env: type[Unseen]) -> None:
    with muster.make_vec(env, 1, backend="serial", autoreset_mode="disabled") as envs:
        envs.reset(seed=0)
        actions = {"a": np.ones((1, 2), np.int64), "b": np.ones((1, 1), np.int64)}
        for t in range(1, 5):
            obs, rewards, terminated, truncated, infos = envs.step(actions)
            if t == 2:
                assert obs["a"].tolist() == [[[2, 0], [1, 1]]]
                np.testing.assert_allclose(rewards["a"], [[2.0, 2.1]])
                assert infos["alive"]["a"].tolist() == [[True, True]]
                assert infos["acting"]["a"].tolist() == [[True, False]]
                assert infos["agent_terminated"]["a"].tolist() == [[False, True]]
                assert not terminated[0]
            if t == 3:
                assert infos["alive"]["a"].tolist() == [[True, False]]
                assert not infos["agent_terminated"]["a"].any()
        assert obs["a"].tolist() == [[[3, 0], [0, 0]]]
        np.testing.assert_allclose(rewards["b"], [[4.2]])
        assert infos["agent_terminated"]["b"].tolist() == [[True]]
        assert (terminated.tolist(), truncated.tolist()) == ([True], [False])


def test_an_agent_that_was_never_shown_anything_gets_zeros_and_the_reward_of_its_end() -> None:
    with muster.make_vec(NeverSeen, 1, backend="serial", autoreset_mode="disabled") as envs:
        envs.reset(seed=0)
        for t in range(1, 5):
            obs, rewards, terminated, _, infos = envs.step({"a": np.ones((1, 2), int), "b": np.ones((1, 1), int)})
            assert obs["b"].tolist() == [[[0, 0]]]
            assert infos["alive"]["b"].tolist() == [[t == 4]]
            np.testing.assert_allclose(rewards["b"], [[4.2 if t == 4 else 0]])
        assert infos["agent_terminated"]["b"].tolist() == [[True]]
        assert terminated.tolist() == [True]


class Reusing(Unseen):
    """Writes each agent's observation to an array of the agent's own, and -99 once it is gone. `nested`: in a tuple."""

    def __init__(self, nested: bool) -> None:
        super().__init__()
        self.nested = nested
        self.buffers = {agent: np.zeros(2, np.float32) for agent in ("a_0", "a_1", "b_0")}

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        space = spaces.Box(-99, 99, (2,))
        return spaces.Tuple([space]) if self.nested else space

    def _obs(self, agent: str) -> Any:
        self.buffers[agent][:] = super()._obs(agent)
        return (self.buffers[agent],) if self.nested else self.buffers[agent]

    def step(self, actions: dict[str, Any]) -> Any:
        result = super().step(actions)
        for agent in self.buffers.keys() - set(self.agents):
            self.buffers[agent][:] = -99
        return result


@pytest.mark.parametrize("nested", [False, True])
def test_what_an_agent_was_last_shown_stays_though_the_env_writes_to_it_again(nested: bool) -> None:
    with muster.make_vec(lambda: Reusing(nested), 1, backend="serial", autoreset_mode="disabled") as envs:
        envs.reset(seed=0)
        for _ in range(2):
            obs, *_, infos = envs.step({"a": np.ones((1, 2), int), "b": np.ones((1, 1), int)})
        assert infos["agent_terminated"]["a"].tolist() == [[False, True]]
        assert (obs["a"][0] if nested else obs["a"]).tolist() == [[[2, 0], [1, 1]]]
