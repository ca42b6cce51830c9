"""An env's ``state()`` is called after every step for those who say ``state=True``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from agent_envs import Script
from gymnasium import spaces

import muster
from muster.errors import ConfigError, EnvError

ACTIONS = {"a": np.ones((2, 2), np.int64), "b": np.ones((2, 1), np.int64)}


class Stating(Script):
    """Its state is ``[t, how often it was asked]``; it has none once all agents are gone."""

    state_space = spaces.Box(-1, 100, (2,), np.float32)
    asked = 0

    def state(self) -> Any:
        if not self.agents:
            raise RuntimeError("the world was taken apart with its last agent")
        self.asked += 1
        return np.array([self.t, self.asked], np.float32)


def test_without_state_nobody_is_asked() -> None:
    with muster.make_vec(Stating, 2) as envs:
        _, infos = envs.reset(seed=0)
        assert "state" not in infos
        assert "state" not in envs.step(ACTIONS)[4]
        assert envs.state_space is None
        assert envs.get_attr("asked") == (0, 0)


def test_an_env_that_is_taken_apart_with_its_last_agent_keeps_its_last_state() -> None:
    with muster.make_vec(Stating, 2, backend="serial", state=True) as envs:
        envs.reset(seed=0)
        states = [envs.step(ACTIONS)[4]["state"][:, 0].tolist() for _ in range(4)]
    assert states == [[1, 1], [2, 2], [3, 3], [3, 3]]


class Raising(Stating):
    def state(self) -> Any:
        raise ZeroDivisionError("there is none")


class Misshapen(Stating):
    def state(self) -> Any:
        return np.zeros(3, np.float32)


@pytest.mark.parametrize(("kind", "message"), [(Raising, "there is none"), (Misshapen, r"state has shape \(3,\)")])
def test_a_state_that_cannot_be_had_is_an_error(kind: type[Stating], message: str) -> None:
    with muster.make_vec(kind, 1, backend="serial") as envs:
        envs.reset(seed=0)
    with muster.make_vec(kind, 1, backend="serial", state=True) as envs, pytest.raises(EnvError, match=message):
        envs.reset(seed=0)


def test_collectors_ask_for_the_state_of_what_they_make() -> None:
    options = {"backend": "serial"}
    with muster.Collector(Stating, None, frames_per_batch=4, num_envs=2, make_vec_options=options) as collector:
        assert collector.rollout()["state"][..., 0].tolist() == [[0, 1], [0, 1]]


def test_a_policy_that_reads_the_state_is_told_how_to_have_it() -> None:
    from tensordict.nn import TensorDictModule  # not at the top: workers import this module

    reading = TensorDictModule(lambda state: state.long(), in_keys=["state"], out_keys=[("a", "action")])
    options = {"backend": "serial", "state": False}
    with (
        muster.Collector(Stating, reading, frames_per_batch=4, make_vec_options=options) as collector,
        pytest.raises(ConfigError, match="state=True"),
    ):
        collector.rollout()
