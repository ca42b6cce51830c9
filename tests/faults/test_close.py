"""Closing: always bounded, always complete, whatever ends the vector env."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import weakref
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faulty_envs import CountingEnv, hang_in_c

import muster
import programs
from muster.errors import ClosedError, EnvError, WorkerDied
from muster.pool import limits
from muster.pool.launcher_client import LauncherClient
from slow import slow

HERE = Path(__file__).parent
ACTIONS = np.zeros(2, np.int64)
# Wide enough for a busy machine: a test that hangs here hangs forever, or for 1,000 s.
BOUND_S = 30.0
pytestmark = pytest.mark.usefixtures("leaves_nothing")


class Closing(CountingEnv):
    """Leaves a file when it is closed. hangs: whether the step of env 0 never ends."""

    def __init__(self, folder: str, hangs: bool = False) -> None:
        super().__init__()
        self.folder, self.hangs = folder, hangs

    def step(self, action: Any) -> Any:
        if self.hangs and self.index == 0:
            hang_in_c()
        return super().step(action)

    def close(self) -> None:
        Path(self.folder, f"closed-{self.index}").touch()

    def dies(self) -> None:
        os._exit(1)

    def exits(self) -> None:
        sys.exit(2)


class ClosingNever(CountingEnv):
    def close(self) -> None:
        time.sleep(1000)


class ClosingByExit(CountingEnv):
    def close(self) -> None:
        sys.exit(5)


def make(tmp_path: Path, **options: Any) -> Any:
    env_kwargs = {"folder": str(tmp_path), "hangs": options.pop("hangs", False)}
    return muster.make_vec(Closing, 2, num_workers=options.pop("num_workers", 2), env_kwargs=env_kwargs, **options)


def closed(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in tmp_path.iterdir())


def test_close_closes_envs_and_may_be_repeated(tmp_path: Path) -> None:
    envs = make(tmp_path)
    envs.reset()
    envs.close()
    assert closed(tmp_path) == ["closed-0", "closed-1"]
    envs.close()
    with pytest.raises(ClosedError):
        envs.step(ACTIONS)


@pytest.mark.parametrize("backend", ["process", *slow("serial", "thread")])
def test_an_env_that_fails_to_close_does_not_hide_what_left_the_with_block(backend: str) -> None:
    options: Any = {} if backend == "serial" else {"num_workers": 2}
    with pytest.raises(KeyboardInterrupt) as raised, muster.make_vec(ClosingByExit, 2, backend=backend, **options):
        raise KeyboardInterrupt
    assert "an env failed to close: env 0 (worker 0" in raised.value.__notes__[0]


def test_with_block_closes_when_an_error_leaves_it(tmp_path: Path) -> None:
    with pytest.raises(KeyError), make(tmp_path) as envs:
        envs.reset()
        raise KeyError
    assert closed(tmp_path) == ["closed-0", "closed-1"]


@pytest.mark.parametrize("options", [{}, {"backend": "serial", "num_workers": None}], ids=str)
def test_garbage_collection_closes_and_sets_no_context_variable(tmp_path: Path, options: Any) -> None:
    # Before Python 3.12 it may begin within `ContextVar.set` (of NumPy, for one), which goes on with freed memory then.
    envs = make(tmp_path, **options)
    envs.reset()
    called: list[Any] = []
    sys.setprofile(lambda _, event, function: called.append(function))
    try:
        del envs
        gc.collect()
    finally:
        sys.setprofile(None)
    assert closed(tmp_path) == ["closed-0", "closed-1"]
    assert not any(isinstance(getattr(function, "__self__", None), ContextVar) for function in called)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("options", "halfway"),
    [
        ({"backend": "serial"}, weakref.WeakValueDictionary.get),
        ({"num_workers": 1, "context": "spawn"}, LauncherClient.is_usable),
    ],
    ids=["serial", "process"],
)
def test_garbage_collection_may_close_a_vector_env_in_the_middle_of_another_start(options: Any, halfway: Any) -> None:
    collected = []

    def collect(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is halfway.__code__ and not collected:
            collected.append(gc.collect())

    dropped: Any = muster.make_vec(CountingEnv, 1, **options)
    dropped.itself = dropped  # only garbage collection frees it
    del dropped
    gc.disable()
    sys.setprofile(collect)
    try:
        envs = muster.make_vec(CountingEnv, 1, **options)
    finally:
        sys.setprofile(None)
        gc.enable()
    assert collected
    with envs:
        envs.reset()
        assert envs.step(ACTIONS[:1])[0].tolist() == [[0.0, 0.0, 1.0]]


def test_close_is_silent_about_a_dead_worker_and_closes_the_others(tmp_path: Path) -> None:
    envs = make(tmp_path)
    envs.reset()
    os.kill(envs.stats()["workers"][0]["pid"], signal.SIGKILL)
    envs.close()
    assert closed(tmp_path) == ["closed-1"]


def test_close_does_not_wait_for_a_step_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BUSY_S", 0.5)
    envs = make(tmp_path, hangs=True)
    envs.reset()
    envs.send(ACTIONS)
    start = time.monotonic()
    with pytest.warns(RuntimeWarning, match="^worker 0 .* was killed before it closed env 0: it was in step of"):
        envs.close()
    assert time.monotonic() - start < BOUND_S
    assert closed(tmp_path) == ["closed-1"]


def test_close_kills_an_env_that_does_not_end_its_close() -> None:
    envs = muster.make_vec(ClosingNever, 2, num_workers=2)
    start = time.monotonic()
    with pytest.warns(RuntimeWarning, match="did not end within timeout=0.5"):
        envs.close(timeout=0.5)
    assert time.monotonic() - start < BOUND_S


def test_an_env_that_exits_in_close_is_an_error_that_names_it() -> None:
    envs = muster.make_vec(ClosingByExit, 2, num_workers=1)
    with pytest.raises(EnvError, match="env 0 .*SystemExit: 5"):
        envs.close()


class ClosedInAStep(CountingEnv):
    """An env whose steps, once `close` is set, wait until their own vector env has been closed."""

    close_all: Any = None

    def step(self, action: Any) -> Any:
        if self.close_all is not None:
            type(self).close_all()
        return (*super().step(action)[:2], True, False, {})


@pytest.mark.parametrize("how", ["by a signal handler", "by another thread"])
@pytest.mark.parametrize("options", [{"backend": "serial"}, *slow({"num_workers": 1, "caller_steps": True})], ids=str)
def test_close_in_the_middle_of_a_step_of_the_calling_process(options: Any, how: str, monkeypatch: Any) -> None:
    envs = muster.make_vec(ClosedInAStep, 2, autoreset_mode="same_step", **options)
    envs.reset()

    def close_all() -> None:
        if how == "by a signal handler":
            signal.raise_signal(signal.SIGUSR1)
        else:
            thread = threading.Thread(target=envs.close)
            thread.start()
            thread.join()

    before = signal.signal(signal.SIGUSR1, lambda *_: envs.close())
    monkeypatch.setattr(ClosedInAStep, "close_all", close_all)
    try:
        with pytest.raises(ClosedError):
            envs.step(ACTIONS)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_close_while_a_call_is_pending(tmp_path: Path) -> None:
    envs = make(tmp_path)
    envs.call_async("index")
    time.sleep(0.2)
    envs.close()
    assert closed(tmp_path) == ["closed-0", "closed-1"]


def test_worker_that_dies_in_a_call(tmp_path: Path) -> None:
    envs = make(tmp_path)
    with pytest.raises(WorkerDied, match=r"exit code 1. It was answering call\('dies'\) for [\d.e-]+ s"):
        envs.call("dies")
    with pytest.raises(ClosedError):
        envs.reset()


def test_env_that_exits_in_a_call(tmp_path: Path) -> None:
    with make(tmp_path) as envs:
        with pytest.raises(EnvError, match="env 0 .*SystemExit: 2"):
            envs.call("exits")
        assert envs.get_attr("index") == (0, 1)


# ---- the end of the whole program

# Each line that a worker writes is one `write`. Where Python is unbuffered, print() makes two writes of a line, and the
# lines of two workers get mixed.
PROGRAM = """
import os, signal, sys, threading, time
import faulty_envs, muster
import numpy as np

