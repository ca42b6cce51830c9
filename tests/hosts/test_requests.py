"""Requests of a vector env to the hosts of its envs: each is known, and what cannot be rebuilt is refused."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

import muster
from envs import Scripted
from muster.errors import CannotTravel, UnknownMessage, WorkerDied
from muster.hosts.questions import Call, Packed, packer
from muster.pickling import MAKE_VEC
from muster.pool.messages import unopened
from muster.transport.mail import dumps


class Unbuildable:
    """Cannot be rebuilt from what it is pickled to."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


@pytest.mark.parametrize("backend", ["process", "thread"])
def test_an_unknown_request_closes_the_vector_env_and_is_named(backend: str) -> None:
    with muster.make_vec("CartPole-v1", 2, num_workers=2, backend=backend) as envs:
        envs.reset(seed=0)
        envs._backend._post(1, "jump")
        with pytest.raises((UnknownMessage, WorkerDied), match="EnvResident takes no message, got 'jump'"):
            envs.call("render")
        assert envs.closed


def test_a_replaced_worker_answers_after_an_unknown_request() -> None:
    with muster.make_vec("CartPole-v1", 2, num_workers=2, on_failure="restart") as envs:
        envs.reset(seed=0)
        envs._backend._post(0, "jump")
        envs.reset(seed=0)
        assert envs.call("has_wrapper_attr", "render") == (True, True)


def test_a_value_that_is_passed_on_is_not_opened() -> None:
    with unopened():
        data = dumps(Call(Packed(dumps(Unbuildable()))))
    assert isinstance(pickle.loads(data).what, Packed)


@pytest.mark.parametrize("forked", [True, False])
def test_a_users_value_is_in_the_message_once(forked: bool) -> None:
    value = bytes(1_000_000), Unbuildable
    assert len(pickle.dumps(packer(MAKE_VEC, forked=forked)(value, {}))) < 1_100_000


class Levelled(Scripted):
    """An env for whose `level` anything will do."""

    level: Any = None


def test_what_cannot_be_rebuilt_is_refused_by_the_envs_for_whom_it_came() -> None:
    unbuildable = Unbuildable()
    with muster.make_vec(Levelled, 4, num_workers=2) as envs:
        envs.reset()
        with pytest.raises(CannotTravel, match="what was sent to the worker"):
            envs.set_attr("level", [1, unbuildable, 2, 3])
        assert envs.get_attr("level") == (1, None, 2, 3)
        with pytest.raises(CannotTravel, match="what was sent to the worker"):
            envs.call("render", unbuildable)
        with pytest.raises(CannotTravel, match="what was sent to the worker"):
            envs.reset(options={"goal": unbuildable})
        envs.reset()
