"""An env's ``state()`` is called after every step for those who say ``state=True``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from agent_envs import Script
from gymnasium import spaces

import muster
from muster.errors import ConfigError, EnvError
from slow import slow


class Stating(Script):
    """Its state is ``[t, how often it was asked]``. Raises at `fails_at`, in the first env that lives so long."""

    state_space = spaces.Box(-1, 100, (2,), np.float32)

    def __init__(self, fails_at: int | None = None, marker: str | None = None) -> None:
        super().__init__(["a_0 b_0"] * 50, {(-1, ""): "terminated"})
        self.asked = 0
        self.fails_at, self.marker = fails_at, marker

    def state(self) -> Any:
        self.asked += 1
        return np.array([self.t, self.asked], np.float32)

    def step(self, actions: dict[str, Any]) -> Any:
        if self.t == self.fails_at and self.marker is not None:
            try:
                with open(self.marker, "x"):
                    raise RuntimeError("as it should")
            except FileExistsError:
                pass
        return super().step(actions)


class Short(Stating):
    """Its episodes take one step."""

    def __init__(self) -> None:
        super().__init__()
        self.script, self.ends = [["a_0"], []], {(1, "a_0"): "terminated"}


def one_env(actions: dict[str, Any]) -> dict[str, Any]:
    return {name: rows[:1] for name, rows in actions.items()}


ACTIONS = {"a": np.ones((2, 2), np.int64), "b": np.ones((2, 1), np.int64)}
BACKENDS = pytest.mark.parametrize(
    "options", [{"num_workers": 2}, *slow({"backend": "serial"}, {"num_workers": 1, "caller_steps": True})], ids=str
)


@BACKENDS
def test_without_state_nobody_is_asked(options: dict[str, Any]) -> None:
    with muster.make_vec(Stating, 2, **options) as envs:
        _, infos = envs.reset(seed=0)
        assert "state" not in infos
        assert "state" not in envs.step(ACTIONS)[4]
        assert envs.state_space is None
        assert envs.get_attr("asked") == (0, 0)


@BACKENDS
def test_with_state_every_step_tells_it(options: dict[str, Any]) -> None:
    with muster.make_vec(Stating, 2, state=True, **options) as envs:
        _, infos = envs.reset(seed=0)
        assert infos["state"].tolist() == [[0, 1], [0, 1]]
        for t in (1, 2):
            *_, infos = envs.step(ACTIONS)
            assert infos["state"].tolist() == [[t, t + 1]] * 2
            assert infos["state"].dtype == np.float32
            assert infos["_state"].tolist() == [True, True]


def test_ended_episodes_keep_their_state() -> None:
    with muster.make_vec(Short, 1, backend="serial", autoreset_mode="same_step", state=True) as envs:
        envs.reset(seed=0)
        *_, infos = envs.step(one_env(ACTIONS))
        assert infos["final_info"]["state"][:, 0].tolist() == [1]
        assert infos["state"][:, 0].tolist() == [0]


def test_a_partial_reset_keeps_the_other_envs_state() -> None:
    with muster.make_vec(Stating, 2, num_workers=2, autoreset_mode="disabled", state=True) as envs:
        envs.reset(seed=0)
        for _ in range(3):
            envs.step(ACTIONS)
        _, infos = envs.reset(options={"reset_mask": np.array([True, False])})
        assert infos["state"][:, 0].tolist() == [0, 3]


def test_states_come_with_the_envs_that_are_ready() -> None:
    with muster.make_vec(Stating, 2, num_workers=2, state=True) as envs:
        envs.reset(seed=0)
        envs.send({name: actions[1:] for name, actions in ACTIONS.items()}, [1])
        assert envs.recv(1).infos["state"][:, 0].tolist() == [1]


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


def test_an_env_that_is_taken_apart_with_its_last_agent_keeps_its_last_state() -> None:
    pytest.importorskip("pettingzoo.sisl")
    with muster.make_vec("pettingzoo/sisl/multiwalker_v9", 1, state=True) as envs:
        _, infos = envs.reset(seed=0)
        envs.action_space.seed(0)
        over = np.zeros(1, np.bool_)
        while not over.any():
            before = infos["state"]
            *_, terminated, truncated, infos = envs.step(envs.action_space.sample())
            over = terminated | truncated
        assert np.array_equal(infos["state"], before)


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


def test_states_and_observations_are_of_the_same_moment(tmp_path: Any) -> None:
    kwargs = [{"fails_at": 2, "marker": str(tmp_path / "failed")}, {}]
    options = {"env_kwargs": kwargs, "on_failure": "restart", "num_workers": 2, "state": True}
    with muster.make_vec(Stating, 2, **options) as envs:
        obs, infos = envs.reset(seed=0)
        for _ in range(8):
            moments = [obs["b"][:, 0, 0].tolist(), infos["state"][:, 0].tolist()]
            assert moments[0] == moments[1]
            assert infos["_state"].all()
            obs, *_, infos = envs.step(ACTIONS)
