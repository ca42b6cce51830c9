"""Log records of envs in workers: at the caller's loggers, with level, name and the env's index, each once."""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import muster
from muster.errors import EnvError, WorkerDied
from muster.pool import logs as log_inbox
from sample_envs import Counter

WAYS: list[Any] = [
    {"context": "forkserver"},
    pytest.param({"context": "spawn"}, marks=pytest.mark.slow),
    {"context": "fork"},
    pytest.param({"num_workers": 1}, marks=pytest.mark.slow),
    {"backend": "thread"},
    {"backend": "serial"},
    {"caller_steps": True},
]
ACTIONS = np.zeros(2, np.int64)
_log, _arm, _quiet = (logging.getLogger(f"muster_test{name}") for name in ("", ".arm", ".quiet"))


class Chatty(Counter):
    def __init__(self) -> None:
        super().__init__()
        _log.info("built %s", {"n": 1})

    def reset(self, **arguments: Any) -> Any:
        _arm.debug("reset")
        _quiet.warning("too quiet to be heard")
        return super().reset(**arguments)

    def step(self, action: Any) -> Any:
        if action == 1:
            _log.error("about to die")
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            _ = 1 / int(action - 2)
        except ZeroDivisionError:
            _log.exception("cannot step", extra={"robot": "arm", "env": self})
            raise
        _log.warning("%d %s", action, "actions")
        return super().step(action)

    def close(self) -> None:
        _arm.critical("closed")


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def take(self) -> list[tuple[Any, ...]]:
        """The records so far, without those of Muster: level, logger, message, and the env's index if it has one."""
        taken, self.records = self.records, []
        rows = [(r.levelname, r.name[11:], r.getMessage(), vars(r).get("env_index")) for r in taken]
        return sorted(rows, key=repr)


@pytest.fixture
def kept() -> Iterator[Kept]:
    """A handler at the loggers' parent."""
    handler = Kept()
    _log.addHandler(handler)
    _log.setLevel(logging.DEBUG)
    _quiet.setLevel(logging.ERROR)
    _log.propagate = False
    yield handler
    _log.removeHandler(handler)
    _log.propagate = True
    for logger in (_log, _quiet):
        logger.setLevel(logging.NOTSET)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_every_record_arrives_before_the_call_that_it_belongs_to_returns(kept: Kept, way: dict[str, Any]) -> None:
    indices: list[Any] = [0, 1]
    if "backend" in way:  # in this process records go to their loggers as ever
        indices = [None, None]
    elif "caller_steps" in way:
        indices = [0, None]

    def both(*row: Any) -> list[Any]:
        return sorted(((*row, i) for i in indices), key=repr)

    envs = muster.make_vec(Chatty, 2, **way)
    assert kept.take() == both("INFO", "", "built {'n': 1}")
    envs.reset(seed=0)
    assert kept.take() == both("DEBUG", ".arm", "reset")
    for _ in range(3):
        envs.step(ACTIONS)
        assert kept.take() == both("WARNING", "", "0 actions")
    envs.send(ACTIONS)
    envs.recv()
    assert kept.take() == both("WARNING", "", "0 actions")
    envs.call(lambda env, index: _arm.info("called"))
    assert kept.take() == both("INFO", ".arm", "called")
    envs.close()
    assert kept.take() == both("CRITICAL", ".arm", "closed")


@pytest.mark.parametrize("context", ["forkserver", pytest.param("fork", marks=pytest.mark.slow)])
def test_a_record_shows_what_was_raised_and_where(kept: Kept, context: str) -> None:
    with muster.make_vec(Chatty, 2, context=context) as envs:
        envs.reset(seed=0)
        kept.take()
        with pytest.raises(EnvError):
            envs.step(np.array([0, 2]))
        [record] = [one for one in kept.records if one.levelno == logging.ERROR]
    text = logging.Formatter("%(env_index)s %(worker_index)s %(processName)s %(robot)s: %(message)s").format(record)
    assert text.startswith("1 1 muster-worker-1 arm: cannot step\nTraceback (most recent call last):\n")
    assert text.endswith("ZeroDivisionError: division by zero")
    assert record.process != os.getpid()
    assert vars(record)["env"].startswith("<test_log_records.Chatty object")


