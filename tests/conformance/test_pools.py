"""The contract of pools, for all pools that exist."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar
from unittest.mock import Mock

import pool_residents as residents
import pytest
from pool_contract import PoolContract, ProcessPoolContract, StartContract
from pool_residents import Echo, Hooks, name_of, plan_for

from muster.errors import UnknownMessage, WorkerDied
from muster.pool.launcher_client import LauncherClient
from muster.pool.limits import AT_ONCE, Limits
from muster.pool.messages import (
    Answer,
    Build,
    Close,
    Closed,
    Closing,
    Failed,
    Inherited,
    Message,
    Post,
    Progress,
    Question,
    Ready,
    StartOrder,
    Unpacking,
)
from muster.pool.place import Plan
from muster.pool.pool import Pool
from muster.pool.set_up import Processes, SetUp
from muster.pool.thread_pool import ThreadPool
from muster.pool.worker import Resident, serve
from processes import is_alive

MINE = ("pool_residents",)


class Processed:
    """Makes pools of processes."""

    context: ClassVar[str]

    def make_pool(
        self,
        resident: type[Resident],
        plans: Sequence[Plan],
        hooks: Hooks,
        *,
        start_timeout_s: float = 60.0,
        **options: Any,
    ) -> Pool:
        processes = Processes(self.context, preloads=MINE)
        return Pool(name_of(resident), plans, processes, hooks, Limits(start_timeout_s), **options)


class TestThreads(PoolContract):
    cut_verb = "left behind"
    ends_a_worker = staticmethod(residents.fail)

    def make_pool(
        self, resident: type[Resident], plans: Sequence[Plan], hooks: Hooks, *, start_timeout_s: float = 60.0
    ) -> ThreadPool:
        return ThreadPool(resident, plans, hooks, Limits(start_timeout_s))

    def ended_by(self, type_name: str, message: str) -> Any:
        return pytest.raises(
            WorkerDied, match=f"^worker 1, a thread, ended by {type_name}: {message}\\. It was at work"
        )


class TestFork(Processed, StartContract):
    context = "fork"


class TestForkserver(Processed, ProcessPoolContract):
    context = "forkserver"


class TestSpawn(Processed, StartContract):
    context = "spawn"
    patience_s = 6.0


@pytest.mark.slow
class TestForkInFull(Processed, ProcessPoolContract):
    context = "fork"


@pytest.mark.slow
class TestSpawnInFull(Processed, ProcessPoolContract):
    context = "spawn"
    patience_s = 10.0


# ---- what processes under the launcher have imported already

PRELOADED = {
    "missing": ("", "missing cannot be imported there (ModuleNotFoundError: No module named 'missing')"),
    "raises": ("raise ValueError('no')", "raises cannot be imported there (ValueError: no)"),
    "starts_a_thread": (
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()",
        "the import of starts_a_thread starts threads (1), which a fork would lose",
    ),
}


@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize("name", PRELOADED)
def test_a_module_that_cannot_be_preloaded_is_named_once(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code, reason = PRELOADED[name]
    if code:
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    processes = Processes("forkserver", preloads=(name,))
    pools = [Pool(name_of(Echo), [plan_for(i, i) for i in range(2)], processes, Hooks()) for _ in range(2)]
    assert [pool.start() for pool in pools] == [[0, 1]] * 2
    for pool in pools:
        pool.close(AT_ONCE)
    said = capfd.readouterr().err
    assert said.count(f"workers start without preloaded modules, each of them imports its own: {reason}") == 1


# ---- launchers, and workers that are apart


def asked(processes: Processes, question: Any, **options: Any) -> Any:
    """The answer of one new worker."""
    pool = Pool(name_of(Echo), [plan_for(0)], processes, Hooks(), **options)
    pool.start()
    try:
        asked = pool.round()
        asked.ask({0: question}, "at work")
        asked.wait()
        return asked.answers[0].content
    finally:
        pool.close(AT_ONCE)


def test_what_a_resident_reports_comes_to_the_owner_before_its_answer() -> None:
    reports: list[Any] = []
    processes = Processes("forkserver", preloads=MINE)
    assert asked(processes, residents.report_halves, reported=reports.append) == "both"
    assert reports == ["first", "second"]


@pytest.mark.slow
@pytest.mark.usefixtures("leaves_nothing")
def test_a_launcher_that_is_kept_starts_the_next_pools_workers_and_ends_with_the_block() -> None:
    processes = Processes("forkserver", threads=3, preloads=MINE)
    with LauncherClient.kept():
        parents = {asked(processes, residents.parent_pid) for _ in range(2)}
        # Of pools that start at once, some may get a launcher of their own.
        threads = [Thread(target=asked, args=(processes, residents.parent_pid)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(parents) == 1


def test_workers_are_set_up_as_the_process_was_that_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--fast"])
    processes = Processes("forkserver", preloads=MINE, set_up=SetUp.of_this_process())
    monkeypatch.setattr(sys, "argv", ["host.py"])
    assert asked(processes, residents.arguments) == ["train.py", "--fast"]


@pytest.mark.parametrize("context", ["forkserver", "spawn"])
def test_a_hash_seed_is_that_of_all_workers(context: str) -> None:
    seeded = [Processes(context, preloads=MINE, hash_seed=seed) for seed in (5, 5, 6)]
    one, same, other = (asked(processes, residents.hash_of_a_word) for processes in seeded)
    assert one == same != other


@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize("context", ["forkserver", "fork", "spawn"])
def test_nobody_gets_what_a_worker_that_is_apart_prints_and_logs_and_its_session_ends_with_it(
    context: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    processes = Processes(context, preloads=MINE, are_apart=True, output="quiet")
    asked(processes, residents.be_noisy)
    assert capfd.readouterr() == ("", "")
    assert not caplog.records
    assert not is_alive(asked(processes, residents.start_nameless))


# ---- messages between the two ends


@pytest.mark.parametrize("message", ["close", ("close", 1), None, Build(), Answer([])], ids=repr)
def test_no_word_and_no_other_class_is_taken_for_a_message(message: object) -> None:
    resident = Echo(None, Mock())
    with pytest.raises(UnknownMessage, match="a worker knows no such message"):
        serve(resident, lambda: message, Mock())


def test_every_message_is_known_at_the_end_it_is_for() -> None:
    to_a_worker, served = {StartOrder, Build}, {Post, Question, Close}
    to_the_owner = {Unpacking, Progress, Ready, Failed, Answer, Closing, Closed}
    of_this_module = {one for one in Message.__subclasses__() if one.__module__ == Message.__module__}
    assert of_this_module == to_a_worker | served | to_the_owner | {Inherited}
