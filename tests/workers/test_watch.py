"""The watch: what the logger says of an env that hangs, and what it costs the env to be looked at."""

from __future__ import annotations

import ctypes
import errno
import functools
import itertools
import logging
import os
import re
import select
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import muster
import programs
from muster.pool import watch
from muster.pool.watch import AFTER_S, Watch, env_lines
from slow import slow

PHASES = {"build": "in build", "reset": "in reset", "step": "in step", "call": "in a call"}
SOON = [0.3, 60.0]


class Hanging(gym.Env[Any, Any]):
    """Some of its envs wait, once, in one phase, for a server: until a line says so, see `server`.

    way: how, by the name of a method.  answer: what a native call has returned, and its errno.
    """

    observation_space = gym.spaces.Box(0, 1, (2,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(
        self, phase: str, server: str, way: str = "select", hangs: tuple[int, ...] = (1, 3), more_s: float = 0.0
    ) -> None:
        info = muster.get_worker_info()
        assert info is not None
        self.phase = phase if info.env_index in hangs else ""
        self.server, self.way, self.more_s = server, way, more_s
        self.answer = (0, 0)
        self.enter("build")

    def enter(self, phase: str) -> None:
        if self.phase == phase:
            self.phase = ""
            self.wait_for_server()
            time.sleep(self.more_s)

    def wait_for_server(self) -> None:
        fd = os.open(self.server, os.O_RDWR)
        getattr(self, self.way)(fd)
        os.close(fd)

    def select(self, fd: int) -> None:
        select.select([fd], [], [], 30.0)

    def native_poll(self, fd: int) -> None:
        polled = ctypes.create_string_buffer(struct.pack("ihh", fd, select.POLLIN, 0))
        self.answer = self.native("poll", polled, 1, 30_000)

    def native_sleep(self, fd: int) -> None:
        self.answer = self.native("nanosleep", struct.pack("ll", 1, 0), None)

    def native(self, name: str, *arguments: Any) -> tuple[int, int]:
        ctypes.set_errno(0)
        return getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments), ctypes.get_errno()

    def chatting(self, fd: int) -> None:
        for i in itertools.count():
            print("tick", i, file=sys.stderr, flush=True)
            if self.is_answered(fd):
                print("tick", i + 1, file=sys.stderr, flush=True)
                return

    def is_answered(self, fd: int) -> bool:
        return bool(select.select([fd], [], [], 0.02)[0])

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
    monkeypatch.setattr(watch, "AFTER_S", SOON)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """A FIFO that can be read once a line has told of an env that waits for it."""
    path = tmp_path / "server"
    os.mkfifo(path)
    fd, answering = os.open(path, os.O_RDWR), logging.Handler()
    answering.emit = lambda record: "wait_for_server" in record.getMessage() and os.write(fd, b"!")  # type: ignore[method-assign,return-value]
    logging.getLogger("muster").addHandler(answering)
    yield str(path)
    logging.getLogger("muster").removeHandler(answering)
    os.close(fd)


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    def said() -> list[str]:  # on a busy machine a worker starts for longer than tests let it
        said = [one.getMessage() for one in caplog.records if (one.name, one.levelno) == ("muster", logging.WARNING)]
        return [line for line in said if " has been starting for " not in line]

    return said


def make_vec(env: Callable[[], Any], **options: Any) -> None:
    with muster.make_vec(env, 4, **options) as envs:
        envs.reset()
        envs.step([0] * 4)
        envs.call("do")


def make_agents(env: Callable[[], Any]) -> None:
    with muster.make_vec(functools.partial(two_agents, env), 4, num_workers=2) as envs:
        envs.reset()
        envs.step(envs.sample_actions())
        envs.call("do")


def two_agents(env: Callable[[], Any]) -> Any:
    from pettingzoo import ParallelEnv

    class TwoAgents(ParallelEnv[str, Any, Any]):
        """Two agents in one of the envs that hang."""

        metadata = {"name": "two"}  # noqa: RUF012
        possible_agents = agents = ["a", "b"]  # noqa: RUF012

        def __init__(self) -> None:
            self.one = env()

        def observation_space(self, agent: str) -> Any:
            return self.one.observation_space

        def action_space(self, agent: str) -> Any:
            return self.one.action_space

        def reset(self, seed: int | None = None, options: Any = None) -> Any:
            return [dict.fromkeys(self.agents, of_one) for of_one in self.one.reset()]

        def step(self, actions: Any) -> Any:
            return [dict.fromkeys(self.agents, of_one) for of_one in self.one.step(0)]

        def do(self) -> None:
            self.one.do()

    return TwoAgents()


def make_dropin(env: Callable[[], Any]) -> None:
    from muster.interop.gymnasium import AsyncVectorEnv

    envs = AsyncVectorEnv([env] * 4, num_workers=2)
    envs.reset()
    envs.step(np.zeros(4, int))
    envs.call("do")
    envs.close()


def make_sb3(env: Callable[[], Any]) -> None:
    from muster.interop.sb3 import SubprocVecEnv

    envs = SubprocVecEnv([env] * 4)
    envs.reset()
    envs.step([0] * 4)
    envs.env_method("do")
    envs.close()


def make_torchrl(env: Callable[[], Any]) -> None:
    from torchrl.envs import GymWrapper

    from muster.interop.torchrl import ParallelEnv

    envs = ParallelEnv(4, lambda: GymWrapper(env()), mp_start_method="fork")
    envs.rollout(2)
    envs.close()


def make_collector(env: Callable[[], Any], kind: str = "Collector", **options: Any) -> None:
    with getattr(muster, kind)(env, None, num_envs=4, frames_per_batch=8, **options) as collector:
        next(iter(collector))
        getattr(collector, "envs", collector).call("do")


def make_run(env: Callable[[], Any]) -> None:
    folder = Path(env.args[1]).parent / "run"  # type: ignore[attr-defined]
    muster.train(env, run_dir=folder, num_envs=4, num_workers=2, total_steps=1, callback=lambda metrics: False)


def make_on_nodes(env: Callable[[], Any]) -> None:
    from local_nodes import LocalNodes

    make_collector(env, "MultiCollector", num_collectors=2, cluster=LocalNodes(2))


def make_trial(env: Callable[[], Any], num_envs: int, trial: Callable[..., None] | None = None, **options: Any) -> None:
    from muster.hosts.trial import Trials, pack_for_trials
    from muster.recipes.recipe import make_recipes
    from muster.vector.side_by_side import play_together

    packed = pack_for_trials(make_recipes(env, num_envs), "forkserver")
    outcome = Trials(packed, 30.0).run(trial or play_together, **options)
    assert outcome.stage is None, outcome


def two_at_once(recipe: Any, reporter: Any) -> None:
    from muster.doctor.fixes import NO_FIX
    from muster.doctor.trials import at_once

    watch.AFTER_S[:] = SOON
    at_once(recipe, reporter, 2, os.getpid, NO_FIX, 30.0)


CALLED, UNCALLED = tuple(PHASES), ("build", "reset", "step")
ROADS: dict[str, tuple[Callable[[Any], None], tuple[str, ...]]] = {
    "processes": (functools.partial(make_vec, num_workers=2), CALLED),
    "threads": (functools.partial(make_vec, backend="thread", num_workers=2), CALLED),
    "agents": (make_agents, CALLED),
    "AsyncVectorEnv": (make_dropin, CALLED),
    "SubprocVecEnv": (make_sb3, CALLED),
    "ParallelEnv": (make_torchrl, UNCALLED),
    "Collector": (functools.partial(make_collector, make_vec_options={"num_workers": 2}), CALLED),
    "MultiCollector": (functools.partial(make_collector, kind="MultiCollector", num_collectors=2), CALLED),
    "nodes": (make_on_nodes, CALLED),
    "train": (make_run, UNCALLED),
    "doctor": (functools.partial(make_trial, num_envs=2, rows=4), UNCALLED),
    "doctor, at once": (functools.partial(make_trial, num_envs=1, trial=two_at_once), UNCALLED),
}
CASES = [(road, phase) for road, (_, phases) in ROADS.items() for phase in phases]
QUICK = {*((road, "step") for road in ("processes", "threads", "agents", "doctor, at once"))}
QUICK |= {("processes", phase) for phase in PHASES}
NEEDS = {"ParallelEnv": "torchrl", "SubprocVecEnv": "stable_baselines3", "agents": "pettingzoo"}
NEEDS |= dict.fromkeys(("Collector", "MultiCollector", "nodes", "train"), "tensordict")


@pytest.mark.parametrize(
    ("road", "phase"), [case if case in QUICK else pytest.param(*case, marks=pytest.mark.slow) for case in CASES]
)
def test_one_line_names_the_env_its_phase_and_where_it_hangs(
    road: str, phase: str, soon: None, server: str, lines: Any
) -> None:
    pytest.importorskip(NEEDS.get(road, "muster"))
    hangs = (1,) if road == "nodes" else (1, 3)  # each node says what its own envs wait for
    ROADS[road][0](functools.partial(Hanging, phase, server, hangs=hangs))
    mine = [line for line in lines() if "in wait_for_server" in line]
    assert len(mine) == 1, lines()
    env = r"0 \(trial 0\)" if road == "doctor" else r"[13] \((worker|collector|process) \d\)"
    # A reset is one of the commands that steps of TorchRL's envs carry out: the stack shows it.
    doing = PHASES["step" if (road, phase) == ("ParallelEnv", "reset") else phase]
    assert re.match(rf"env {env} has been {doing} for \d+\.\d s, since \d\d:\d\d:\d\d", mine[0]), mine[0]
    frames = [line.rpartition(" in ")[2] for line in mine[0].splitlines()[2:]]
    method = {"build": "__init__", "call": "do"}.get(phase, phase)
    assert frames[:4] == ["select", "wait_for_server", "enter", method], mine[0]


@pytest.mark.parametrize(
    ("way", "phase"),
    [
        ("native_poll", "step"),
        ("native_sleep", "step"),
        *(pytest.param("native_poll", phase, marks=pytest.mark.slow) for phase in ("build", "reset", "call")),
    ],
)
def test_a_native_call_of_the_env_that_waits_goes_on(way: str, phase: str, soon: None, server: str, lines: Any) -> None:
    with muster.make_vec(functools.partial(Hanging, phase, server, way, (1,)), 2, num_workers=2) as envs:
        envs.reset()
        envs.step([0, 0])
        envs.call("do")
        assert len(lines()) == 1
        assert f"in {way}" in lines()[0]
        assert envs.get_attr("answer")[1] == ({"native_poll": 1, "native_sleep": 0}[way], 0) != (-1, errno.EINTR)


@pytest.mark.parametrize("num_workers", [20, *slow(4)])
def test_20_envs_that_hang_make_one_line(num_workers: int, soon: None, server: str, lines: Any) -> None:
    env = functools.partial(Hanging, "step", server, hangs=tuple(range(20)), more_s=0.1)
    with muster.make_vec(env, 20, num_workers=num_workers, context="fork") as envs:
        envs.reset()
        envs.step([0] * 20)
        [line] = lines()
        assert re.match(r"env \d+ \(worker \d+\) has been in step for ", line)


def test_the_time_counts_while_others_are_received(soon: None, server: str, lines: Any) -> None:
    with muster.make_vec(functools.partial(Hanging, "step", server), 2, num_workers=2) as envs:
        envs.reset()
        envs.send([0, 0])
        while 1 not in (ids := envs.recv(1).env_ids):
            envs.send([0], ids)
        assert lines()[0].startswith("env 1 (worker 1) has been in step for ")


@pytest.mark.parametrize("kind", ["make_vec", *slow("MultiCollector")])
def test_what_only_takes_long_is_no_wait(kind: str, soon: None, lines: Any) -> None:
    env = functools.partial(Hanging, "", "")
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
    with muster.make_vec(functools.partial(Hanging, "", ""), 2, num_workers=2) as envs:
        envs.reset()
        pid = envs.stats()["workers"][1]["pid"]
        os.kill(pid, signal.SIGSTOP)
        envs.send([0, 0])
        going_on = threading.Timer(1.5, os.kill, (pid, signal.SIGCONT))
        going_on.start()
        envs.recv()
    [line] = lines()
    assert line.startswith("env 1 (worker 1) has been about to step or reset for ")
    assert "most recent call" not in line


def test_last_words_hold_all_that_the_env_wrote_and_no_stack_of_the_watch(soon: None, server: str, lines: Any) -> None:
    with muster.make_vec(functools.partial(Hanging, "step", server, "chatting"), 2, num_workers=2) as envs:
        envs.reset()
        envs.step([0, 0])
        assert len(lines()) == 1
        with pytest.raises(muster.errors.WorkerDied) as caught:
            envs.call(lambda env, i: os._exit(3) if i else None)
        ticks = [int(line.split()[1]) for line in caught.value.last_words.splitlines()]
        assert ticks == list(range(ticks[0], ticks[0] + max(5, len(ticks))))


FACTORY = """
import sys
sys.path += {path!r}
import test_watch
test_watch.watch.AFTER_S[:] = test_watch.SOON

def make():
    return test_watch.Hanging("step", {server!r})
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_command_shows_it_above_its_live_line(server: str, tmp_path: Path) -> None:
    pytest.importorskip("tensordict")
    (tmp_path / "hanging.py").write_text(FACTORY.format(path=sys.path, server=server))
    words = "-m", "muster", "train", "hanging.py:make", "--num-envs", "2", "--num-workers", "2", "--total-steps", "1"
    terminal, its_end = os.openpty()
    program = programs.start(*words, cwd=tmp_path, stdout=its_end, stderr=its_end, fresh=True)
    os.close(its_end)
    shown = b""
    while b"in wait_for_server" not in shown:
        shown += os.read(terminal, 1000)
    program.kill()
    program.wait()
    os.close(terminal)
    assert b"collecting the first rollout\r\x1b[2Kmuster: env 1 (worker 1) has been in step for 0.3 s" in shown


# ---- by hand, without a worker


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    now = [1000.0]
    monkeypatch.setattr(watch.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(watch, "seconds_since", lambda moment: now[0] - moment)
    return now


def test_a_line_after_10_s_1_10_and_60_minutes(clock: Any, lines: Any) -> None:
    watched, step = Watch(), (watch.Doing.STEPPING, 3, 1000)
    said = []
    for second in range(4000):
        clock[0] = 1000.0 + second
        states = [(0, step), (1, (watch.Doing.RESETTING, 4, int(clock[0])))]
        watched.look(lambda states=states: states, lambda *_: ("env 3", "", ()))
        if len(lines()) > len(said):
            said.append(second)
    assert AFTER_S == said == [10, 60, 600, 3600]


def test_resets_of_15_s_make_one_line(clock: Any, lines: Any) -> None:
    watched = Watch()
    for second in range(200):
        clock[0] = 1000.0 + second
        began = 1000 + second // 15 * 15
        state = watch.Doing.RESETTING, 3, began
        watched.look(lambda state=state: [(0, state)], lambda *_: ("env 3", " Hint.", [frame("sim.py", "reset")]))
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