def test_what_was_logged_before_a_crash_arrives(kept: Kept) -> None:
    envs = muster.make_vec(Chatty, 2)
    envs.reset(seed=0)
    kept.take()
    with pytest.raises(WorkerDied):
        envs.step(np.array([0, 1]))
    assert ("ERROR", "", "about to die", 1) in kept.take()


def test_the_callers_own_levels_and_filters_count_when_a_record_arrives(kept: Kept) -> None:
    with muster.make_vec(Chatty, 1) as envs:
        kept.take()
        _arm.setLevel(logging.INFO)
        envs.reset(seed=0)
        assert kept.take() == []
        _log.addFilter(refuse := lambda record: "actions" not in record.getMessage())
        try:
            envs.step(ACTIONS[:1])
            assert kept.take() == []
        finally:
            _log.removeFilter(refuse)
            _arm.setLevel(logging.NOTSET)
        logging.disable(logging.WARNING)
        try:
            envs.step(ACTIONS[:1])
            assert kept.take() == []
        finally:
            logging.disable(logging.NOTSET)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_filter_that_edits_records_edits_each_once(kept: Kept, way: dict[str, Any]) -> None:
    def edit(record: logging.LogRecord) -> bool:
        record.msg = f"seen: {record.msg}"
        return True

    for logger in (_log, _arm):
        logger.addFilter(edit)
    try:
        with muster.make_vec(Chatty, 1, **way) as envs:
            envs.reset(seed=0)
            envs.step(ACTIONS[:1])
    finally:
        for logger in (_log, _arm):
            logger.removeFilter(edit)
    said = [message for _, _, message, _ in kept.take()]
    assert sorted(said) == [f"seen: {one}" for one in ("0 actions", "built {'n': 1}", "closed", "reset")]


class Failing(Kept):
    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        raise ValueError("the disk is full")


def test_a_handler_that_raises_disturbs_no_step(kept: Kept, capsys: pytest.CaptureFixture[str]) -> None:
    _log.addHandler(failing := Failing())
    try:
        with muster.make_vec(Chatty, 1) as envs:
            envs.reset(seed=0)
            envs.step(ACTIONS[:1])
            assert len(failing.records) == len(kept.records) == 3
    finally:
        _log.removeHandler(failing)
    assert "the disk is full" in capsys.readouterr().err


