"""Requests of a vector env to the hosts of its envs: each is known, and what cannot be rebuilt is refused."""

from __future__ import annotations

import pickle
from typing import Any
from unittest.mock import Mock

import pytest

import muster
from muster.errors import CannotTravel, UnknownMessage, WorkerDied
from muster.hosts.env_resident import EnvResident
from muster.hosts.requests import (
    Attach,
    Call,
    EnvPlan,
    Packed,
    Reset,
    ResetArguments,
    Restart,
    SetAgain,
    SetAttr,
    packed,
)
from muster.pickling import MAKE_VEC
from muster.pool.messages import Message
from muster.transport.mail import dumps

QUESTIONS = [Attach(Mock(), Mock(), Mock()), Call(("render", (), {})), SetAttr(("gravity", [9.8]))]
POSTS = [
    Reset([0], ResetArguments([None], None)),
    Restart(0, None, None, resets_now=True, rebuilds=False, elsewhere=False, attributes={"goal": 1}),
    SetAgain({0: {"goal": 1}}),
]


class Unbuildable:
    """Cannot be rebuilt from what it is pickled to."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


@pytest.fixture
def resident(monkeypatch: pytest.MonkeyPatch) -> EnvResident:
    """A resident of two envs, whose host only notes what it is asked for."""
    host = Mock(envs=[Mock(), Mock()])
    host.build.return_value = None
    monkeypatch.setattr("muster.hosts.env_resident.EnvHost", Mock(return_value=host))
    return EnvResident(EnvPlan([Mock(), Mock()], 0), Mock(dumps=None))


def test_every_request_is_known(resident: EnvResident) -> None:
    for question in QUESTIONS:
        resident.answer(question)
    for message in POSTS:
        resident.take(message)
    asked = [name for name, *_ in resident.host.method_calls if name != "build"]  # type: ignore[attr-defined]
    assert asked == ["attach", "call", "set_attr", "reset", "restart", "set_again"]
    parts = {EnvPlan, ResetArguments}
    requests = {one for one in Message.__subclasses__() if one.__module__ == Reset.__module__}
    assert requests == {type(one) for one in QUESTIONS + POSTS} | parts


def test_an_unknown_request_is_named(resident: EnvResident) -> None:
    with pytest.raises(UnknownMessage, match="EnvResident takes no message, got 'jump'"):
        resident.take("jump")
    with pytest.raises(UnknownMessage, match="EnvResident answers no question, got 'jump'"):
        resident.answer("jump")


def test_a_host_steps_between_messages_once_it_is_attached(resident: EnvResident) -> None:
    resident.between()
    assert not resident.host.stepper.run.called  # type: ignore[attr-defined]
    resident.answer(QUESTIONS[0])
    resident.between()
    assert resident.host.stepper.run.call_count == 1  # type: ignore[attr-defined]


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


def test_what_a_user_hands_over_arrives_as_it_was() -> None:
    sent = Reset([3], ResetArguments([7], Packed(dumps({"map": "small"})), passes_options=False))
    arrived = pickle.loads(dumps(sent))
    assert repr(arrived) == repr(Reset([3], ResetArguments([7], {"map": "small"}, passes_options=False)))


@pytest.mark.parametrize("forked", [True, False])
def test_a_users_value_is_in_the_message_once(forked: bool) -> None:
    value = bytes(1_000_000), Unbuildable
    assert len(pickle.dumps(packed(value, {}, MAKE_VEC, forked=forked))) < 1_100_000


def test_what_cannot_be_rebuilt_is_refused_for_whom_it_came(resident: EnvResident) -> None:
    packed = Packed(dumps(Unbuildable()))
    sent = [
        Reset([4, 5], ResetArguments([None, None], packed)),
        Restart(5, None, packed, resets_now=True, rebuilds=False, elsewhere=False, attributes={}),
        Call(packed),
        SetAttr(packed),
    ]
    reset, restart, call, set_attr = pickle.loads(dumps(sent))
    resident.take(reset)
    resident.take(restart)
    host: Any = resident.host
    assert [call.args[0] for call in host.refuse.call_args_list] == [[4, 5], [5]]
    assert len(resident.answer(call)) == len(resident.answer(set_attr)) == 2
    refusals = [*host.refuse.call_args_list, *host.failure.call_args_list]
    assert len(refusals) == 6
    assert all(isinstance(call.args[1], CannotTravel) for call in refusals)
    assert not any(method.called for method in (host.reset, host.restart, host.call, host.set_attr))
