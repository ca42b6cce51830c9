"""What a worker process is: clean, limited, apart from the caller and from other vector envs."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import muster
import programs
from muster.backends.process import ENV_PRELOADS
from muster.pool import launcher_client
from processes import kill_worker
from sample_envs import Counter, Reporting
from slow import slow

OTHER_CALLERS = [("forkserver", "-c"), *itertools.product(("fork", "spawn"), ("script", "-c"))]
TESTS = Path(__file__).parent.parent


def run_python(*arguments: str) -> str:
    """The output of a program, which must end well."""
    out: str = programs.run(*arguments, env={**os.environ, "PYTHONPATH": str(TESTS)}, check=True).stdout
    return out


SCRIPT = """
import sys
import gymnasium as gym
import numpy as np
import muster
from muster.pool import launcher_client

print("run as", __name__)

class Mine(gym.Env):
    observation_space = gym.spaces.Discrete(10)
    action_space = gym.spaces.Discrete(2)
    def reset(self, *, seed=None, options=None):
        return np.int64(LOCAL), {}
    def step(self, action):
        raise MyError("from main", 3)

class MyError(Exception):
    def __init__(self, text, number):
        super().__init__(text, number)

LOCAL = 7
gym.register("Mine-v0", Mine)
for env in ("Mine-v0", Mine, lambda: Mine()):
    envs = muster.make_vec(env, 2, context=CONTEXT)
    assert envs.reset()[0].tolist() == [7, 7]
    try:
        envs.step(np.zeros(2, int))
    except muster.MusterError as error:
        assert type(error.__cause__) is MyError, error.__cause__
    envs.close()
print("done")
"""


@pytest.mark.parametrize(
    ("context", "how"),
    [("forkserver", "script"), *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHER_CALLERS)],
)
def test_a_caller_without_main_guard_runs_once(tmp_path: Path, context: str, how: str) -> None:
    source = SCRIPT.replace("CONTEXT", repr(context))
    path = tmp_path / "script.py"
    path.write_text(source)
    out = run_python(str(path)) if how == "script" else run_python("-c", source)
    assert out == "run as __main__\ndone\n"


@pytest.mark.usefixtures("launchers_of_users")
@pytest.mark.parametrize("context", ["fork", "forkserver", *slow("spawn")])
def test_workers_start_clean(context: str) -> None:
    with muster.make_vec([Reporting] * 2, num_workers=2, context=context) as envs:
        first, second = envs.call("report")
    if context != "fork":
        assert not {"pytest", "torch"} & set(first["modules"])
        assert first["omp"] == "1"
    assert first["random"] != second["random"]
    assert first["numpy"] != second["numpy"]
    assert first["leads_group"]
    assert first["session"] == os.getsid(0)  # else the kernel schedules it apart
    assert first["faulthandler"]
    assert first["threads"] == 1
    assert (first["argv"], first["cwd"], first["stdin"]) == (sys.argv, os.getcwd(), "/dev/null")


def test_threads_per_worker_reaches_native_libraries() -> None:
    with muster.make_vec([Reporting], threads_per_worker=3) as envs:
        assert envs.call("report")[0]["omp"] == "3"


def test_the_callers_generators_are_left_alone() -> None:
    import random

    random.seed(5)
    np.random.seed(5)  # noqa: NPY002  # as above
    expected = random.Random(5).random(), np.random.RandomState(5).random_sample()  # as above
    for options in ({"backend": "serial"}, {"backend": "thread"}, {"context": "fork"}):
        with muster.make_vec([Reporting] * 2, **options) as envs:
            envs.reset(seed=3)
            envs.step(np.zeros(2, int))
    assert (random.random(), np.random.random()) == expected  # noqa: NPY002  # as above


def test_a_reset_seeds_the_workers_generators_differently_and_again() -> None:
    def draws() -> list[float]:
        with muster.make_vec([Reporting] * 2, num_workers=2, context="fork") as envs:
            envs.reset(seed=11)
            return [report["random"] for report in envs.call("report")]

    first, again = draws(), draws()
    assert first == again
    assert first[0] != first[1]


class WithChild(Counter):
    """Starts a process of its own, by multiprocessing and by subprocess."""

    def __init__(self) -> None:
        super().__init__()
        import multiprocessing

        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        process = context.Process(target=queue.put, args=(os.getpid(),))
        process.start()
        self.from_child = queue.get(timeout=30)
        process.join()
        self.said = subprocess.run(["echo", "hello"], capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("context", ["forkserver", *slow("fork")])
def test_workers_can_start_processes_of_their_own(context: str) -> None:
    with muster.make_vec([WithChild], context=context) as envs:
        assert envs.get_attr("said") == ("hello\n",)
        assert envs.get_attr("from_child")[0] == envs.stats()["workers"][0]["pid"]


def test_who_uses_a_launcher_gets_no_answer_to_a_start_that_ctrl_c_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"num_workers": 1, "on_failure": "restart"}
    with muster.make_vec(Reporting, 1, **options) as envs:
        envs.reset()

        def interrupted(*_: Any) -> None:  # the launcher's answer stays in its socket
            monkeypatch.undo()
            raise KeyboardInterrupt

        monkeypatch.setattr(launcher_client, "readable", interrupted)
        with pytest.raises(KeyboardInterrupt):
            muster.make_vec(Reporting, 1, **options)
        kill_worker(envs, 0)
        envs.step([0])
        assert [worker["pid"] for worker in envs.stats()["workers"]] == list(envs.call(pid_of))


def pid_of(_env: Any, _index: int) -> int:
    return os.getpid()


def test_a_launcher_that_does_not_answer_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher_client, "_ANSWER_S", 2.0)
    client = launcher_client.LauncherClient.acquire("forkserver", 1, ENV_PRELOADS)
    try:
        os.kill(client._process.pid, signal.SIGSTOP)
        with muster.make_vec([Counter] * 2, num_workers=2) as envs:
            assert envs.reset(seed=3)[0].shape == (2, 3)
    finally:
        client.release()
