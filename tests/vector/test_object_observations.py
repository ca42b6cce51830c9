"""Observations whose parts travel by mail: without infos beside them, and where only some envs are reset."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import muster


class Growing(gym.Env[Any, Any]):
    """Observes as many ones as it has been stepped. Gives no infos."""

    observation_space = gym.spaces.Sequence(gym.spaces.Discrete(2))
    action_space = gym.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.steps = 0
        return (), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return (1,) * self.steps, 1.0, False, False, {}


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_observations_by_mail_arrive_without_infos(backend: str) -> None:
    with muster.make_vec(Growing, 2, backend=backend) as envs:
        assert envs.reset()[0] == ((), ())
        assert envs.step(np.zeros(2, np.int64))[0] == ((1,), (1,))
        assert envs.step(np.zeros(2, np.int64))[0] == ((1, 1), (1, 1))
        assert envs.reset(options={"reset_mask": np.array([False, True])})[0] == ((1, 1), ())
        assert envs.step(np.zeros(2, np.int64))[0] == ((1, 1, 1), (1,))


def test_an_env_that_has_not_been_reset_has_no_observation() -> None:
    with muster.make_vec(Growing, 2, backend="serial") as envs:
        assert envs.reset(options={"reset_mask": np.array([False, True])})[0] == (None, ())


class Remembering(Growing):
    """Observes an array in a Graph."""

    observation_space = gym.spaces.Graph(gym.spaces.Box(0, 9, (1,)), None)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return gym.spaces.GraphInstance(np.ones((2, 1), np.float32), None, None), {}


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_a_reset_of_other_envs_gives_copies_of_objects(backend: str) -> None:
    with muster.make_vec(Remembering, 2, backend=backend) as envs:
        kept, _ = envs.reset()
        again, _ = envs.reset(options={"reset_mask": np.array([False, True])})
        again[0].nodes[:] = 7
        assert kept[0].nodes.tolist() == [[1], [1]]
