"""Ctrl-C that comes while an env of the caller's own process is at work, and in calls and closes."""

from __future__ import annotations

import contextlib
import operator
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import muster
from envs import Scripted
from muster.backends import recovery
from muster.errors import ClosedError, EnvError, NotPendingError, PendingError, WaitTimeout
from muster.interop.gymnasium import AsyncVectorEnv
from muster.pool import limits, place

ACTIONS = np.zeros(4, np.int64)
BOUND_S = 20.0
pytestmark = pytest.mark.usefixtures("leaves_nothing")


class Interrupted(Scripted):
    """Interrupts env 1 once, in `place`. Notes which envs were stepped, reset and closed."""

    def __init__(self, place: str, notes: list[str]) -> None:
        super().__init__()
        self.place, self.notes = place, notes

    def arrive(self, place: str) -> None:
        self.notes.append(f"{place} {self.index}")
        if place == self.place and self.index == 1:
            self.place = ""
            os.kill(os.getpid(), signal.SIGINT)

    def reset(self, **kwargs: Any) -> Any:
        self.arrive("reset")
        return super().reset(**kwargs)

    def step(self, action: Any) -> Any:
        self.arrive("step")
        return super().step(action)

    def close(self) -> None:
        self.arrive("close")


def make(place: str, notes: list[str], **options: Any) -> Any:
    return muster.make_vec(Interrupted, 4, backend="serial", env_kwargs={"place": place, "notes": notes}, **options)


@pytest.mark.parametrize(
    "options", [{"backend": "serial"}, {"num_workers": 1, "caller_steps": True, "context": "fork"}]
)
def test_the_rest_of_the_callers_envs_are_not_stepped(options: dict[str, Any]) -> None:
    class InCaller(Interrupted):
        def step(self, action: Any) -> Any:
            self.notes.append(f"step {self.index}")
            if len(self.notes) == 1 and os.getpid() == caller:
                os.kill(os.getpid(), signal.SIGINT)
            return super(Interrupted, self).step(action)

    caller = os.getpid()
    notes: list[str] = []  # the forked worker has a copy of its own
    with muster.make_vec(InCaller, 4, env_kwargs={"place": "", "notes": notes}, **options) as envs:
        envs.reset()
        notes.clear()
        with pytest.raises(KeyboardInterrupt):
            envs.step(ACTIONS)
        assert len(notes) == 1
        envs.reset()
        assert envs.step(ACTIONS)[0][:, 2].tolist() == [1, 1, 1, 1]


def test_it_does_not_wait_for_a_worker_that_hangs() -> None:
    class Hangs(Interrupted):
        def step(self, action: Any) -> Any:
            if os.getpid() == caller:
                os.kill(caller, signal.SIGINT)
            else:
                time.sleep(1000.0)
            return super(Interrupted, self).step(action)

    caller = os.getpid()
    options: Any = {"num_workers": 1, "caller_steps": True, "context": "fork"}
    envs = muster.make_vec(Hangs, 2, env_kwargs={"place": "", "notes": []}, **options)
    envs.reset()
    with pytest.raises(KeyboardInterrupt):
        envs.step(ACTIONS[:2])
    with pytest.raises(EnvError, match="env 1 .*KeyboardInterrupt"):  # env 1 has answered with its error
        envs.recv(min_envs=1)
    with pytest.raises(WaitTimeout):
        envs.recv(timeout=0.0)
    with pytest.warns(RuntimeWarning, match="worker 0 .* was killed before it closed env 0"):
        envs.close()


def test_the_rest_of_the_callers_envs_are_not_reset() -> None:
    notes: list[str] = []
    with make("reset", notes) as envs:
        with pytest.raises(KeyboardInterrupt):
            envs.reset()
        assert notes == ["reset 0", "reset 1"]
        envs.reset()
        envs.step(ACTIONS)


