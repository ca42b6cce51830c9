"""The errors of vector envs, on every backend."""

from __future__ import annotations

import functools
import pickle
from copy import deepcopy
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from backend_under_test import MakeVec
from gymnasium import spaces

from muster.errors import (
    ActionError,
    CannotTravel,
    ClosedError,
    EnvError,
    NotPendingError,
    PendingError,
    SpecMismatch,
    UsageError,
)
from sample_envs import Counter, Returning


class ErrorContract:
    """The part of `BackendContract` that is about errors: mistakes of callers, and exceptions of envs."""

    def test_an_error_says_where_and_keeps_the_original(self, make: MakeVec) -> None:
        class Failing(Counter):
            def step(self, action: Any) -> Any:
                if self.count == 2 and self.seed == 1:
                    raise KeyError("lost it")
                return super().step(action)

        envs = make([Failing] * 2)
        envs.reset(seed=0)
        for _ in range(2):
            envs.step(np.zeros(2, int))
        with pytest.raises(EnvError, match=r"env 1 \(worker \d, step 2\): KeyError: 'lost it'") as caught:
            envs.step(np.zeros(2, int))
        assert isinstance(caught.value.__cause__, KeyError)
        assert "in step" in (caught.value.worker_traceback or "")
        assert (caught.value.env_index, caught.value.step, caught.value.original_type) == (1, 2, "KeyError")
        assert caught.value.batch.obs.tolist() == [[0, 1, 3]]
        assert envs.reset(seed=0)[0].tolist() == [[0, 2, 0], [1, 2, 0]]

    def test_what_an_env_returns_is_checked(self, make: MakeVec) -> None:
        cases: list[tuple[dict[str, Any], str]] = [
            ({"obs": np.zeros(1, np.float32)}, r"observation has shape \(1,\), expected shape \(3,\) of float32"),
            ({"obs": np.zeros(3, np.complex64)}, "observation has dtype complex64"),
            ({"obs": "text"}, "observation is str 'text'"),
            ({"obs": {"a": 1}}, "observation is dict"),
            ({"reward": None}, "reward must be one number, got NoneType"),
            ({"reward": np.zeros(1)}, "reward must be one number, got ndarray"),
            ({"terminated": None}, "terminated must be a bool, got NoneType"),
            ({"terminated": "no"}, "terminated must be a bool, got str"),
        ]
        envs = make([Returning, *(functools.partial(Returning, **wrong) for wrong, _ in cases)])
        envs.reset()
        envs.step(np.zeros(len(cases) + 1, int))
        for env, (_, message) in enumerate(cases, start=1):
            envs.send(np.zeros(2, int), [0, env])
            with pytest.raises(EnvError, match=message) as caught:
                envs.recv(min_envs=2)
            assert caught.value.env_index == env
            assert caught.value.batch.env_ids.tolist() == [0]
        # In step again: the next call works.
        assert not envs.step(np.zeros(len(cases) + 1, int))[1].any()
        assert len(envs.reset()[0]) == len(cases) + 1

    def test_nan_is_refused_where_asked_for(self, make: MakeVec) -> None:
        nan = np.array([0, np.nan, 0], np.float32)
        for wrong, message in (({"obs": nan}, "NaN or infinity"), ({"reward": float("inf")}, "the reward is inf")):
            envs = make([functools.partial(Returning, **wrong)] * 2, check_finite=True)
            envs.reset()
            envs.step(np.zeros(2, int))
            with pytest.raises(EnvError, match=message):
                envs.step(np.zeros(2, int))

    def test_wrong_actions_are_refused_before_anything_is_sent(self, make: MakeVec) -> None:
        envs = make([Counter] * 3)
        envs.reset(seed=0)
        wrong: list[tuple[Any, str]] = [
            (np.zeros(2, int), "expected 3 actions, one for each env, got 2 rows"),
            (np.zeros((3, 1), int), r"expected shape \(3,\), got \(3, 1\)"),
            (np.zeros(3), "expected dtype int64, got float64"),
            (np.array([0, 3, 1]), "the action for env 1 is 3, expected 0 to 2"),
            (np.array([0, -1, 1]), "the action for env 1 is -1"),
            (None, "expected an array"),
            (1, "a single number"),
            ([0, "a", 1], "expected an array"),
        ]
        for actions, message in wrong:
            with pytest.raises(ActionError, match=message):
                envs.step(actions)
        for good in (np.zeros(3, np.int32), [0, 1, 2], np.array([0, 1, 2], np.uint8)):
            assert envs.step(good)[0].shape == (3, 3)

    def test_calls_out_of_turn_are_refused_and_harmless(self, make: MakeVec) -> None:
        envs = make([Counter] * 2)
        with pytest.raises(UsageError, match=r"has not been reset; call reset\(\) first"):
            envs.step(np.zeros(2, int))
        envs.reset(seed=0)
        with pytest.raises(NotPendingError):
            envs.step_wait()
        envs.step_async(np.zeros(2, int))
        for call in (
            lambda: envs.step(np.zeros(2, int)),
            lambda: envs.step_async(np.zeros(2, int)),
            envs.reset,
            lambda: envs.get_attr("length"),
            lambda: envs.set_attr("length", 3),
        ):
            with pytest.raises(PendingError):
                call()
        with pytest.raises(NotPendingError, match="2 envs are pending; wait for 1 to 2 of the envs sent to"):
            envs.recv(min_envs=3)
        assert envs.step_wait()[0][:, 2].tolist() == [1, 1]
        assert not envs.closed
        envs.close()
        envs.close()
        assert envs.closed
        with pytest.raises(ClosedError):
            envs.step(np.zeros(2, int))
        with pytest.raises(ClosedError):
            envs.reset()

    def test_envs_must_agree(self, make: MakeVec) -> None:
        def other(space: spaces.Space[Any]) -> gym.Env[Any, Any]:
            env = Counter()
            env.observation_space = space
            return env

        for second, message in (
            (spaces.Box(-1e9, 1e9, (4,), np.float64), r"env 1 differs from env 0 in observation: shape is \(4,\)"),
            (spaces.Box(-1e9, 1e9, (3,), np.float32), "dtype is float32, expected float64"),
            (spaces.Discrete(3), "type is Discrete, expected Box"),
            (spaces.Box(-1, 1, (3,), np.float64), 'observation_mode="different"'),
        ):
            with pytest.raises(SpecMismatch, match=message):
                make([Counter, functools.partial(other, second)])

    def test_a_vector_env_says_that_it_cannot_be_pickled(self, make: MakeVec) -> None:
        envs = make([Counter] * 2)
        for duplicate in (pickle.dumps, deepcopy):
            with pytest.raises(CannotTravel, match=r"call muster\.make_vec with the same arguments"):
                duplicate(envs)
