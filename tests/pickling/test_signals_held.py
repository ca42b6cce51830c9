"""Signals that come while handlers are held back: each handler runs once, and what handlers set stays."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from interrupting import Interruption
from muster.pickling.interrupts import Uninterrupted


class Ended(Exception):
    """What a handler raises here."""


def ends(*_: object) -> None:
    raise Ended


@pytest.fixture(autouse=True)
def _handlers_as_before() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def waits_while_one_comes() -> None:
    with Uninterrupted():
        signal.raise_signal(signal.SIGUSR1)
        Uninterrupted.let_through()
        signal.raise_signal(signal.SIGINT)  # held back again
        with pytest.raises(Ended):
            Uninterrupted.let_through()


def test_a_handler_that_a_handler_sets_meanwhile_stays() -> None:
    signal.signal(signal.SIGUSR1, lambda *_: signal.signal(signal.SIGINT, ends))
    waits_while_one_comes()
    assert signal.getsignal(signal.SIGINT) is ends


def test_a_handler_that_a_handler_finds_meanwhile_and_sets_again_later_is_the_programs_own() -> None:
    found: list[Any] = []
    signal.signal(signal.SIGINT, ends)
    signal.signal(signal.SIGUSR1, lambda *_: found.append(signal.getsignal(signal.SIGINT)))
    waits_while_one_comes()
    assert found == [ends]


def test_no_signal_that_was_held_back_is_lost_whenever_another_comes() -> None:
    for moment in itertools.count():
        sent: dict[int, object] = {}
        came: dict[int, object] = {}
        signal.signal(signal.SIGUSR1, came.setdefault)  # in C: no other comes before it has noted this

        def body(sent: dict[int, object] = sent) -> None:
            with Uninterrupted():
                sent[signal.SIGUSR1] = signal.raise_signal(signal.SIGUSR1)

        is_over = not Interruption(moment).run(body)
        with Uninterrupted():
            pass
        assert came.keys() == sent.keys(), moment
        assert signal.getsignal(signal.SIGUSR1) == came.setdefault
        if is_over:
            break
    assert moment > 5


def test_a_handler_that_is_found_while_it_is_held_back_works_where_it_is_set_again() -> None:
    signal.signal(signal.SIGINT, ends)
    with Uninterrupted():
        found = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, found)
    with pytest.raises(Ended):
        signal.raise_signal(signal.SIGINT)
    with Uninterrupted():
        pass
    assert signal.getsignal(signal.SIGINT) is ends
