"""The watch: what the logger says of an env that hangs, and what it costs the env to be looked at."""

from __future__ import annotations

import ctypes
import errno
import functools
import logging
import os
import re
import signal
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import muster
from muster.pool import watch
from muster.pool.watch import AFTER_S, About, State, Watch, env_lines
from slow import slow

HANGS = (1, 3)
PHASES = {"build": "in build", "reset": "in reset", "step": "in step", "call": "in a call"}


class Hanging(gym.Env[Any, Any]):
    """Two of its envs hang for a while, once, in one phase: in Python, or in a native `poll`, whose result it keeps."""

    observation_space = gym.spaces.Box(0, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, phase: str, hang_s: float, native: bool = False, hangs: tuple[int, ...] = HANGS) -> None:
        info = muster.get_worker_info()
        assert info is not None
        self.phase = phase if info.env_index in hangs else ""
        self.hang_s, self.native, self.polled = hang_s, native, ()
        self.enter("build")

    def enter(self, phase: str) -> None:
        if self.phase == phase:
            self.phase = ""
            self.wait_for_server()

    def wait_for_server(self) -> None:
        if not self.native:
            return time.sleep(self.hang_s)
        nobody_writes, end = os.pipe()
        libc = ctypes.CDLL(None, use_errno=True)
        polled = ctypes.create_string_buffer(struct.pack("ihh", nobody_writes, 1, 0))
        self.polled = (libc.poll(polled, 1, int(self.hang_s * 1000)), ctypes.get_errno())
        os.close(nobody_writes)
        return os.close(end)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.enter("reset")
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> Any:
        self.enter("step")
        return np.zeros(2, np.float32), 0.0, False, False, {}

    def do(self) -> None:
        self.enter("call")


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "AFTER_S", [0.3, 60.0])


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    def said() -> list[str]:  # on a busy machine a worker starts for longer than tests let it
        said = [one.getMessage() for one in caplog.records if (one.name, one.levelno) == ("muster", logging.WARNING)]
        return [line for line in said if " has been starting for " not in line]

    return said


def make_vec(phase: str, env: Callable[[], Any], **options: Any) -> None:
    with muster.make_vec(env, 4, **options) as envs:
        envs.reset()
        envs.step([0] * 4)
        envs.call("do")


def make_dropin(phase: str, env: Callable[[], Any]) -> None:
    from muster.interop.gymnasium import AsyncVectorEnv

    envs = AsyncVectorEnv([env] * 4, num_workers=2)
    envs.reset()
    envs.step(np.zeros(4, int))
    envs.call("do")
    envs.close()


def make_sb3(phase: str, env: Callable[[], Any]) -> None:
    from muster.interop.sb3 import SubprocVecEnv

    envs = SubprocVecEnv([env] * 4)
    envs.reset()
    envs.step([0] * 4)
    envs.env_method("do")
    envs.close()


def make_torchrl(phase: str, env: Callable[[], Any]) -> None:
    from torchrl.envs import GymWrapper

    from muster.interop.torchrl import ParallelEnv

    envs = ParallelEnv(4, lambda: GymWrapper(env()), mp_start_method="fork")
    envs.rollout(2)
    envs.close()


def make_collector(phase: str, env: Callable[[], Any], kind: str = "Collector", **options: Any) -> None:
    with getattr(muster, kind)(env, None, num_envs=4, frames_per_batch=8, **options) as collector:
        next(iter(collector))
        getattr(collector, "envs", collector).call("do")


ROADS = {
    "processes": functools.partial(make_vec, num_workers=2),
    "threads": functools.partial(make_vec, backend="thread", num_workers=2),
    "AsyncVectorEnv": make_dropin,
    "SubprocVecEnv": make_sb3,
    "ParallelEnv": make_torchrl,
    "Collector": functools.partial(make_collector, make_vec_options={"num_workers": 2}),
    "MultiCollector": functools.partial(make_collector, kind="MultiCollector", num_collectors=2, context="fork"),
}
CASES = [(road, phase) for road in ROADS for phase in PHASES if (road, phase) not in {("ParallelEnv", "call")}]
QUICK = {("processes", phase) for phase in PHASES} | {("threads", "step"), ("MultiCollector", "step")}


