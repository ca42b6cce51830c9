"""The contract of every pool, with residents that know no env. A subclass says how a pool is made:

    class TestMine(PoolContract):
        def make_pool(self, resident, plans, hooks, **options):
            return MyPool(resident, plans, hooks, **options)

`PoolContract` holds what pools of processes and of threads promise, `ProcessPoolContract` in addition what only
processes can. `StartContract` is the part of that which depends on how processes start.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pool_residents as residents
import pytest
from pool_residents import Doing, Echo, Hooks, Notes, Reported, Reports, Waits, plan_for

from hanging import released
from muster.errors import CannotTravel, ClosedError, UnknownMessage, UsageError, WorkerDied, WorkerTimeout
from muster.pool import limits
from muster.pool import pool as pool_module
from muster.pool.closing import close_abandoned
from muster.pool.deaths import Nouns
from muster.pool.limits import AT_ONCE, CloseLimits, Limit
from muster.pool.place import Plan
from muster.pool.verbs import Answered, Round, Successor
from muster.pool.worker import Resident
from processes import wait_for_end

MakePool = Callable[..., Any]
BIG = bytes(4 << 20)  # more than a pipe holds
SOON = CloseLimits(0.3, 60.0, 0.3, "close_timeout=0.3")


class PoolUnderTest:
    """A pool, described by how it is made."""

    # What a pool does to a worker that does not close in time.
    cut_verb: ClassVar[str] = "killed"
    # A question that ends a worker, so that its pool asks what it was doing.
    ends_a_worker: ClassVar[Callable[[Echo], object]] = staticmethod(residents.die)

    def make_pool(self, resident: type[Resident], plans: Sequence[Plan], hooks: Hooks, **options: Any) -> Any:
        """Makes a pool that is not started. options: of the pool's own."""
        raise NotImplementedError

    @pytest.fixture
    def make(self, leaves_nothing: None) -> Iterator[MakePool]:
        """Provides a function that starts pools. They are closed after the test, and have to leave nothing behind.

        The function takes the contents of the plans, hooks, the resident, and arguments of `Pool.start`.
        """
        made: list[Any] = []

        def make(
            *contents: Any,
            hooks: Hooks | None = None,
            resident: type[Resident] = Echo,
            start: bool = True,
            **options: Any,
        ) -> Any:
            plans = [plan_for(i, content, len(contents)) for i, content in enumerate(contents)]
            made.append(self.make_pool(resident, plans, hooks or Hooks(), **options))
            if start:
                made[-1].start()
            return made[-1]

        with released():
            yield make
            residents.go_on.set()
            for pool in made:
                pool.close(AT_ONCE)
        made.clear()


_rounds: weakref.WeakKeyDictionary[Any, Round] = weakref.WeakKeyDictionary()


def round_of(pool: Any) -> Round:
    """The one round of questions that these tests ask."""
    return _rounds.setdefault(pool, pool.round())


def ask(pool: Any, place: int, question: object, limit_s: float | None = None) -> None:
    limit = None if limit_s is None else Limit(limit_s, f"limit={limit_s:g}")
    round_of(pool).ask({place: question}, "at work", limit, "at work")


def take(pool: Any, timeout_s: float | None = None, at_least: int | None = None, places: Any = None) -> list[Any]:
    """The answers that have come once `at_least` are there, in the order of their arrival."""
    asked = round_of(pool)
    return [asked.answers.pop(place) for place in asked.wait(at_least, timeout_s, places)]


def post(pool: Any, place: int, message: object, limit_s: float | None = None) -> None:
    limit = None if limit_s is None else Limit(limit_s, f"limit={limit_s:g}")
    pool.post(place, pool.sealed(message), limit)


def answer(pool: Any, place: int, question: object) -> Any:
    """The answer of one place, which owes no other."""
    ask(pool, place, question)
    (one,) = take(pool, places=[place])
    assert isinstance(one, Answered)
    return one.content


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


@contextlib.contextmanager
def interrupted_soon() -> Iterator[None]:
    """Presses Ctrl-C while the body waits, and expects it to be raised."""
    timer = threading.Timer(0.2, interrupt)
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        timer.join()


class Owner:
    """Has a pool, and closes it when nobody refers to it any more; nobody below refers to it."""

    def __init__(self, pool: Any) -> None:
        self.pool = pool
        self.itself = self  # only a collection finds it
        weakref.finalize(self, close_abandoned, pool.close)


def interrupts_at(name: str) -> Callable[[str], None]:
    """Presses Ctrl-C, once, in the hook of this name."""
    left = [name]

    def at(hook: str) -> None:
        if hook in left:
            left.remove(hook)
            interrupt()

    return at