def test_a_loggers_filter_that_raises_disturbs_no_step_and_lets_nothing_through(
    kept: Kept, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(record: logging.LogRecord) -> bool:
        raise LookupError("no tag for it")

    _log.addFilter(fails)
    try:
        with muster.make_vec(Chatty, 1) as envs:
            envs.reset(seed=0)
            envs.step(ACTIONS[:1])
            assert {one.name for one in kept.records} == {_arm.name}
    finally:
        _log.removeFilter(fails)
    assert "LookupError: no tag for it" in capsys.readouterr().err


class Saving(Chatty):
    def __init__(self, heard: Path) -> None:
        super().__init__()
        self.heard = heard

    def close(self) -> None:
        _log.info("saving")
        while not self.heard.exists():
            time.sleep(0.01)


def test_what_an_env_logs_while_it_closes_arrives_meanwhile(kept: Kept, tmp_path: Path) -> None:
    heard = tmp_path / "heard"
    _log.addFilter(listen := lambda record: record.getMessage() != "saving" or heard.touch() is None)
    try:
        with muster.make_vec(Saving, 2, env_kwargs={"heard": heard}):
            kept.take()
    finally:
        _log.removeFilter(listen)
    assert kept.take() == [("INFO", "", "saving", 0), ("INFO", "", "saving", 1)]


def configure(path: str) -> None:
    """Sets up logging as an application does: here and, as `worker_init`, in workers, too."""
    _log.addHandler(logging.FileHandler(path))
    _arm.addHandler(logging.StreamHandler(sys.stderr))


def test_a_handler_that_a_worker_has_too_writes_a_record_once(
    kept: Kept, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.log"
    configure(str(file))
    try:
        with muster.make_vec(Chatty, 2, worker_init=Configure(str(file))) as envs:
            envs.reset(seed=0)
            envs.step(ACTIONS)
    finally:
        for logger in (_log, _arm):
            for handler in list(logger.handlers):
                if handler is not kept:
                    logger.removeHandler(handler)
                    handler.close()
    lines = ["0 actions", "built {'n': 1}", "closed", "reset"]
    assert sorted(file.read_text().splitlines()) == sorted(lines * 2)
    assert sorted(message for _, _, message, _ in kept.take()) == sorted(lines * 2)
    said = ""
    for _ in range(100):  # what a worker has written to stderr may come a little later
        said += capfd.readouterr().err
        if said.count("reset\n") < 2:
            time.sleep(0.05)
    assert said.count("reset\n") == 2
    assert said.count("closed\n") <= 2  # the last words of a process may be lost


class Configure:
    def __init__(self, path: str) -> None:
        self.path = path

    def __call__(self) -> None:
        configure(self.path)


def test_without_handlers_warnings_come_to_stderr_as_in_one_process(capfd: pytest.CaptureFixture[str]) -> None:
    handlers, logging.root.handlers = logging.root.handlers, []
    try:
        with muster.make_vec(Chatty, 1) as envs:
            envs.reset(seed=0)
            envs.step(ACTIONS[:1])
    finally:
        logging.root.handlers = handlers
    said = capfd.readouterr().err
    assert said == "too quiet to be heard\n0 actions\nclosed\n"


def test_a_worker_that_is_stopped_while_it_writes_hangs_nobody(kept: Kept) -> None:
    with muster.make_vec(Chatty, 2) as envs:
        envs.reset(seed=0)
        kept.take()
        path = f"/proc/{os.getpid()}/fd/{envs._backend.pool._own_files['logs']}"

        def write_and_hold(env: Any, index: int) -> None:
            if index == 1:
                _log.info("written")
                env.fd = os.open(path, os.O_RDWR)
                fcntl.lockf(env.fd, fcntl.LOCK_EX)

        envs.call(write_and_hold)
        before = kept.take()  # one, if it came before the lock
        envs.call(lambda env, index: os.close(env.fd) if index == 1 else None)
        assert before + kept.take() == [("INFO", "", "written", 1)]


def log_from_threads(env: Any, index: int) -> None:
    threads = [
        threading.Thread(target=lambda log=log, n=n: [log.info("%d-%d", n, i) for i in range(200)])
        for n, log in enumerate((_log, _arm, _log, _arm))
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join()


def test_threads_and_forks_of_an_env_log_beside_each_other(kept: Kept) -> None:
    _arm.addHandler(of_arm := Kept())

    def log_from_a_fork(env: Any, index: int) -> None:
        if (child := os.fork()) == 0:
            _log.info("a child")
            os._exit(0)
        os.waitpid(child, 0)

    try:
        with muster.make_vec(Chatty, 1) as envs:
            kept.take()
            envs.call(log_from_threads)
            rows = [("INFO", (".arm" if n % 2 else ""), f"{n}-{i}", None) for n in range(4) for i in range(200)]
            assert kept.take() == sorted(rows, key=repr)
            assert len(of_arm.take()) == 400
            envs.call(log_from_a_fork)
            assert kept.take() == [("INFO", "", "a child", 0)]
    finally:
        _arm.removeHandler(of_arm)


def test_records_that_nobody_fetches_take_bounded_memory(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(log_inbox, "_MOST_BYTES", 20_000)
    with muster.make_vec(Chatty, 1, context="fork") as envs:
        kept.take()
        envs.call(lambda env, index: [_log.info("%s", i) for i in range(1000)])
        told = [record for record in caplog.records if "are lost" in record.getMessage()]
        assert {record.levelname for record in told} == {"WARNING"}
        lost = sum(int(record.getMessage().partition(" ")[0]) for record in told)
        assert 0 < lost == 1000 - len(kept.take())
        envs.call(lambda env, index: _log.info("heard"))
        assert kept.take() == [("INFO", "", "heard", 0)]