@pytest.mark.parametrize(
    ("road", "phase"), [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in CASES]
)
def test_one_line_names_the_env_its_phase_and_where_it_hangs(road: str, phase: str, soon: None, lines: Any) -> None:
    if road not in ("processes", "threads", "AsyncVectorEnv"):
        pytest.importorskip({"ParallelEnv": "torchrl", "SubprocVecEnv": "stable_baselines3"}.get(road, "tensordict"))
    ROADS[road](phase, functools.partial(Hanging, phase, 1.2))
    mine = [line for line in lines() if PHASES[phase] in line and "in wait_for_server" in line]
    assert len(mine) == 1, lines()
    since = rf" has been (in step|{PHASES[phase]}) for \d\.\d s, since \d\d:\d\d:\d\d"
    assert re.match(rf"env [13] \((worker|collector|process) \d\){since}", mine[0]), mine[0]
    frames = [line.rpartition(" in ")[2] for line in mine[0].splitlines()[2:]]
    method = {"build": "__init__", "call": "do"}.get(phase, phase)
    assert frames[:3] == ["wait_for_server", "enter", method], mine[0]


@pytest.mark.parametrize("phase", [*slow("build", "reset"), "step", *slow("call")])
def test_a_native_poll_of_the_env_goes_on(phase: str, soon: None, lines: Any) -> None:
    with muster.make_vec(functools.partial(Hanging, phase, 1.0, native=True), 2, num_workers=2) as envs:
        envs.reset()
        envs.step([0, 0])
        envs.call("do")
        assert len(lines()) == 1
        assert "in wait_for_server" in lines()[0]
        assert envs.get_attr("polled")[1] == (0, 0) != (-1, errno.EINTR)


@pytest.mark.parametrize("num_workers", [20, *slow(4)])
def test_20_envs_that_hang_make_one_line(num_workers: int, soon: None, lines: Any) -> None:
    env = functools.partial(Hanging, "step", 1.0, hangs=tuple(range(20)))
    with muster.make_vec(env, 20, num_workers=num_workers, context="fork") as envs:
        envs.reset()
        envs.step([0] * 20)
        [line] = lines()
        assert re.match(r"env \d+ \(worker \d+\) has been in step for ", line)


def test_the_time_counts_while_others_are_received(soon: None, lines: Any) -> None:
    with muster.make_vec(functools.partial(Hanging, "step", 4.0), 2, num_workers=2) as envs:
        envs.reset()
        envs.send([0, 0])
        while not lines():
            ids = envs.recv(1).env_ids
            if 1 in ids:
                break
            envs.send([0], ids)
        assert lines()[0].startswith("env 1 (worker 1) has been in step for ")


@pytest.mark.parametrize("kind", ["make_vec", "MultiCollector"])
def test_what_only_takes_long_is_no_wait(kind: str, soon: None, lines: Any) -> None:
    env = functools.partial(Hanging, "", 0.0)
    if kind == "MultiCollector":
        pytest.importorskip("tensordict")
        options = {"num_envs": 2, "num_collectors": 2, "frames_per_batch": 16, "context": "fork"}
        with muster.MultiCollector(env, Slow(), **options) as collector:
            next(iter(collector))
    else:
        with muster.make_vec(env, 2, num_workers=2) as envs:
            envs.reset()
            envs.send([0, 0])
            time.sleep(1.0)
            envs.recv()
    assert lines() == []


class Slow:
    """A policy that takes longer for a batch than an env may take for a step."""

    def __call__(self, observation: Any) -> Any:
        import torch

        time.sleep(0.15)
        return torch.zeros(len(observation), dtype=torch.int64)


