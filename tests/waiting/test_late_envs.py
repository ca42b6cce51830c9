"""A limit for each env alone in workers that step all their envs at the same time, and what keeps the others."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from typing import Any

import numpy as np
import pytest
from waiting_envs import (
    BLOCK,
    CANCEL,
    CANCEL_ALL,
    EXIT,
    EXIT_IN_TASK,
    HANG,
    LONG_DELAY,
    RAISE,
    STOP_LOOP,
    SWALLOW,
    Bound,
    Coroutines,
    SlowToClose,
)

import muster
from muster.errors import EnvError, StepTimeout, WorkerError, WorkerTimeout


def actions(num_envs: int, **of: int) -> Any:
    """Actions for envs 1, 2 and so on by ``e1=RAISE``; the others step."""
    given = np.zeros(num_envs, int)
    for name, action in of.items():
        given[int(name[1:])] = action
    return given


@pytest.mark.parametrize("backend", ["process", "thread"])
@pytest.mark.parametrize("env", [Coroutines, Bound])
def test_a_late_env_fails_alone_and_the_vector_env_goes_on(env: Any, backend: str, leaves_nothing: None) -> None:
    options: dict[str, Any] = {"backend": backend, "num_workers": 1, "concurrent": True, "step_timeout": 0.5}
    if (env, backend) == (Bound, "thread"):
        options["env_kwargs"] = {"hangs_s": 1.0}  # nobody can end its thread
    with muster.make_vec(env, 4, **options) as envs:
        envs.reset(seed=0)
        envs.send(actions(4, e1=HANG))
        assert envs.recv(min_envs=3, timeout=0.4).env_ids.tolist() == [0, 2, 3]
        left = pytest.warns(RuntimeWarning, match="left behind") if env is Bound else contextlib.nullcontext()
        with left, pytest.raises(EnvError, match="StepTimeout") as failed:
            envs.recv()
        error = failed.value.__cause__
        assert isinstance(error, StepTimeout)
        assert isinstance(error, TimeoutError)
        assert failed.value.env_index == 1
        assert "waiting_envs.py" in error.stack
        assert envs.stats()["workers"][0]["left_behind"] == (env is Bound)
        obs, infos = envs.reset(seed=4)
        assert infos["env"].tolist() == [0, 1, 2, 3]
        assert obs[:, 2].tolist() == [np.random.default_rng(4 + i).random() for i in range(4)]
        envs.step(actions(4))


@pytest.mark.filterwarnings("ignore:env 1:RuntimeWarning")
@pytest.mark.parametrize(
    ("env", "action", "mode"),
    [
        (Coroutines, HANG, "next_step"),
        (Coroutines, SWALLOW, "same_step"),
        (Bound, HANG, "same_step"),
        (Bound, RAISE, "next_step"),
    ],
)
def test_a_late_env_is_built_again(env: Any, action: int, mode: str, leaves_nothing: None) -> None:
    options: dict[str, Any] = {"num_workers": 1, "concurrent": True, "step_timeout": 0.3, "autoreset_mode": mode}
    with muster.make_vec(env, 4, on_failure="restart", **options) as envs:
        envs.reset(seed=0)
        envs.set_attr("length", 100)
        for _ in range(3):
            *_, truncated, infos = envs.step(actions(4, e1=action))
            assert truncated.tolist() == [False, True, False, False]
            assert ("refused" if action == RAISE else "step_timeout=0.3") in infos["restarted"][1]
            envs.step(actions(4))
        assert envs.call("length") == (100,) * 4
        assert envs.step(actions(4))[1].tolist()[0] == 7.0
        stats = envs.stats()
        assert stats["restarts"] == 3
        is_left = action == SWALLOW or (env is Bound and action == HANG)
        assert stats["workers"][0]["left_behind"] == 3 * is_left


@pytest.mark.filterwarnings("ignore:env:RuntimeWarning")
@pytest.mark.parametrize("on_failure", ["restart", "raise"])
def test_a_worker_with_many_left_behind_is_replaced(on_failure: str, leaves_nothing: None) -> None:
    options: dict[str, Any] = {"num_workers": 2, "concurrent": True, "step_timeout": 0.3, "on_failure": on_failure}
    with muster.make_vec(Bound, 40, env_kwargs={"wait_s": 0.05}, **options) as envs:
        envs.reset(seed=0)
        before = [one["pid"] for one in envs.stats()["workers"]]
        envs.send(np.where(np.arange(40) < 18, HANG, 0))
        if on_failure == "raise":
            with pytest.raises(WorkerTimeout, match=r"code of 1. envs could not be ended"):
                for _ in range(40):
                    with contextlib.suppress(EnvError):
                        envs.recv() if envs.num_pending else envs.step(actions(40))
            return
        reasons = {one for one in envs.recv().infos["restarted"] if one}
        for _ in range(40):
            reasons |= {one for one in envs.step(actions(40))[4].get("restarted", []) if one}
        after = [one["pid"] for one in envs.stats()["workers"]]
        assert after[0] != before[0]
        assert after[1] == before[1]
        assert any("could not be ended" in one for one in reasons)
        assert [one["left_behind"] for one in envs.stats()["workers"]] == [0, 0]


@pytest.mark.parametrize("options", [{"num_workers": 1}, {"backend": "serial"}], ids=["worker", "serial"])
@pytest.mark.parametrize("action", [RAISE, EXIT, CANCEL, EXIT_IN_TASK])
def test_exceptions_of_a_coroutine_are_that_envs(action: int, options: dict[str, Any], leaves_nothing: None) -> None:
    names = {RAISE: "ValueError: refused", EXIT: "SystemExit: 3", CANCEL: "CancelledError: its own"}
    names[EXIT_IN_TASK] = "SystemExit: 4"
    with muster.make_vec(Coroutines, 3, **options) as envs:
        envs.reset(seed=0)
        with pytest.raises(EnvError, match=names[action]) as failed:
            envs.step(actions(3, e2=action))
        assert failed.value.env_index == 2
        assert failed.value.batch.env_ids.tolist() == [0, 1]
        assert envs.step(actions(3))[1].tolist() == [2.0, 2.0, 1.0]
        assert envs.step(actions(3, e1=STOP_LOOP))[1].tolist() == [3.0, 3.0, 2.0]  # the loop is not the env's


def test_a_close_that_hangs_keeps_no_restart(leaves_nothing: None) -> None:
    options: dict[str, Any] = {"num_workers": 1, "concurrent": True, "step_timeout": 0.5, "on_failure": "restart"}
    with muster.make_vec(SlowToClose, 2, **options) as envs:
        envs.reset(seed=0)
        assert envs.step(actions(2, e1=RAISE))[3].tolist() == [False, True]
        envs.step(actions(2))
        envs.close(terminate=True)


@pytest.mark.filterwarnings("ignore:env 1:RuntimeWarning")
def test_what_was_set_is_set_again_in_an_env_that_was_left_behind(leaves_nothing: None) -> None:
    with muster.make_vec(Bound, 2, num_workers=1, concurrent=True, step_timeout=0.3) as envs:
        envs.reset(seed=0)
        envs.set_attr("length", 3)
        pid = envs.stats()["workers"][0]["pid"]
        threads = len(os.listdir(f"/proc/{pid}/task"))
        with pytest.raises(EnvError, match="StepTimeout"):
            envs.step(actions(2, e1=LONG_DELAY))
        with pytest.raises(EnvError, match="left behind"):
            envs.step(actions(2))
        envs.reset()
        assert envs.call("length") == (3, 3)
        deadline = time.monotonic() + 5
        while len(os.listdir(f"/proc/{pid}/task")) > threads or envs.stats()["workers"][0]["left_behind"]:
            assert time.monotonic() < deadline  # once it ends, its thread does
            time.sleep(0.05)


def test_restarts_are_counted_for_each_env(leaves_nothing: None) -> None:
    options: dict[str, Any] = {"num_workers": 1, "on_failure": "restart", "max_restarts": 2}
    with muster.make_vec(Coroutines, 6, **options) as envs:
        envs.reset(seed=0)
        for env in range(6):
            for _ in range(2):
                envs.step(actions(6, **{f"e{env}": RAISE}))
                envs.step(actions(6))
        with pytest.raises(WorkerError, match="failed 3 times in env 4"):
            envs.step(actions(6, e4=RAISE))


def test_code_that_keeps_the_loop_is_named_and_its_worker_killed(
    caplog: pytest.LogCaptureFixture, leaves_nothing: None
) -> None:
    options: dict[str, Any] = {"num_workers": 2, "step_timeout": 0.5, "on_failure": "restart"}
    with muster.make_vec(Coroutines, 8, **options) as envs, caplog.at_level(logging.WARNING, "muster"):
        envs.reset(seed=0)
        envs.send(actions(8, e2=BLOCK))
        assert set(envs.recv(min_envs=4).env_ids) >= {4, 5, 6, 7}
        *_, truncated, infos = envs.recv()
        assert truncated.all()
        assert "step_timeout=0.5 and 5 s more" in infos["restarted"][0]
    [line] = [one.getMessage() for one in caplog.records if "blocks" in one.getMessage()]
    assert line.startswith("env 2 blocks 3 other envs of worker 0")
    assert "waiting_envs.py" in line


def test_nobody_is_late_because_another_has_kept_the_loop(leaves_nothing: None) -> None:
    with muster.make_vec(Coroutines, 4, num_workers=1, step_timeout=0.5, env_kwargs={"wait_s": 0.1}) as envs:
        envs.reset(seed=0)
        envs.set_attr("wait_s", [0.1, 1.2, 0.1, 0.1])
        with contextlib.suppress(EnvError):  # of env 1 alone
            envs.step(actions(4, e1=BLOCK))
        assert envs.episode_lengths.tolist()[::2] == [1, 1]
        assert envs.stats()["workers"][0]["blocked_s"] > 0.5


@pytest.mark.parametrize("options", [{"num_workers": 1}, {"backend": "serial"}], ids=["worker", "serial"])
def test_an_env_that_cancels_all_tasks_finds_those_of_envs(options: dict[str, Any], leaves_nothing: None) -> None:
    with muster.make_vec(Coroutines, 3, on_failure="restart", **options) as envs:
        envs.reset(seed=0)
        for t in range(1, 4):
            assert envs.step(actions(3, e1=CANCEL_ALL))[0][1, 1] == t


def test_a_close_does_not_wait_for_a_thread_that_hangs_in_a_step() -> None:
    envs = muster.make_vec(Bound, 3, num_workers=1, concurrent=True)
    envs.reset(seed=0)
    envs.send(actions(3, e1=HANG))
    began = time.monotonic()
    with pytest.warns(RuntimeWarning, match="it was in step of env 1"):
        envs.close()
    assert time.monotonic() - began < 20  # not close_timeout=60


@pytest.mark.parametrize("env", [Coroutines, Bound])
def test_a_close_waits_for_no_pending_step(env: Any, leaves_nothing: None) -> None:
    envs = muster.make_vec(env, 4, num_workers=1, concurrent=True)
    envs.reset(seed=0)
    envs.send(actions(4, e1=HANG if env is Coroutines else 5))
    began = time.monotonic()
    envs.close()
    assert time.monotonic() - began < 3


def test_threads_and_files_stay_as_many(leaves_nothing: None) -> None:
    options: dict[str, Any] = {"num_workers": 1, "concurrent": True, "on_failure": "restart", "max_restarts": 100}
    with muster.make_vec(Bound, 4, **options) as envs:
        envs.reset(seed=0)
        pid = envs.stats()["workers"][0]["pid"]
        envs.step(actions(4, e1=RAISE))
        before = len(os.listdir(f"/proc/{pid}/task")), len(os.listdir(f"/proc/{pid}/fd"))
        for _ in range(20):
            envs.step(actions(4, e1=RAISE))
            envs.step(actions(4))
        assert (len(os.listdir(f"/proc/{pid}/task")), len(os.listdir(f"/proc/{pid}/fd"))) == before