class PoolContract(PoolUnderTest):
    """What pools of processes and of threads promise."""

    # ---- start

    def test_start_returns_what_each_resident_says_of_itself(self, make: MakePool) -> None:
        pool = make("a", "b", start=False)
        assert pool.start() == ["a", "b"]
        assert [answer(pool, i, residents.place) for i in range(2)] == [0, 1]

    def test_the_first_place_that_failed_is_raised_and_nothing_is_left(self, make: MakePool) -> None:
        pool = make(None, Doing(residents.fail), Doing(residents.fail), start=False)
        with pytest.raises(Reported, match="^place 1: ValueError: no, says place 1$") as raised:
            pool.start()
        assert isinstance(raised.value.__cause__, ValueError)
        assert pool.closed

    def test_a_plan_that_hangs_is_over_the_limit_of_the_start(self, make: MakePool) -> None:
        pool = make(Doing(residents.hang), start=False, start_timeout_s=1.0)
        with pytest.raises(WorkerTimeout, match="worker 0 .*start_timeout=1.0"):
            pool.start()

    def test_processes_are_known_to_any_thread(self, make: MakePool) -> None:
        pool = make(None, None)
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.extend(pool.processes()))
        thread.start()
        thread.join()
        assert [pid for pid, _ in found] == [answer(pool, i, residents.pid) for i in range(2)]
        assert all(usage.anonymous_bytes and usage.handles for _, usage in found)

    # ---- post, ask, take, forget

    def test_answers_come_in_the_order_in_which_they_arrive(self, make: MakePool, tmp_path: Path) -> None:
        pool, gate = make(None, None, None), tmp_path / "gate"
        ask(pool, 0, Waits(gate))
        ask(pool, 1, "at once")
        ask(pool, 2, Waits(gate))
        assert take(pool, at_least=1) == [Answered(1, "at once")]
        assert take(pool, 0.0) == []
        gate.touch()
        assert take(pool, places=[2]) == [Answered(2, "gate")]
        assert take(pool) == [Answered(0, "gate")]
        assert take(pool) == take(pool, at_least=2) == []  # nothing is owed

    def test_a_timeout_and_a_ctrl_c_lose_no_answer(self, make: MakePool, tmp_path: Path) -> None:
        pool, gate = make(None, None), tmp_path / "gate"
        ask(pool, 0, "early")
        ask(pool, 1, Waits(gate))
        assert take(pool, 0.05, places=[1]) == []
        with interrupted_soon():
            take(pool)
        gate.touch()
        assert take(pool) == [Answered(0, "early"), Answered(1, "gate")]

    def test_posts_are_taken_in_order_before_the_question_after_them(self, make: MakePool) -> None:
        hooks = Hooks()
        pool = make(None, None, hooks=hooks)
        sealed = pool.sealed({"for": "all"})
        for place in (0, 1):
            pool.post(place, sealed)
        post(pool, 1, 2)
        assert [answer(pool, i, residents.posts) for i in range(2)] == [[{"for": "all"}], [{"for": "all"}, 2]]
        assert hooks.rung == [0, 1, 1, 0, 1]

    def test_forgotten_answers_are_dropped_when_they_come(self, make: MakePool, tmp_path: Path) -> None:
        pool, gate = make(None, None), tmp_path / "gate"
        for _ in range(2):
            ask(pool, 0, Waits(gate))
            ask(pool, 1, "arrives")
            assert take(pool, at_least=1) == [Answered(1, "arrives")]
            ask(pool, 1, "arrives, and is not taken")
            take(pool, 0.05, places=[0])
            round_of(pool).drop([0, 1])
        assert take(pool) == []
        ask(pool, 0, "new")
        ask(pool, 1, "newer")
        gate.touch()
        assert sorted(take(pool)) == [Answered(0, "new"), Answered(1, "newer")]

    def test_asked_again_in_a_round_an_answer_is_dropped_and_in_another_awaited(
        self, make: MakePool, tmp_path: Path
    ) -> None:
        pool, gate = make(None, None), tmp_path / "gate"
        one, other = pool.round(), pool.round()
        one.ask({0: Waits(gate), 1: "there"}, "waiting")
        assert one.wait(at_least=1) == [1]
        one.ask({0: "dropped that"}, "waiting")
        threading.Timer(0.2, gate.touch).start()
        other.ask({0: "other", 1: "others"}, "at work")
        assert gate.exists()  # awaited first, and not taken
        assert [one.answers[place].content for place in (0, 1)] == ["dropped that", "there"]
        assert sorted(other.wait()) == [0, 1]
        assert [other.answers.pop(place).content for place in (0, 1)] == ["other", "others"]
        assert one.wait() == [1, 0]

    def test_the_book_says_what_was_asked_since_when(self, make: MakePool, tmp_path: Path) -> None:
        pool, gate = make(None, None), tmp_path / "gate"
        asked = pool.round()
        asked.ask({1: Waits(gate)}, "waiting for a gate")
        with interrupted_soon():
            asked.wait()
        ((place, words),) = pool.book().items()
        assert place == 1
        assert float(words.removeprefix("waiting for a gate for ").removesuffix(" s")) >= 0.2
        gate.touch()
        asked.wait()
        assert pool.book() == {}

    @pytest.mark.parametrize("place", [2, -1])
    def test_there_is_no_such_place(self, make: MakePool, place: int) -> None:
        pool = make(None, None)
        ask(pool, 0, 1)
        for verb in (
            lambda: post(pool, place, 1),
            lambda: ask(pool, place, 1),
            lambda: take(pool, places=[0, place]),
        ):
            with pytest.raises(UsageError, match=f"the pool has no place {place}; it has 2, from 0 on"):
                verb()
        assert take(pool) == [Answered(0, 1)]

    def test_a_closed_pool_says_so(self, make: MakePool) -> None:
        pool = make(None)
        assert pool.close(CloseLimits()) == [(0, [])]
        assert pool.closed
        for verb in (
            lambda: post(pool, 0, 1),
            lambda: ask(pool, 0, 1),
            lambda: take(pool),
            lambda: take(pool, 0.0, 1, [0]),
            lambda: pool.watch(0.0),
        ):
            with pytest.raises(ClosedError, match="closed"):
                verb()
        assert pool.close(CloseLimits()) == []

    # ---- errors of residents

    @pytest.mark.parametrize(
        ("send", "verb"), [(post, "takes no message"), (ask, "answers no question")], ids=["post", "ask"]
    )
    def test_an_unknown_message_is_named(self, make: MakePool, send: Callable[..., None], verb: str) -> None:
        pool = make(None, None, resident=Resident)
        send(pool, 1, "jump")
        with self.ended_by("UnknownMessage", f"Resident {verb}, got 'jump'"):
            wait_for_the_end(pool)
        assert pool.closed

    def test_an_exception_closes_the_pool(self, make: MakePool) -> None:
        pool = make(None, None)
        ask(pool, 0, "answered")
        ask(pool, 1, residents.fail)
        with self.ended_by("ValueError", "no, says place 1"):
            wait_for_the_end(pool)
        assert pool.closed

    def ended_by(self, type_name: str, message: str) -> Any:
        """Expects the report of an exception of the resident in place 1."""
        return pytest.raises(Reported, match=f"^place 1: (muster.errors.)?{type_name}: {message}$")

    # ---- interrupts, collections, forks

    def test_what_ends_a_whole_halfway_closes_the_pool(self, make: MakePool) -> None:
        pool = make(None, None)
        with pytest.raises(UsageError), pool.whole():
            raise UsageError("before anything was done")
        assert not pool.closed
        with pytest.raises(ZeroDivisionError), pool.whole():
            post(pool, 0, 1)
            raise ZeroDivisionError
        assert pool.closed

    def test_ctrl_c_between_two_messages_waits_for_the_second(self, make: MakePool) -> None:
        hooks = Hooks()
        pool = make(None, None, hooks=hooks)
        hooks.at = lambda _: len(hooks.rung) == 1 and interrupt()
        with pytest.raises(KeyboardInterrupt), pool.whole():
            for place in range(2):
                post(pool, place, 1)
        assert len(hooks.rung) == 2
        assert not pool.closed

    def test_ctrl_c_ends_a_start(self, make: MakePool) -> None:
        pool = make(None, Doing(residents.hang), start=False)
        with interrupted_soon():
            pool.start()
        assert pool.closed

    def test_ctrl_c_in_a_question_waits_until_it_is_asked(self, make: MakePool) -> None:
        pool = make(None, hooks=Hooks(at=interrupts_at("ring")))
        with pytest.raises(KeyboardInterrupt):
            ask(pool, 0, "interrupted")
        assert take(pool) == [Answered(0, "interrupted")]

    @pytest.mark.parametrize("hook", ["doing", "pending"])
    def test_ctrl_c_in_a_hook_closes_the_pool(self, make: MakePool, hook: str) -> None:
        pool = make(None, None, hooks=Hooks(at=interrupts_at(hook)))
        with pytest.raises(KeyboardInterrupt):
            if hook == "pending":
                pool.close(CloseLimits())
            post(pool, 1, self.ends_a_worker)
            wait_for_the_end(pool)
        assert pool.closed

    def test_ctrl_c_ends_a_close(self, make: MakePool) -> None:
        pool = make(Doing(close=residents.hang_in_the_first_part))
        with interrupted_soon():
            pool.close(CloseLimits())

    def test_a_pool_that_nobody_owns_closes_in_the_middle_of_a_verb_of_another(
        self, make: MakePool, tmp_path: Path
    ) -> None:
        def dropped() -> weakref.ref[Any]:
            owner = Owner(make(None))
            return weakref.ref(owner)

        gone: list[bool] = []

        def at(_: str) -> None:
            one = dropped()
            gc.collect()
            gone.append(one() is None)

        hooks = Hooks()
        pool = make(None, hooks=hooks)
        hooks.at = at
        assert answer(pool, 0, 1) == 1
        pool.close(CloseLimits())
        assert len(gone) > 2
        assert all(gone)

    def test_a_forked_child_leaves_it_alone(self, make: MakePool) -> None:
        pool = make(None)
        child = os.fork()
        if child == 0:
            os._exit(0 if pool.close(CloseLimits()) == [] and not pool.closed else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert answer(pool, 0, "still there?") == "still there?"

    # ---- close

    def test_close_returns_what_the_residents_say(self, make: MakePool) -> None:
        pool = make(None, None)
        post(pool, 1, "bye")
        assert pool.close(CloseLimits()) == [(0, []), (1, ["bye"])]

    def test_close_skips_answers_that_nobody_has_taken(self, make: MakePool) -> None:
        pool = make(None, None)
        for place in range(2):
            ask(pool, place, Reports(3))
        assert pool.close(CloseLimits()) == [(0, []), (1, [])]

    def test_each_part_has_the_time(self, make: MakePool) -> None:
        pool = make(Doing(close=functools.partial(residents.pause, 0.8)), None)
        limits = CloseLimits(1.2, 60.0, 1.2, "close_timeout=1.2")
        assert pool.close(limits) == [(0, []), (1, [])]

    def test_a_resident_that_does_not_close_in_time_is_named_with_its_stack(self, make: MakePool) -> None:
        pool = make(None, Doing(close=residents.hang_in_the_first_part))
        with pytest.warns(RuntimeWarning) as warned:
            assert (0, []) in pool.close(SOON)
        (warning,) = warned
        assert f"worker 1 was {self.cut_verb} in close() of its resident, which did not end within" in str(warning)
        assert "in hang" in str(warning)

    def test_an_exception_in_place_of_closing_is_warned_of(self, make: MakePool) -> None:
        pool = make(None, Doing(close=residents.fail))
        with pytest.warns(RuntimeWarning, match="worker 1 ended before its resident was closed: .*no, says place 1"):
            assert pool.close(CloseLimits()) == [(0, [])]

    def test_a_resident_that_is_busy_is_given_up(self, make: MakePool) -> None:
        pool = make(None, None)
        ask(pool, 1, residents.hang)
        take(pool, 0.1)
        with pytest.warns(RuntimeWarning) as warned:
            pool.close(SOON)
        (warning,) = warned
        assert f"worker 1 was {self.cut_verb} before it closed its resident: it was at work for" in str(warning)

    def test_a_close_in_another_thread_ends_the_wait(self, make: MakePool, tmp_path: Path) -> None:
        pool = make(None, None)
        ask(pool, 0, Waits(tmp_path / "gate"))
        caught: list[BaseException] = []

        def take_all() -> None:
            try:
                take(pool)
            except BaseException as error:
                caught.append(error)

        thread = threading.Thread(target=take_all)
        thread.start()
        time.sleep(0.1)
        pool.close(AT_ONCE)
        thread.join(10.0)
        assert [type(error) for error in caught] == [ClosedError]


def wait_for_the_end(pool: Any) -> None:
    """Waits until what ends a pool is raised."""
    while True:
        take(pool)
        pool.watch(0.0)
        time.sleep(0.005)


class Judge:
    """Has the others wait until the first place has reported three times: that it begins, and two parts."""

    has_room = False

    def __init__(self, hear: Callable[[Any], object]) -> None:
        self.heard, self._hear = list[Any](), hear

    @property
    def others_begin(self) -> bool:
        return len(self.heard) > 2

    def look(self, reports: list[Any]) -> None:
        while reports:
            self.heard.append(self._hear(reports.pop(0)))


class StartContract(PoolUnderTest):
    """The part of `ProcessPoolContract` that depends on how processes start; for further ways to start them."""

    context: ClassVar[str]
    # How long a worker takes at most to start, on a busy machine.
    patience_s: ClassVar[float] = 3.0

    @pytest.mark.parametrize("phase", ["set-up", "unpacking", "build"])
    def test_a_death_in_a_start_is_named_and_leaves_nothing(self, make: MakePool, phase: str) -> None:
        if phase == "unpacking" and self.context == "fork":
            pytest.skip("inherits the plan")
        resident = residents.DiesInSetUp if phase == "set-up" else Echo
        plan = {"unpacking": residents.DiesInUnpacking(), "build": Doing(residents.die)}.get(phase)
        pool = make(None, plan, resident=resident, start=False)
        with pytest.raises(WorkerDied, match=f"worker {'[01]' if phase == 'set-up' else 1} died: .*SIGKILL") as raised:
            pool.start()
        assert raised.value.doing.startswith("building its envs for")
        assert pool.closed

    def test_a_plan_that_hangs_is_named_with_its_stack(self, make: MakePool) -> None:
        unpacks = self.context != "fork"
        plan = residents.HangsInUnpacking() if unpacks else Doing(residents.hang)
        nouns = Nouns(rebuilding=" It is unpacking.")
        pool = make(plan, start=False, start_timeout_s=self.patience_s, nouns=nouns)
        with pytest.raises(WorkerTimeout, match=f"worker 0 .*start_timeout={self.patience_s}") as raised:
            pool.start()
        assert raised.value.stack is not None
        assert "in hang" in raised.value.stack
        assert (raised.value.hint == " It is unpacking.") == unpacks

    def test_a_judge_hears_of_the_first_place_before_the_others_build(self, make: MakePool, tmp_path: Path) -> None:
        notes = tmp_path / "notes"
        notes.touch()
        judge = Judge(lambda report: (report, notes.read_text().splitlines()))
        pool = make(Doing(Notes(notes, "builds", Reports(3))), Doing(Notes(notes, "builds")), start=False)
        pool.start(judge)
        assert [report for report, _ in judge.heard[:3]] == [(), 0, 1]
        assert [built for _, built in judge.heard[1:3]] == [["builds 0"]] * 2
        assert notes.read_text().splitlines() == ["builds 0", "builds 1"]

    def test_it_builds_while_its_owner_does_something(self, make: MakePool, tmp_path: Path) -> None:
        gate = tmp_path / "gate"
        pool = make(Doing(Waits(gate)), start=False)
        pool.start(meanwhile=gate.touch)
        assert answer(pool, 0, "ready") == "ready"


class ProcessPoolContract(StartContract, PoolContract):
    """What pools of processes promise in addition."""

    # ---- start

    @pytest.mark.parametrize(
        ("resident", "error"),
        [
            ("nowhere:Resident", "ModuleNotFoundError: No module named 'nowhere'"),
            ("pool_residents:Nobody", "AttributeError: module 'pool_residents' has no attribute 'Nobody'"),
        ],
    )
    def test_an_unknown_resident_is_named(self, make: MakePool, resident: str, error: str) -> None:
        pool = make(None, resident=resident, start=False)
        with pytest.raises(Reported, match=error):
            pool.start()
        assert pool.closed

    @pytest.mark.parametrize("fails", ["judge", "resident"])
    def test_where_the_first_place_is_refused_no_other_builds(self, make: MakePool, tmp_path: Path, fails: str) -> None:
        def refuse(_: object) -> None:
            raise MemoryError("too big")

        notes = tmp_path / "notes"
        first = Doing(Reports(1) if fails == "judge" else residents.fail)
        pool = make(first, Doing(Notes(notes, "builds")), start=False)
        with pytest.raises(MemoryError if fails == "judge" else Reported):
            pool.start(Judge(refuse) if fails == "judge" else Judge(lambda _: None))
        assert pool.closed
        assert not notes.exists()

    def test_a_pool_may_have_no_place(self, make: MakePool) -> None:
        pool = make(start=False)
        assert pool.start() == []
        assert take(pool) == []
        assert pool.close(CloseLimits()) == []

    # ---- messages

    @pytest.mark.parametrize(
        ("question", "type_name", "message"),
        [
            (residents.lock, "TypeError", "cannot pickle '_thread.lock' object"),
            (residents.fail_at_home, "pool_residents.StaysAtHome", "hello"),
        ],
        ids=["answer", "exception"],
    )
    def test_what_cannot_be_pickled_is_reported(
        self, make: MakePool, question: Any, type_name: str, message: str
    ) -> None:
        pool = make(None, None)
        ask(pool, 1, question)
        with self.ended_by(type_name, message):
            take(pool)

    def test_an_answer_that_cannot_be_rebuilt_costs_its_place(self, make: MakePool) -> None:
        hooks = Hooks(Successor("new"))
        pool = make(None, None, hooks=hooks)
        ask(pool, 0, "fine")
        ask(pool, 1, residents.broken)
        fine, lost = sorted(take(pool))
        assert fine == Answered(0, "fine")
        assert isinstance(lost.error, CannotTravel)
        assert "worker 1 has sent what cannot be rebuilt in its owner: ValueError: invalid literal" in str(lost.error)
        assert answer(pool, 1, "and now?") == "and now?"

    def test_last_words_that_cannot_be_rebuilt_are_warned_of(self, make: MakePool) -> None:
        pool = make(None, None)
        post(pool, 0, residents.post_broken)
        with pytest.warns(RuntimeWarning, match="worker 0 has sent what cannot be rebuilt in its owner"):
            assert pool.close(CloseLimits()) == [(1, [])]

    def test_a_big_answer_does_not_block_a_big_message(self, make: MakePool) -> None:
        pool = make(None)
        ask(pool, 0, BIG)
        post(pool, 0, BIG)
        assert take(pool) == [Answered(0, BIG)]
        assert answer(pool, 0, residents.posts) == [BIG]

    def test_reports_renew_the_limit_of_an_answer(self, make: MakePool) -> None:
        pool = make(None)
        ask(pool, 0, Reports(8, 0.25), limit_s=1.5)
        assert take(pool) == [Answered(0, "reported")]

    def test_a_resident_that_sends_what_only_owners_send_is_named(self, make: MakePool) -> None:
        pool = make(None)
        post(pool, 0, residents.speak_unknown)
        with pytest.raises(UnknownMessage, match="worker 0 has sent what no worker sends here: Build()"):
            wait_for_the_end(pool)
        assert pool.closed

    def test_the_same_is_named_by_close(self, make: MakePool) -> None:
        pool = make(None)
        post(pool, 0, residents.speak_unknown)
        with pytest.raises(UnknownMessage, match="expected Closed, got Build()"):
            pool.close(CloseLimits())

    def test_log_records_are_delivered_by_take(self, make: MakePool, caplog: pytest.LogCaptureFixture) -> None:
        pool = make(None)
        assert answer(pool, 0, residents.log) is None
        pool.watch(0.0)
        assert [record.getMessage() for record in caplog.records] == ["logged in place 0"]

    # ---- deaths

    def test_an_idle_worker_that_dies_closes_the_pool(self, make: MakePool) -> None:
        pool = make(None, None)
        kill(pool, 1)
        with pytest.raises(WorkerDied, match="worker 1 died: .*SIGKILL") as raised:
            wait_for_the_end(pool)
        assert raised.value.doing == "at work in place 1"
        assert pool.closed

    def test_a_worker_that_dies_answering_closes_the_pool(self, make: MakePool, tmp_path: Path) -> None:
        pool = make(None, None)
        ask(pool, 0, Waits(tmp_path / "gate"))
        ask(pool, 1, residents.die)
        with pytest.raises(WorkerDied, match="worker 1 died: .*SIGKILL"):
            take(pool)
        assert pool.closed

    def test_an_answer_that_came_before_the_death_arrives(self, make: MakePool) -> None:
        pool = make(None, None, hooks=Hooks(Successor(None)))
        ask(pool, 0, "last")
        kill(pool, 0, pause_s=0.3)
        assert take(pool) == [Answered(0, "last")]

    def test_a_worker_that_dies_closing_is_not_waited_for(self, make: MakePool) -> None:
        pool = make(Doing(close=residents.die), None)
        assert pool.close(CloseLimits()) == [(1, [])]

    def test_a_worker_that_begins_to_close_while_its_stack_is_asked_for_is_not_killed(
        self, make: MakePool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pool = make(Doing(close=residents.hang_shortly))  # for 0.6 s in all
        ask(pool, 0, residents.hang_shortly)
        asked: list[Any] = []

        def slowly(workers: list[Any]) -> list[str]:
            asked.extend(workers)
            time.sleep(0.5 * len(workers))
            return ["" for _ in workers]

        monkeypatch.setattr(pool_module, "last_words", slowly)
        assert pool.close(CloseLimits(busy_s=0.1)) == [(0, [])]
        assert asked

    # ---- SIGSTOP

    def test_a_worker_that_was_stopped_is_over_the_limit_of_its_answer(self, make: MakePool) -> None:
        pool = make(None, None)
        ask(pool, 1, residents.stop, limit_s=0.3)
        with pytest.raises(WorkerTimeout, match="worker 1 did not answer .*limit=0.3.*at work for") as raised:
            take(pool)
        assert raised.value.stack is not None
        assert "does not react to signals" in raised.value.stack
        assert pool.closed

    def test_a_worker_that_was_stopped_is_killed_by_close(self, make: MakePool) -> None:
        pool = make(None, None)
        os.kill(pool.processes()[1][0], signal.SIGSTOP)
        with pytest.warns(RuntimeWarning, match="worker 1 was killed before it closed its resident") as warned:
            assert pool.close(SOON) == [(0, [])]
        assert "does not react to signals" in str(warned[0].message)

    def test_a_message_that_a_stopped_worker_does_not_take_costs_its_place(self, make: MakePool) -> None:
        hooks = Hooks(Successor(None))
        pool = make(None, hooks=hooks)
        os.kill(pool.processes()[0][0], signal.SIGSTOP)
        post(pool, 0, BIG, limit_s=0.3)
        assert ["did not answer for 0.3 s (limit=0.3)" in reason for _, reason in hooks.lost] == [True]
        assert answer(pool, 0, residents.posts) == []

    def test_ctrl_c_in_half_a_message_closes_the_pool(self, make: MakePool) -> None:
        pool = make(None)
        os.kill(pool.processes()[0][0], signal.SIGSTOP)
        with interrupted_soon():
            post(pool, 0, BIG)
        assert pool.closed

    # ---- successors

    def test_a_successor_takes_the_place_and_the_posts(self, make: MakePool, tmp_path: Path) -> None:
        gate = tmp_path / "gate"
        hooks = Hooks(Successor(Doing(Waits(gate)), ["from its owner"]))
        pool = make(None, None, hooks=hooks)
        ask(pool, 0, "stays")
        ask(pool, 1, residents.die)
        stays, lost = sorted(take(pool))
        assert (stays, lost.place) == (Answered(0, "stays"), 1)
        assert isinstance(lost.error, WorkerDied)
        assert hooks.lost == [(1, str(lost.error))]
        post(pool, 1, "while it starts")  # kept
        ask(pool, 1, residents.posts)
        assert pool.ready_at(1) is None
        assert take(pool, 0.0) == []
        gate.touch()
        assert take(pool) == [Answered(1, ["from its owner", "while it starts"])]
        assert pool.ready_at(1) is not None

    def test_a_loss_that_nobody_waits_for_is_no_answer(self, make: MakePool) -> None:
        hooks = Hooks(Successor(None), Successor(None))
        pool = make(None, hooks=hooks)
        kill(pool, 0)
        while not hooks.lost:
            pool.watch(0.0)
        assert take(pool) == []
        ask(pool, 0, residents.die)
        round_of(pool).drop([0])
        while len(hooks.lost) == 1:
            pool.watch(0.0)
        assert answer(pool, 0, "new") == "new"

    def test_a_close_in_another_thread_comes_before_a_successor(self, make: MakePool) -> None:
        def at(hook: str) -> None:
            if hook == "on_lost":
                thread = threading.Thread(target=pool.close, args=[AT_ONCE])
                thread.start()
                thread.join()

        pool = make(None, hooks=Hooks(Successor(None), at=at))
        kill(pool, 0)
        with pytest.raises(ClosedError):
            wait_for_the_end(pool)

    @pytest.mark.parametrize(
        ("build", "error"),
        [(residents.die, "worker 0 died"), (residents.fail, "place 0: ValueError: no")],
        ids=["dies", "raises"],
    )
    def test_a_successor_that_fails_is_followed_by_the_next(
        self, make: MakePool, build: Callable[[Echo], object], error: str
    ) -> None:
        hooks = Hooks(Successor(Doing(build)), Successor(Doing(build)), Successor("third"))
        pool = make(None, hooks=hooks)
        ask(pool, 0, residents.die)
        take(pool)
        wait_until_ready(pool, 0)
        assert answer(pool, 0, residents.plan) == "third"
        first, second, third = (reason for _, reason in hooks.lost)
        assert second.startswith(error)
        assert second.endswith(f" (while worker 0 was replaced, after: {first})")
        assert third.endswith(f" (while worker 0 was replaced, after: {first})")

    def test_a_loss_is_an_error_once_there_is_no_successor(self, make: MakePool) -> None:
        hooks = Hooks(Successor(Doing(residents.die)))
        pool = make(None, hooks=hooks)
        ask(pool, 0, residents.die)
        take(pool)
        with pytest.raises(WorkerDied, match="building its envs"):
            answer(pool, 0, "new")
        assert pool.closed

    def test_a_successor_that_hangs_is_over_the_limit_of_the_start(self, make: MakePool) -> None:
        hooks = Hooks(Successor(Doing(residents.hang)), Successor(None))
        pool = make(None, hooks=hooks, start_timeout_s=self.patience_s)
        ask(pool, 0, residents.die)
        take(pool)
        wait_until_ready(pool, 0)
        assert f"start_timeout={self.patience_s}" in hooks.lost[1][1]
        assert "in hang" in hooks.lost[1][1]

    def test_a_resident_that_is_replaced_closes_first(self, make: MakePool, tmp_path: Path) -> None:
        notes = tmp_path / "notes"
        pool = make(Doing(close=Notes(notes, "closes")))
        ask(pool, 0, residents.hang_shortly)
        pool.replace(0, "it is old", Successor(Doing(Notes(notes, "builds")), ["hello"]), CloseLimits())
        (lost,) = take(pool)
        assert (lost.place, str(lost.error)) == (0, "worker 0 was replaced: it is old")
        assert answer(pool, 0, residents.posts) == ["hello"]
        assert notes.read_text().splitlines() == ["closes 0", "closes 0", "builds 0"]

    def test_a_resident_that_is_replaced_and_does_not_close_is_cut_off(self, make: MakePool) -> None:
        pool = make(Doing(close=residents.hang))
        pool.replace(0, "it is old", Successor("new"), SOON)
        with pytest.warns(RuntimeWarning, match="worker 0 was killed in close"):
            assert answer(pool, 0, residents.plan) == "new"

    def test_a_step_over_its_limit_loses_the_worker(self, make: MakePool) -> None:
        hooks = Hooks(Successor("new"))
        pool = make(None, hooks=hooks)
        ask(pool, 0, residents.hang)
        take(pool, 0.2)
        pool.lose(0, "step_timeout=1", 1.5)
        assert [lost.place for lost in take(pool)] == [0]
        assert "worker 0 did not answer for 1.5 s (step_timeout=1)" in hooks.lost[0][1]
        assert "in hang" in hooks.lost[0][1]
        assert answer(pool, 0, residents.plan) == "new"

    def test_a_successor_that_still_starts_closes_its_resident(
        self, make: MakePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        notes = tmp_path / "notes"
        hooks = Hooks(Successor(Doing(residents.hang_shortly, Notes(notes, "closes")), ["kept"]), pending=1)
        pool = make(None, hooks=hooks)
        monkeypatch.setattr(limits, "HURRIED_S", 10.0)
        kill(pool, 0)
        while not hooks.lost:
            pool.watch(0.0)
        post(pool, 0, "kept, too")
        assert pool.close(CloseLimits()) == [(0, [])]
        assert notes.read_text() == "closes 0\n" * residents.NUM_PARTS

    def test_a_busy_place_keeps_no_limit_of_another_from_being_watched(self, make: MakePool) -> None:
        pool = make(None, None)
        ask(pool, 0, Reports(10_000, 0.002))
        ask(pool, 1, residents.hang, limit_s=0.3)
        with pytest.raises(WorkerTimeout, match="worker 1 did not answer .*limit=0.3"):
            take(pool)

    # ---- Ctrl-C in what the owner does meanwhile

    def test_a_loop_that_is_interrupted_at_random_goes_on(self, make: MakePool) -> None:
        pool = make(None, None)
        for i in range(60):
            timer = threading.Timer(0.0005 * (i % 12), interrupt)
            with contextlib.suppress(KeyboardInterrupt):
                timer.start()
                while True:
                    round_of(pool).ask({0: i, 1: i}, "at work")
                    round_of(pool).wait()
            timer.join()
            assert not pool.closed
            round_of(pool).drop([0, 1])
            assert [answer(pool, place, [i]) for place in (0, 1)] == [[i], [i]]

    @pytest.mark.parametrize("hook", ["on_lost", "raised"])
    def test_ctrl_c_in_a_loss_waits_for_the_successor(self, make: MakePool, hook: str) -> None:
        pool = make(None, None, hooks=Hooks(Successor(None), at=interrupts_at(hook)))
        ask(pool, 1, residents.fail)
        with pytest.raises(KeyboardInterrupt):
            take(pool)
        assert [lost.place for lost in take(pool)] == [1]

    def test_ctrl_c_while_a_replaced_resident_closes_ends_the_wait_alone(self, make: MakePool) -> None:
        pool = make(Doing(close=functools.partial(residents.pause, 2.0)))
        pool.replace(0, "it is old", Successor("new"), CloseLimits())
        with interrupted_soon():
            answer(pool, 0, residents.plan)
        assert not pool.closed
        assert answer(pool, 0, residents.plan) == "new"

    # ---- close

    def test_all_are_asked_before_meanwhile_and_then_waited_for(self, make: MakePool, tmp_path: Path) -> None:
        notes = tmp_path / "notes"
        pool = make(Doing(close=Notes(notes, "closes")), None)

        def meanwhile() -> bool:
            while not notes.exists():
                time.sleep(0.005)
            return True

        assert pool.close(CloseLimits(), meanwhile) == [(0, []), (1, [])]

    def test_meanwhile_ends_the_wait(self, make: MakePool) -> None:
        pool = make(Doing(close=residents.hang))
        assert pool.close(CloseLimits(), lambda: False) == []

    def test_the_time_of_a_close_is_limited_for_all(self, make: MakePool) -> None:
        pool = make(Doing(close=functools.partial(residents.pause, 0.7)))
        limits = CloseLimits(60.0, 1.0, 60.0, "timeout=1")
        with pytest.warns(RuntimeWarning, match="in close.. of its resident, which did not end within timeout=1"):
            pool.close(limits)

    def test_a_worker_that_has_to_do_much_first_is_asked_later(self, make: MakePool) -> None:
        left = [3]
        hooks = Hooks()
        hooks.pending = lambda _: left.insert(0, max(0, left[0] - 1)) or left[0]  # type: ignore[method-assign]
        pool = make(None, hooks=hooks)
        hooks.rung.clear()
        assert pool.close(CloseLimits()) == [(0, [])]
        assert (hooks.rung, left[0]) == ([0], 0)

    # ---- forks and nested pools

    def test_workers_hold_nothing_of_another_pool(self, make: MakePool) -> None:
        first = make(None)
        alone = answer(first, 0, residents.open_fds)
        assert answer(make(None), 0, residents.open_fds) == alone

    @pytest.mark.parametrize("end", ["closes", "dies"])
    def test_a_resident_may_own_a_pool(self, make: MakePool, end: str) -> None:
        pool = make(self.context, resident=residents.Outer)
        assert answer(pool, 0, "through both") == ["through both"]
        if end == "closes":
            assert pool.close(CloseLimits()) == [(0, [(0, [])])]
        else:
            kill(pool, 0)


def wait_until_ready(pool: Any, place: int) -> None:
    while pool.ready_at(place) is None:
        pool.watch(0.0)
        time.sleep(0.005)


def kill(pool: Any, place: int, pause_s: float = 0.0) -> None:
    """Kills a worker from outside, and returns once it is dead."""
    (pid, _) = pool.processes()[place]
    time.sleep(pause_s)
    os.kill(pid, signal.SIGKILL)
    wait_for_end(pid)