def test_a_worker_that_is_stopped_is_named(soon: None, lines: Any) -> None:
    with muster.make_vec(functools.partial(Hanging, "", 0.0), 2, num_workers=2) as envs:
        envs.reset()
        pid = envs.stats()["workers"][1]["pid"]
        os.kill(pid, signal.SIGSTOP)
        envs.send([0, 0])
        with pytest.raises(muster.errors.WaitTimeout):
            envs.recv(timeout=10.0)
        os.kill(pid, signal.SIGCONT)
        envs.recv()
    [line] = lines()
    assert line.startswith("env 1 (worker 1) has been about to step or reset for ")
    assert "most recent call" not in line


def test_last_words_hold_no_stack_of_the_watch(soon: None, lines: Any, tmp_path: Path) -> None:
    with muster.make_vec(functools.partial(Hanging, "step", 1.0), 2, num_workers=2) as envs:
        envs.reset()
        envs.step([0, 0])
        assert len(lines()) == 1
        with pytest.raises(muster.errors.WorkerDied) as caught:
            envs.call(lambda env, i: os._exit(3) if i else None)
        assert "wait_for_server" not in str(caught.value)


@pytest.mark.parametrize("phase", ["reset", *slow("build", "step")])
def test_a_trial_of_the_doctor_says_where_the_env_hangs(phase: str, soon: None, lines: Any) -> None:
    muster.diagnose(functools.partial(InTrial, phase, 60.0, hangs=(0,)), timeout=10.0)
    line = next(line for line in lines() if "in wait_for_server" in line)
    assert line.startswith(f"env 0 (trial 0) has been {PHASES[phase]} for ")
    assert "step_timeout" not in line


class InTrial(Hanging):
    """Hangs where nobody has told it its index, too."""

    def __init__(self, phase: str, hang_s: float, hangs: tuple[int, ...]) -> None:
        self.phase, self.hang_s, self.native = phase, hang_s, False
        self.enter("build")


@pytest.mark.slow
def test_the_first_line_comes_after_10_s(lines: Any) -> None:
    with muster.make_vec(functools.partial(Hanging, "step", 12.0), 2, num_workers=2) as envs:
        envs.reset()
        envs.step([0, 0])
    assert re.match(r"env 1 \(worker 1\) has been in step for 1[01]\.\d s", lines()[0])


# ---- by hand, without a worker


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    now = [1000.0]
    monkeypatch.setattr(watch.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(watch, "seconds_since", lambda moment: now[0] - moment)
    return now


def test_a_line_after_10_s_1_10_and_60_minutes(clock: Any, lines: Any) -> None:
    watched, step = Watch(), State(watch.Doing.STEPPING, 3, 1000)
    said = []
    for second in range(4000):
        clock[0] = 1000.0 + second
        states = [(0, step), (1, State(watch.Doing.RESETTING, 4, int(clock[0])))]
        watched.look(lambda: states, lambda *_: About("env 3", "", ()))  # noqa: B023
        if len(lines()) > len(said):
            said.append(second)
    assert AFTER_S == said == [10, 60, 600, 3600]


def test_resets_of_15_s_make_one_line(clock: Any, lines: Any) -> None:
    watched = Watch()
    for second in range(200):
        clock[0] = 1000.0 + second
        began = 1000 + second // 15 * 15
        state = State(watch.Doing.RESETTING, 3, began)
        watched.look(lambda: [(0, state)], lambda *_: About("env 3", " Hint.", [frame("sim.py", "reset")]))  # noqa: B023
    [line] = lines()
    assert re.fullmatch(
        r"env 3 has been in reset for 10.0 s, since [\d:]{8}. Hint.\nIt is here, most recent call first:\n  File .*",
        line,
    )


def frame(file: str, name: str) -> str:
    return f'  File "{file}", line 1 in {name}'


def test_a_stack_is_shown_from_the_envs_own_code_inward() -> None:
    ours = [frame(watch.__file__, "serve"), frame("user/script.py", "<module>")]
    wrappers = [frame("site-packages/gymnasium/wrappers/common.py", "step")] * 3
    own = [frame("sim.py", f"f{i}") for i in range(20)]
    assert env_lines([*own[:3], *wrappers, *ours]) == own[:3]
    assert env_lines([*own, *ours]) == [own[0], *own[-7:]]
    assert env_lines(["Garbage-collecting", *ours]) == ours
