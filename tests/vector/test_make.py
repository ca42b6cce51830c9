"""make_vec's options: what is accepted, what is refused, and with which words."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import muster
from muster.vector.make import make_vec
from sample_envs import Counter


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "ray"}, "backend must be one of 'serial'"),
        ({"context": "thread"}, "context must be one of 'auto', 'fork', 'forkserver', 'spawn'"),
        ({"autoreset_mode": "never"}, "autoreset_mode must be"),
        ({"observation_mode": "any"}, "observation_mode must be"),
        ({"on_failure": "ignore"}, "on_failure must be"),
        ({"num_envs": 3}, "2"),
        ({"num_workers": 0}, "num_workers must be a whole number of at least 1"),
        ({"num_workers": 3}, "num_workers must be at most 2 for 2 envs, as a worker needs"),
        (
            {"num_workers": 1, "one_env_per_process": True},
            "num_workers must be 2, for each env to have",
        ),
        (
            {"caller_steps": True, "one_env_per_process": True},
            "caller_steps must be left out where each",
        ),
        (
            {"caller_steps": True, "step_timeout": 1.0},
            "step_timeout must be left out with caller steps",
        ),
        ({"caller_steps": True, "on_failure": "restart"}, 'on_failure must be "raise" with caller steps'),
        (
            {"backend": "serial", "num_workers": 2},
            "num_workers must be left out with the serial",
        ),
        ({"copy": 0}, "copy must be True or False, got 0"),
        ({"check_finite": "no"}, "check_finite must be True or False, got 'no'"),
        ({"caller_steps": 1}, "caller_steps must be True or False, got 1"),
        ({"groups": "all"}, "groups must be a dict of each agent's group, got str: 'all'"),
        ({"wrappers": [3]}, r"wrappers\[0\] must be a callable that takes an env and returns one, got 3"),
        *(
            ({"backend": backend, "one_env_per_process": True}, "one_env_per_process must be left out with")
            for backend in ("serial", "thread")
        ),
        ({"backend": "thread", "caller_steps": True}, "caller_steps must be left out with the thread backend"),
        ({"backend": "thread", "step_timeout": 1.0}, "step_timeout must be left out with the thread backend"),
        *(({"backend": "thread", "num_workers": number}, "num_workers") for number in (0, 3, 1.5, True)),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_vec([Counter] * 2, **options)


def test_the_caller_steps_a_share_where_asked_to() -> None:
    with muster.make_vec([Counter] * 5, num_workers=2, caller_steps=True, context="fork") as envs:
        import os

        pids = [worker["pid"] for worker in envs.stats()["workers"]]
        assert len(set(pids)) == 3
        assert pids[-1] == os.getpid()


def test_numpys_flags_are_flags() -> None:
    with make_vec("CartPole-v1", 2, copy=np.False_, check_finite=np.True_, caller_steps=np.True_) as envs:
        assert envs.reset(seed=0)[0].base is not None


def test_auto_with_one_env_per_process_is_one_each_without_a_trial(capfd: pytest.CaptureFixture[str]) -> None:
    with muster.make_vec([Counter] * 3, num_workers="auto", one_env_per_process=True, context="fork") as envs:
        assert len({worker["pid"] for worker in envs.stats()["workers"]}) == 3
    assert capfd.readouterr().err == ""  # a trial says what it has found


def test_gymnasiums_names_of_the_autoreset_modes_are_known() -> None:
    from gymnasium.vector import AutoresetMode

    for mode in (AutoresetMode.SAME_STEP, "SameStep", "same_step"):
        with muster.make_vec([Counter], backend="serial", autoreset_mode=mode) as envs:
            assert envs.metadata["autoreset_mode"] is AutoresetMode.SAME_STEP


class LikeAnEnv:
    """Has what an env of Gymnasium has, and is none of its classes."""

    observation_space, action_space = gym.spaces.Box(-1, 1, (2,), np.float32), gym.spaces.Discrete(2)
    pay = 1.0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(2, np.float32), self.pay, False, False, {}

    def close(self) -> None:
        pass


def test_an_env_need_not_be_of_gymnasiums_class() -> None:
    with muster.make_vec(LikeAnEnv, 2, num_workers=1) as envs:
        envs.reset(seed=0)
        envs.set_attr("pay", [3.0, 4.0])
        assert envs.get_attr("pay") == (3.0, 4.0)
        assert envs.step(np.zeros(2, np.int64))[1].tolist() == [3.0, 4.0]