class Env(faulty_envs.CountingEnv):
    def __init__(self, slow, sleep_s):
        super().__init__()
        self.slow, self.sleep_s = slow, sleep_s
        if sys.argv[1] != "thread":
            faulty_envs.start_children(process_group=0)
        self.arrive("__init__")

    def arrive(self, place):
        if place == self.slow:
            os.write(1, b"there\\n")
            time.sleep(self.sleep_s)

    def reset(self, **kwargs):
        self.arrive("reset")
        return super().reset(**kwargs)

    def step(self, action):
        self.arrive("step")
        return super().step(action)

    def close(self):
        self.arrive("close")

ACTIONS = np.zeros(2, np.int64)

def make(slow="", sleep_s=1000.0):
    options = {"backend": "thread"} if sys.argv[1] == "thread" else {"context": sys.argv[1]}
    return muster.make_vec(Env, 2, num_workers=2, env_kwargs={"slow": slow, "sleep_s": sleep_s}, **options)

"""
ENDINGS = {
    "falls off the end": "envs = make(); envs.reset(); envs.step(ACTIONS)",
    "sys.exit": "envs = make(); envs.reset(); sys.exit(0)",
    "unclosed, another thread": "envs = make(); threading.Thread(target=envs.reset).start()",
    "exit while a step is pending": "envs = make('step', 3.0); envs.reset(); envs.send(ACTIONS)",
}
INTERRUPTED = {
    "in step": "envs = make('step'); envs.reset(); envs.step(ACTIONS)",
    "in step, closing": "with make('step') as envs: envs.reset(); envs.step(ACTIONS)",
    "in a call": "envs = make('step'); envs.reset(); envs.call('step', 0)",
    "while starting": "make('__init__')",
    "in recv": "envs = make('step'); envs.reset(); envs.send(ACTIONS); envs.recv(min_envs=1)",
    "in reset": "envs = make('reset'); envs.reset()",
    "in close": "envs = make('close'); envs.reset(); envs.close(timeout=1000.0)",
}


def some_slow(names: dict[str, str]) -> list[Any]:
    """Every name with every start method; the cases that are not slow have each other name once."""
    return [
        pytest.param(name, method, marks=() if row % 4 == 2 * column else pytest.mark.slow)
        for row, name in enumerate(names)
        for column, method in enumerate(("forkserver", "fork", "spawn", "thread"))
    ]


def run(body: str, method: str) -> programs.Program:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    return programs.start("-c", PROGRAM + body, method, env=environ)


@pytest.mark.parametrize(("ending", "method"), some_slow(ENDINGS))
def test_interpreter_exit_leaves_nothing_and_says_nothing(ending: str, method: str) -> None:
    process = run(ENDINGS[ending], method)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 0
    assert errors == ""


@pytest.mark.parametrize(("place", "method"), some_slow(INTERRUPTED))
def test_ctrl_c_is_one_keyboard_interrupt(place: str, method: str) -> None:
    process = run(INTERRUPTED[place], method)
    assert process.stdout is not None
    assert process.stdout.readline() == "there\n", process.communicate(timeout=100)
    time.sleep(0.5)
    # A terminal sends it to the whole group, too.
    os.killpg(process.pid, signal.SIGINT)
    start = time.monotonic()
    _, errors = process.communicate(timeout=100)
    assert time.monotonic() - start < BOUND_S
    assert errors.count("KeyboardInterrupt") == 1
    assert errors.count("Traceback") == 1
    assert process.returncode == -signal.SIGINT