def test_with_restarts_it_is_raised_once_and_counts_as_no_failure() -> None:
    notes: list[str] = []
    with make("step", notes, on_failure="restart", max_restarts=0) as envs:
        envs.reset()
        with pytest.raises(KeyboardInterrupt):
            envs.step(ACTIONS)
        assert envs.recv().truncated.tolist() == [False, True, True, True]
        assert [note for note in notes if note.startswith("step")] == ["step 0", "step 1"]
        assert [note for note in notes if note.startswith("close")] == ["close 1"]  # the only env that was built again


def take_what_is_pending(envs: Any) -> bool:
    """Takes all pending answers. Returns False if the vector env is closed."""
    for take in (envs.call_wait, envs.recv):
        try:
            take()
        except ClosedError:
            return False
        except (NotPendingError, EnvError):  # the latter of envs that an interrupted reset has left out
            pass
    return True


class Raising(Scripted):
    """Raises an exception that looks like the caller's own Ctrl-C, or like an error of the vector env itself."""

    def step(self, action: Any) -> Any:
        raise (KeyboardInterrupt, ClosedError)[self.index]("of the env")


@pytest.mark.parametrize(("env", "name"), [(0, "KeyboardInterrupt"), (1, "muster.errors.ClosedError")])
def test_what_an_env_in_a_worker_raises_is_told_as_the_envs(env: int, name: str) -> None:
    with muster.make_vec(Raising, 2, num_workers=2) as envs:
        envs.reset()
        envs.send(ACTIONS[:1], env_ids=[env])
        with pytest.raises(EnvError, match=rf"env {env} \(worker {env}, step 0\): {name}: of the env"):
            envs.recv()


class InterruptsItsCaller(Scripted):
    """Interrupts the caller from env 0, in its worker, by action 1 or by a call, while the caller waits for env 0."""

    def __init__(self, caller: int) -> None:
        super().__init__()
        self.caller = caller

    def interrupt(self) -> None:
        if self.index == 0:
            time.sleep(0.05)  # until all workers have the message; before that, a call has only half begun
            os.kill(self.caller, signal.SIGINT)
            time.sleep(0.2)

    def step(self, action: Any) -> Any:
        if action == 1:
            self.interrupt()
        return super().step(action)


@pytest.mark.parametrize("blocks", [lambda envs: envs.step(ACTIONS + 1), lambda envs: envs.call("interrupt")])
def test_after_it_all_envs_may_be_reset_at_once_but_not_some(blocks: Any) -> None:
    kwargs = {"caller": os.getpid()}
    with muster.make_vec(InterruptsItsCaller, 4, num_workers=2, env_kwargs=kwargs) as envs:
        envs.reset()
        with pytest.raises(KeyboardInterrupt):
            blocks(envs)
        for call in (lambda: envs.step(ACTIONS), lambda: envs.reset(options={"reset_mask": ACTIONS == 0})):
            with pytest.raises(PendingError):
                call()
        obs, _ = envs.reset()
        assert obs.tolist() == [[env, 1, 0] for env in range(4)]
        assert envs.step(ACTIONS)[0][:, 2].tolist() == [1, 1, 1, 1]
        envs.send(ACTIONS)
        with pytest.raises(PendingError):  # requests of `send` are not dropped
            envs.reset()


@pytest.mark.parametrize("backend", ["serial", "process"])
def test_what_was_sent_since_is_not_dropped(backend: str) -> None:
    options: Any = {"num_workers": 2} if backend == "process" else {}
    kwargs = {"caller": os.getpid()}
    with muster.make_vec(InterruptsItsCaller, 4, backend=backend, env_kwargs=kwargs, **options) as envs:
        envs.reset()
        with pytest.raises(KeyboardInterrupt):
            envs.step(ACTIONS + 1)
        take_what_is_pending(envs)
        envs.step(ACTIONS)
        envs.step_async(ACTIONS)
        with pytest.raises(PendingError):
            envs.reset()


class Failing(Scripted):
    def step(self, action: Any) -> Any:
        raise ValueError("no step succeeds")


