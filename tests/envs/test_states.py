"""An env's ``state()`` is called only for those who look at it."""

from __future__ import annotations

import gc
import pickle
import weakref
from typing import Any

import numpy as np
import pytest
from agent_envs import Script
from gymnasium import spaces

import muster
from muster.errors import ClosedError


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
    "options", [{"backend": "serial"}, {"num_workers": 2}, {"num_workers": 1, "caller_steps": True}], ids=str
)


@BACKENDS
def test_nobody_is_asked_before_somebody_looks(options: dict[str, Any]) -> None:
    with muster.make_vec(Stating, 2, **options) as envs:
        _, infos = envs.reset(seed=0)
        for _ in range(3):
            *_, infos = envs.step(ACTIONS)
            assert infos["alive"]["a"].any()
            assert "action_mask" not in infos
            assert infos.get("agent_infos") is None
        assert envs.get_attr("asked") == (0, 0)
        assert infos["state"].tolist() == [[3, 1], [3, 1]]
        assert infos["_state"].tolist() == [True, True]
        assert infos["state"] is infos["state"], "asked once"
        for t in (4, 5):
            *_, infos = envs.step(ACTIONS)
            assert infos["state"][:, 0].tolist() == [t, t]
        assert envs.get_attr("asked") == (3, 3)


def test_a_look_after_the_reset_is_enough() -> None:
    with muster.make_vec(Stating, 2, backend="serial", autoreset_mode="same_step") as envs:
        assert "state" in envs.reset(seed=0)[1]
        *_, infos = envs.step(ACTIONS)
        assert infos["state"].dtype == np.float32
        assert type(infos) is dict


def test_a_look_at_final_infos_comes_too_late_but_helps_the_next() -> None:
    with muster.make_vec(Short, 1, backend="serial", autoreset_mode="same_step") as envs:
        envs.reset(seed=0)
        *_, infos = envs.step(one_env(ACTIONS))
        with pytest.raises(KeyError, match="From the next step on"):
            infos["final_info"]["state"]
        *_, infos = envs.step(one_env(ACTIONS))
        assert infos["final_info"]["state"].tolist() == [[1, 1]]


def test_a_partial_reset_after_a_look_keeps_the_other_envs_state() -> None:
    with muster.make_vec(Stating, 2, num_workers=2, autoreset_mode="disabled") as envs:
        envs.reset(seed=0)
        for _ in range(3):
            *_, infos = envs.step(ACTIONS)
        assert infos["state"].tolist() == [[3, 1], [3, 1]]
        _, infos = envs.reset(options={"reset_mask": np.array([True, False])})
        assert infos["state"].tolist() == [[0, 2], [3, 1]]
        assert infos["_state"].tolist() == [True, True]


def test_infos_do_not_keep_the_envs_alive() -> None:
    envs = muster.make_vec(Stating, 2, num_workers=1)
    _, infos = envs.reset(seed=0)
    alive = weakref.ref(envs)
    del envs
    gc.collect()
    assert alive() is None
    assert "state" not in infos


def test_states_that_were_not_asked_for_in_time_say_so() -> None:
    with muster.make_vec(Stating, 2, num_workers=2) as envs:
        envs.reset(seed=0)
        *_, old = envs.step(ACTIONS)
        envs.step(ACTIONS)
        with pytest.raises(KeyError, match=r"have moved on.*state=True"):
            old["state"]
        assert "state" not in old
        with pytest.raises(KeyError, match="nonsense"):
            old["nonsense"]
        assert sorted(old) == ["acting", "agent_terminated", "agent_truncated", "alive"]
        *_, last = envs.step(ACTIONS)
        assert last["state"].tolist() == [[3, 1], [3, 1]], "asked too late before, told from then on"
    with pytest.raises(ClosedError):
        envs.step(ACTIONS)


def test_reading_everything_asks_nobody() -> None:
    with muster.make_vec(Stating, 2, backend="serial") as envs:
        _, infos = envs.reset(seed=0)
        for everything in (dict(infos), {**infos}, infos | {}, pickle.loads(pickle.dumps(infos)), list(infos.items())):
            assert len(everything) == len(infos) == 4
        assert envs.get_attr("asked") == (0, 0)
        infos["state"] = "mine"
        assert infos["state"] == infos.get("state") == "mine"


def test_true_asks_from_the_start_and_false_never() -> None:
    with muster.make_vec(Stating, 2, backend="serial", state=True) as envs:
        _, infos = envs.reset(seed=0)
        envs.step(ACTIONS)
        assert envs.get_attr("asked") == (2, 2)
        assert infos["state"].tolist() == [[0, 1], [0, 1]]
    with muster.make_vec(Stating, 2, backend="serial", state=False) as envs:
        assert "state" not in envs.reset(seed=0)[1]
        assert envs.get_attr("asked") == (0, 0)
        assert envs.state_space is None


def test_while_others_owe_an_answer_nobody_can_be_asked() -> None:
    with muster.make_vec(Stating, 2, num_workers=2) as envs:
        envs.reset(seed=0)
        envs.send({name: actions[:1] for name, actions in ACTIONS.items()}, [0])
        first = envs.recv(1)
        envs.send({name: actions[1:] for name, actions in ACTIONS.items()}, [1])
        assert "state" not in first.infos  # but wished for, from now on
        second = envs.recv(1)
        assert second.env_ids.tolist() == [1]
        assert second.infos["state"][:, 0].tolist() == [1]
        envs.send(ACTIONS)
        assert envs.recv(2).infos["state"][:, 0].tolist() == [2, 2]


@pytest.mark.parametrize("wish", [None, True])
def test_states_and_observations_are_of_the_same_moment(wish: bool | None, tmp_path: Any) -> None:
    kwargs = [{"fails_at": 2, "marker": str(tmp_path / "failed")}, {}]
    options = {"env_kwargs": kwargs, "on_failure": "restart", "num_workers": 2, "state": wish}
    with muster.make_vec(Stating, 2, **options) as envs:
        obs, infos = envs.reset(seed=0)
        for _ in range(8):
            moments = [obs["b"][:, 0, 0].tolist(), infos["state"][:, 0].tolist()]
            assert moments[0] == moments[1]
            assert infos["_state"].all()
            obs, *_, infos = envs.step(ACTIONS)
