"""Messages between the caller and its workers: one that a worker does not know is an error that says so."""

from __future__ import annotations

import os
import pickle
from typing import Any
from unittest.mock import Mock

import pytest

import muster
from muster.errors import CannotTravel, UnknownMessage, WorkerDied
from muster.hosts.env_resident import MessageLoop
from muster.pool.close_limits import CloseLimits
from muster.pool.closing import ClosingWorkers
from muster.pool.messages import (
    Answer,
    Attach,
    Attached,
    Build,
    BuildProgress,
    Call,
    Close,
    Closed,
    ClosingEnv,
    EnvsBuilt,
    Inherited,
    Message,
    Packed,
    Reset,
    ResetArguments,
    Restart,
    SetAgain,
    SetAttr,
    StartOrder,
    Unpacking,
    expect,
)
from muster.transport.mail import LocalMail, dumps
from slow import slow

BACKENDS = [
    *({"backend": "thread"}, {"backend": "process", "context": "forkserver"}),
    *slow(*({"backend": "process", "context": context} for context in ("fork", "spawn"))),
]
EXAMPLES = [
    Attach(Mock(), Mock()),
    Reset([0], ResetArguments([None], None)),
    Restart(0, None, None, resets_now=True, rebuilds=False, attributes={"goal": 1}),
    SetAgain({0: {"goal": 1}}),
    Call(1, ("render", (), {})),
    SetAttr(2, ("gravity", [9.8])),
    Close(),
]


class Unbuildable:
    """Cannot be rebuilt from what it is pickled to."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


def answers_to(*messages: object) -> tuple[Mock, list[object]]:
    """The host, and what was replied, once these messages have been answered and a last one closes."""
    host, replies, inbox = Mock(envs=[Mock(), Mock()]), [], iter((*messages, Close()))
    MessageLoop(host, LocalMail(), replies.append, lambda slab: slab).run(lambda: next(inbox))
    return host, replies


@pytest.mark.parametrize("options", BACKENDS, ids=lambda options: options.get("context", "thread"))
def test_an_unknown_message_ends_the_worker_and_is_named(
    options: dict[str, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    with muster.make_vec("CartPole-v1", 2, num_workers=2, **options) as envs:
        envs.reset(seed=0)
        unknown = ("jump", 3)
        if options["backend"] == "thread":
            envs._backend._send(1, unknown)
        else:
            envs._backend._send_or_replace(1, dumps(unknown))
        with pytest.raises(WorkerDied) as raised:
            envs.call("render")
        assert raised.value.worker_index == 1
        assert envs.closed
        # pytest's own sys.stderr, which a fork inherits, does not write where the worker's last words are taken from.
        said = capfd.readouterr().err if options.get("context") == "fork" else str(raised.value)
        assert "UnknownMessage: worker 1 knows no such message: ('jump', 3)" in said


def test_a_replaced_worker_answers_after_an_unknown_message() -> None:
    with muster.make_vec("CartPole-v1", 2, num_workers=2, on_failure="restart") as envs:
        envs.reset(seed=0)
        envs._backend._send_or_replace(0, dumps("jump"))
        envs.reset(seed=0)
        assert envs.call("has_wrapper_attr", "render") == (True, True)


@pytest.mark.parametrize("message", ["close", ("close", 1), None, Build(), Answer(1, [])], ids=repr)
def test_no_word_and_no_other_class_is_taken_for_a_message(message: object) -> None:
    with pytest.raises(UnknownMessage, match="knows no such message"):
        answers_to(message)


def test_no_message_is_forgotten_here() -> None:
    of_the_start, parts = {StartOrder, Build}, {ResetArguments, Inherited}
    replies = {Unpacking, BuildProgress, EnvsBuilt, Attached, Answer, ClosingEnv, Closed}
    assert set(Message.__subclasses__()) == {type(one) for one in EXAMPLES} | of_the_start | parts | replies


@pytest.mark.parametrize("message", EXAMPLES, ids=lambda message: type(message).__name__)
def test_every_message_is_known(message: Message) -> None:
    host, replies = answers_to(message)
    kinds = {Attach: [Attached], Call: [Answer], SetAttr: [Answer], Close: []}.get(type(message), [])
    assert [type(reply) for reply in replies] == [*kinds, Closed]
    assert host.stepper.run.call_count == (not isinstance(message, Close))


def test_what_a_user_hands_over_arrives_as_it_was() -> None:
    sent = Reset([3], ResetArguments([7], Packed(dumps({"map": "small"})), passes_options=False))
    arrived = pickle.loads(dumps(sent))
    assert repr(arrived) == repr(Reset([3], ResetArguments([7], {"map": "small"}, passes_options=False)))


def test_what_cannot_be_rebuilt_is_refused_for_whom_it_came() -> None:
    packed = Packed(dumps(Unbuildable()))
    sent = (
        Reset([4, 5], ResetArguments([None, None], packed)),
        Restart(5, None, packed, True, False, {}),
        Call(3, packed),
    )
    host, replies = answers_to(*pickle.loads(dumps(sent)))
    assert [call.args[0] for call in host.refuse.call_args_list] == [[4, 5], [5]]
    assert all(isinstance(call.args[1], CannotTravel) for call in host.refuse.call_args_list)
    assert isinstance(replies[0], Answer)
    assert (replies[0].number, len(replies[0].results)) == (3, 2)
    assert not host.reset.called


def test_another_answer_than_the_one_expected_is_named() -> None:
    with pytest.raises(UnknownMessage, match="expected Attached, got Build"):
        expect(Attached, Build())


def test_a_thread_that_replies_what_nobody_knows_is_named() -> None:
    with muster.make_vec("CartPole-v1", 2, backend="thread", num_workers=2) as envs:
        envs._backend._workers[0].last_reply = Build()
        with pytest.raises(UnknownMessage, match="expected Answer, got Build"):
            envs._backend._wait_for(Answer, envs._backend._workers[0], None)


def failures_after(*replies: Message) -> list[Any]:
    """What a closing caller takes for errors of ``env.close()`` once a worker has sent these replies, and ended."""
    worker = Mock(index=0, envs=range(2), starting_until=None)
    worker.nouns.envs = ()
    worker.process.has_ended.side_effect = [False, True]
    with open(os.devnull) as always_readable:
        worker.process.fileno.return_value = worker.channel.fileno.return_value = always_readable.fileno()
        worker.channel.recv.side_effect = [*replies, TimeoutError]
        pending = Mock(return_value=0)
        closing = ClosingWorkers(
            [worker], CloseLimits(), send=Mock(), doing=Mock(), count_pending=pending, calls=(), on_slice=Mock()
        )
        closing.wait()
    return closing.failures


@pytest.mark.parametrize("waiting", [Attached(), Answer(1, [])], ids=repr)
def test_closing_skips_replies_that_nobody_has_waited_for(waiting: Message) -> None:
    failures: list[Any] = [Mock()]
    assert failures_after(waiting, ClosingEnv(0), Closed(failures)) == failures


def test_an_unknown_reply_to_close_is_named() -> None:
    with pytest.raises(UnknownMessage, match="expected Closed, got Build"):
        failures_after(Build())