def test_as_a_replacement_is_ready_it_leaves_it_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(pid: int, **private: bool) -> Any:
        monkeypatch.undo()
        os.kill(os.getpid(), signal.SIGINT)
        return usage_of(pid, **private)

    usage_of = place.usage_of
    with muster.make_vec(Scripted, 2, num_workers=2, on_failure="restart") as envs:
        envs.reset()
        monkeypatch.setattr(place, "usage_of", interrupted)
        os.kill(envs.stats()["workers"][1]["pid"], signal.SIGKILL)
        with pytest.raises(KeyboardInterrupt):
            for _ in range(3):
                envs.step(ACTIONS[:2])
        envs.reset()
        assert envs.step(ACTIONS[:2])[0][:, 2].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("options", [{"backend": "serial"}, {"num_workers": 1}], ids=str)
def test_in_the_middle_of_a_restart_it_leaves_no_env_without_an_answer(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with muster.make_vec(Failing, 2, on_failure="restart", **options) as envs:
        envs.reset()
        monkeypatch.setattr(recovery, "Restart", interrupted)
        with pytest.raises(KeyboardInterrupt):
            envs.step(ACTIONS[:2])
        with pytest.raises(ClosedError):
            envs.step_wait(timeout=5.0)


class Gated(Scripted):
    """Waits in a step until there is a file."""

    def __init__(self, gate: Path) -> None:
        super().__init__()
        self.gate = gate

    def step(self, action: Any) -> Any:
        while not self.gate.exists():
            time.sleep(0.01)
        return super().step(action)


class TooLong(Exception):
    """What a handler of SIGALRM raises."""


def ends(*_: object) -> None:
    raise TooLong


@contextlib.contextmanager
def alarm(after_s: float, handler: Callable[..., Any]) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, after_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.filterwarnings("ignore:.*Calling `close` while waiting for a pending call")
def test_an_alarm_ends_the_wait_of_a_close_with_a_timeout(tmp_path: Path) -> None:
    gate = tmp_path / "open"
    envs = AsyncVectorEnv([partial(Gated, gate)] * 2, context="fork")
    envs.reset()
    envs.step_async(ACTIONS[:2])
    with pytest.raises(TooLong), alarm(0.3, ends):
        envs.close(timeout=BOUND_S)
    gate.touch()
    envs.close()


# The function in C refuses its arguments, and has no frame of its own.
@pytest.mark.parametrize(("handler", "error"), [(ends, TooLong), (operator.index, TypeError)])
@pytest.mark.parametrize("make", [muster.make_vec, AsyncVectorEnv])
def test_an_alarm_bounds_a_step_and_the_reset_after_it(
    make: Callable[..., Any], handler: Callable[..., Any], error: type[Exception], tmp_path: Path
) -> None:
    gate = tmp_path / "open"
    with make([partial(Gated, gate)] * 2, context="fork") as envs, contextlib.ExitStack() as at_last:
        at_last.callback(gate.touch)
        envs.reset()
        envs.step_async(ACTIONS[:2])
        with pytest.raises(error), alarm(0.05, handler):
            envs.step_wait()
        with pytest.raises(error), alarm(0.05, handler):  # it waits for the step
            envs.reset()
        gate.touch()
        assert envs.reset()[0][:, 2].tolist() == [0, 0]
        assert envs.step(ACTIONS[:2])[0][:, 2].tolist() == [1, 1]


def test_an_alarm_that_has_ended_a_step_hurries_no_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HURRIED_S", 0.0)
    envs = muster.make_vec([partial(Gated, tmp_path / "open")] * 2, num_workers=2)
    envs.reset()
    with pytest.raises(TooLong), alarm(0.05, ends):
        envs.step(ACTIONS[:2])
    opening = threading.Timer(0.3, (tmp_path / "open").touch)
    opening.start()
    envs.close()  # a warning would name a worker that is killed
    opening.join()
