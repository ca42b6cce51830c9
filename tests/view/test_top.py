"""`muster top`: whom it finds, what it says of them, and what it leaves: nothing."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from rich.console import Console, Group

import muster
from command import muster as command
from muster.errors import ConfigError
from muster.extras import VERSION
from muster.transport.big_arrays import memfd
from muster.view.looks import runs
from muster.view.top import Top, drawn
from processes import kill_worker
from spinning import Spinning

HERE = os.getpid()
WHOLE = {
    "version": VERSION,
    "pid": HERE,
    "since": 1e9,
    "kind": "make_vec",
    "env": "a",
    "own_indices": False,
    "first_envs": [0, 2],
    "names": ["muster-w0"],
    "files": {"activity": 1},
}


def look(top: Top, for_s: float = 0.3) -> list[dict[str, Any]]:
    top.wait(for_s, lambda left_s: bool(time.sleep(left_s)))
    return top.look()


def seen(for_s: float = 0.3, only: int = HERE) -> list[dict[str, Any]]:
    top = Top(only)
    top.look()
    return look(top, for_s)


def shown(said: list[dict[str, Any]], height: int = 1000, width: int = 200) -> str:
    console = Console(width=width, file=io.StringIO())
    with console.capture() as captured:
        console.print(Group(*drawn(said, height)))
    return captured.get()


def make(count: int = 4, **options: Any) -> Any:
    return muster.make_vec(Spinning, count, **{"num_workers": 2, **options})


@contextmanager
def stepped(envs: Any) -> Iterator[None]:
    """Steps the envs in a thread."""
    ends = threading.Event()

    def step() -> None:
        while not ends.is_set():
            envs.step(np.zeros(envs.num_envs, np.int64))

    envs.reset(seed=0)
    thread = threading.Thread(target=step)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def test_a_look_has_what_stats_has() -> None:
    with make() as envs, stepped(envs):
        top, before = Top(HERE), envs.stats()
        top.look()
        [run] = look(top, 1.0)
        after = envs.stats()
    assert run["env_steps"] == pytest.approx(after["env_steps"], rel=0.05)
    assert run["env_steps_per_s"] * run["seconds"] == pytest.approx(after["env_steps"] - before["env_steps"], rel=0.1)
    for one, worker in zip(run["workers"], after["workers"], strict=True):
        assert (one["pid"], one["envs"]) == (worker["pid"], worker["envs"])
        assert one["stepping"] + one["waiting"] + one["copying"] == pytest.approx(1.0)
        assert one["stepping"] > 0.3
        assert 0.0 < one["memory_bytes"] < 1e9
    assert run["caller"]["pid"] == HERE
    assert run["kind"] == "make_vec"
    assert run["env"].endswith("Spinning")


def gymnasiums() -> Any:
    from muster.interop.gymnasium import AsyncVectorEnv

    return AsyncVectorEnv([lambda: gym.make("CartPole-v1")] * 2)


def sb3s() -> Any:
    pytest.importorskip("stable_baselines3")
    from muster.interop.sb3 import SubprocVecEnv

    return SubprocVecEnv([lambda: gym.make("CartPole-v1")] * 2)


def torchrls() -> Any:
    pytest.importorskip("torchrl")
    from torchrl.envs import GymEnv

    from muster.interop.torchrl import ParallelEnv

    env = ParallelEnv(2, lambda: GymEnv("CartPole-v1"))
    env.reset()
    return env


def collectors() -> Any:
    return muster.MultiCollector("CartPole-v1", num_envs=2, num_collectors=2, frames_per_batch=64)


def torchrls_collectors() -> Any:
    pytest.importorskip("torchrl")
    from torchrl.envs import GymEnv

    from muster.interop.torchrl import MultiSyncCollector

    return MultiSyncCollector([lambda: GymEnv("CartPole-v1")] * 2, None, frames_per_batch=64, total_frames=-1)


@pytest.mark.parametrize(
    ("opened", "kind"),
    [
        (gymnasiums, "AsyncVectorEnv"),
        (sb3s, "SubprocVecEnv"),
        (torchrls, "ParallelEnv"),
        (collectors, "MultiCollector"),
        (torchrls_collectors, "MultiSyncCollector"),
    ],
)
def test_each_front_end_is_seen(opened: Callable[[], Any], kind: str) -> None:
    envs = opened()
    try:
        if kind.endswith("Collector"):
            next(iter(envs))
        [run] = seen()
        assert run["kind"] == kind
        assert run["env"]
        assert [worker["envs"] for worker in run["workers"]] == [[0], [1]]
        assert all(os.path.exists(f"/proc/{worker['pid']}") for worker in run["workers"])
    finally:
        envs.shutdown() if kind.endswith("Collector") else envs.close()


class Late(Spinning):
    """Is built once a file is there."""

    def __init__(self, path: str) -> None:
        while not os.path.exists(path):
            time.sleep(0.01)
        super().__init__(0.1)


def test_builds_restarts_stops_and_deaths_are_seen(tmp_path: Path) -> None:
    path, made = tmp_path / "there", []
    options: dict[str, Any] = {"env_kwargs": {"path": str(path)}, "on_failure": "restart", "num_workers": 2}
    builds = threading.Thread(target=lambda: made.append(muster.make_vec(Late, 2, **options)), daemon=True)
    builds.start()
    while not (_has_run() and (found := seen(0.2)) and "of env" in found[0]["workers"][0]["in"]):
        pass
    assert found[0]["verdict"]["kind"] == "starting"
    assert re.fullmatch(r"in build of env 0 for \S+ s", found[0]["workers"][0]["in"])
    path.touch()
    builds.join()
    with made[0] as envs:
        envs.reset(seed=0)
        [run] = seen()
        before = [worker["pid"] for worker in run["workers"]]
        os.kill(before[1], signal.SIGSTOP)
        [run] = seen()
        assert run["workers"][1]["stopped"]
        assert run["verdict"]["sentence"].startswith(f"worker 1 (pid {before[1]}) is stopped by a signal")
        kill_worker(made[0], 1)
        [run] = seen()
        assert (run["workers"][1]["pid"], run["workers"][1]["cpu"]) == (None, 0.0)
        assert "ended" in shown([run])
        envs.step([0, 0])
        envs.step([0, 0])
        [run] = seen()
        assert run["workers"][1]["restarts"] == 1
        assert run["workers"][1]["pid"] not in (None, *before)


def _has_run() -> bool:
    try:
        return bool(runs(HERE))
    except ConfigError:
        return False


def test_two_vector_envs_and_a_fork_of_their_caller_are_two_runs() -> None:
    with make() as first, make(2) as second:
        if not (child := os.fork()):
            time.sleep(30)
            os._exit(0)
        try:
            assert [run["num_envs"] for run in seen()] == [first.num_envs, second.num_envs]
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    assert not _has_run()


@pytest.mark.parametrize("count", [14, pytest.param(128, marks=pytest.mark.slow)])
def test_of_many_workers_ten_have_a_row_and_the_rest_one(count: int) -> None:
    with make(count, num_workers=count, env_kwargs={"ms": 0.1}) as envs, stepped(envs):
        [run] = seen()
    lines = shown([run]).splitlines()
    assert len(run["workers"]) == count
    assert len(lines) == 3 + 10 + 3 + 2
    assert f"{count - 10} more" in lines[13]
    narrow = shown([run], 24, width=80).splitlines()
    assert len(narrow) <= 24
    assert max(map(len, narrow)) <= 80
    assert run["verdict"]["sentence"].split()[-1] in narrow[-2]  # the line to write is there


def test_looks_leave_no_file_open_and_end_with_the_run() -> None:
    with make(2):  # the first one leaves a launcher
        top = Top()
    before = set(os.listdir("/proc/self/fd"))
    with make() as envs:
        top.look()
        assert HERE in [run["pid"] for run in look(top, 0.05)]
        opened = set(os.listdir("/proc/self/fd"))
        top.look()
        assert set(os.listdir("/proc/self/fd")) == opened
        envs.close()
        assert HERE not in [run["pid"] for run in top.look()]
    left = {fd: os.readlink(f"/proc/self/fd/{fd}") for fd in set(os.listdir("/proc/self/fd")) - before}
    assert left == {}


def test_runs_that_begin_and_are_killed_meanwhile_are_no_errors(spins: Callable[[str], int]) -> None:
    top = Top()
    top.look()
    for _ in range(3):
        pid = spins("envs")
        look(top, 0.01)
        assert pid in [run["pid"] for run in look(top, 0.05)]
        os.kill(pid, signal.SIGKILL)
        while pid in [run["pid"] for run in top.look()]:
            pass


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("4194303",), "there is no process 4194303 here; in a container"),
        (("1",), "process 1 "),
        (("-n", "0"), "--every must be a number from 0.1 to 86400, got 0.0"),
        (("--trace", "/nowhere/at/all"), "--trace"),
        (("x",), "PID must be"),
    ],
)
def test_bad_input_is_a_sentence_and_status_2(words: tuple[str, ...], said: str) -> None:
    result = command("top", *words)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stderr.count("\n") == 1 or "several programs run:" in result.stderr  # other tests' programs


@pytest.mark.parametrize(
    "strange",
    [
        b"",
        b'{"version": "0.1',
        b"[[[[" * 100_000,
        {"first_envs": ["a"]},
        {"first_envs": None},
        {"first_envs": [0.5, 2]},
        {"first_envs": [-1, 2]},
        {"first_envs": [0, 10**12]},
        {"first_envs": [0, 2, 1]},
        {"first_envs": []},
        {"names": None},
        {"names": [[]]},
        {"names": ["a"] * 9},
        {"files": None},
        {"files": {"activity": [1]}},
        {"files": [1]},
        {"since": None},
        {"since": 1e300},
        {"since": float("nan")},
        {"phases": 3},
    ],
)
def test_a_strange_about_file_is_a_row_that_says_so(strange: bytes | dict[str, Any]) -> None:
    content = strange if isinstance(strange, bytes) else json.dumps({**WHOLE, "pid": HERE, **strange}).encode()
    with about(content):
        [run] = Top(HERE).look()
    assert run["problem"] == "its about file cannot be read"
    assert run["problem"] in shown([run])


def test_of_another_version_it_is_said_how_to_look_at_it() -> None:
    with about(json.dumps({"version": "9.9", "pid": HERE, "python": "/usr/bin/python9"}).encode()):
        [run] = Top(HERE).look()
    assert run["problem"] == f"it runs Muster 9.9; look at it by: /usr/bin/python9 -m muster top {HERE}"


@contextmanager
def about(content: bytes) -> Iterator[None]:
    fd = memfd("about")
    try:
        os.write(fd, content)
        yield
    finally:
        os.close(fd)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
def test_another_users_process_is_refused() -> None:
    with make():
        if not (child := os.fork()):
            os.setuid(65534)
            try:
                runs(HERE)
            except ConfigError as error:
                os._exit(f"process {HERE} is another user's" not in str(error))
            os._exit(2)
        assert os.waitpid(child, 0)[1] == 0


def test_the_command_prints_a_table_and_json(spins: Callable[[str], int]) -> None:
    pid = spins("envs")
    table = command("top", str(pid), "--once", "-n", "0.3")
    assert table.exit_code == 0
    assert "spinning.py envs\nmake_vec of __main__.Spinning, envs: 4, processes: 2, since " in table.stdout
    assert table.stdout.startswith(f"{pid}: ")
    assert "\n→ " in table.stdout
    said = json.loads(command("top", "--json", "--once", "-n", "0.3").stdout)
    assert pid in [run["pid"] for run in said["runs"]]


def test_q_ends_the_screen(spins: Callable[[str], int]) -> None:
    spins("envs")
    ours, theirs = os.openpty()
    words = [sys.executable, "-m", "muster", "top", "-n", "0.2"]
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    with subprocess.Popen(words, stdin=theirs, stdout=theirs, env=environment) as process:
        os.close(theirs)
        shown = b""
        while b"caller" not in shown:
            shown += os.read(ours, 4096)
        os.write(ours, b"q")
        assert process.wait(20) == 0
    os.close(ours)
