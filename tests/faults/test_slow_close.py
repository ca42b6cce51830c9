"""Envs whose own ``close()`` takes long: they are waited for, what is cut off is said, and Ctrl-C ends the wait."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from faulty_envs import CountingEnv

import muster
import programs
from hanging import hang, released
from muster.errors import ConfigError
from muster.pool import closing, limits
from slow import slow

pytestmark = pytest.mark.usefixtures("leaves_nothing")
LINE = "muster: close(): "
FORKSERVER = {"num_workers": 2, "context": "forkserver"}
FORK = {"num_workers": 2, "context": "fork"}
SPAWN = {"num_workers": 2, "context": "spawn"}
THREAD = {"backend": "thread", "num_workers": 2}
CALLER_STEPS = {"num_workers": 1, "caller_steps": True}
ON_WORKERS = [FORKSERVER, THREAD, *slow(FORK, SPAWN)]
ON_ALL = [*ON_WORKERS, {"backend": "serial"}, *slow(CALLER_STEPS)]


class Slow(CountingEnv):
    """Writes a file when it is closed, for `seconds`; for ever if it is env `never`.

    Action 1 raises, 2 takes long, 3 takes for ever.
    """

    action_space = gym.spaces.Discrete(4)

    def __init__(self, folder: str, seconds: float = 0.0, never: int | None = None) -> None:
        super().__init__()
        self.file, self.seconds, self.never = Path(folder, f"video-{self.index}"), seconds, never

    def step(self, action: Any) -> Any:
        if action == 1:
            raise ValueError("asked for")
        if action == 2:
            time.sleep(0.3)
            self.file.with_name(f"stepped-{self.index}").touch()
        self.hang(self.index if action == 3 else None)
        return super().step(action)

    def hang(self, index: int | None) -> None:
        if self.index == index:
            hang()

    def close(self) -> None:
        self.file.write_text("head ")
        end = time.monotonic() + self.seconds
        self.hang(self.never)
        while time.monotonic() < end:
            time.sleep(0.01)
        with self.file.open("a") as file:
            file.write("index")


class Meeting(Slow):
    """An env whose close ends once both envs close."""

    def close(self) -> None:
        super().close()
        while len(list(self.file.parent.glob("video-*"))) < 2:
            time.sleep(0.01)


class Plain(Slow):
    def step(self, action: Any) -> Any:
        return CountingEnv.step(self, action)


class Alone(Slow):
    metadata = {"one_per_process": True}  # noqa: RUF012


@pytest.fixture(autouse=True)
def _goes_on(leaves_nothing: None) -> Iterator[None]:
    with released():
        yield


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path)


def whole(folder: str) -> list[int]:
    """The envs whose files are complete."""
    return sorted(int(file.name[6:]) for file in Path(folder).glob("video-*") if file.read_text() == "head index")


def lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("muster: ")]


@pytest.mark.parametrize("options", ON_ALL, ids=str)
def test_each_env_of_a_worker_has_its_time_and_one_line_says_what_closes(
    options: Any, folder: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(closing, "NOTICE_S", 0.25)
    kwargs = {"folder": folder, "seconds": 0.2}
    envs = muster.make_vec(Slow, 4, env_kwargs=kwargs, close_timeout=0.35, **options)
    envs.close()
    assert whole(folder) == [0, 1, 2, 3]
    said = lines(capfd.readouterr().err)
    assert said[0].startswith(LINE)
    assert "still closing after 0.25 s. Waiting " in said[0]
    if options.get("backend") != "serial" and "caller_steps" not in options:
        assert len(said) == 1
        assert said[0].startswith(f"{LINE}envs 1, 3 are still closing")
        assert said[0].endswith("Waiting as long as close_timeout=0.35 allows; Ctrl-C ends the wait")
    envs.close()


def test_all_workers_close_at_the_same_time(folder: str) -> None:
    muster.make_vec(Meeting, 2, num_workers=2, env_kwargs={"folder": folder}).close()
    assert whole(folder) == [0, 1]


@pytest.mark.parametrize("options", ON_WORKERS, ids=str)
def test_what_is_cut_off_is_named_with_its_stack(options: Any, folder: str) -> None:
    kwargs = {"folder": folder, "never": 1}
    envs = muster.make_vec(Slow, 4, env_kwargs=kwargs, close_timeout=0.3, **options)
    with pytest.warns(RuntimeWarning) as seen:
        envs.close()
    (warning,) = seen
    verb = "left behind" if options.get("backend") == "thread" else "killed"
    assert str(warning.message).startswith(
        f"worker 0 (envs 0 to 1) was {verb} in close() of env 1, which did not end within close_timeout=0.3."
    )
    assert "test_slow_close.py" in str(warning.message)
    assert warning.filename == __file__
    assert whole(folder) == [0, 2, 3]


@pytest.mark.parametrize("options", ON_WORKERS, ids=str)
def test_a_timeout_of_0_says_what_it_cuts_off(options: Any, folder: str) -> None:
    envs = muster.make_vec(Slow, 2, env_kwargs={"folder": folder, "never": 1}, **options)
    envs.reset()
    with pytest.warns(RuntimeWarning) as seen:
        envs.close(timeout=0)
    (warning,) = seen
    verb = "left behind" if options.get("backend") == "thread" else "killed"
    assert f"worker 1 (env 1) was {verb} " in str(warning.message)
    assert "Its Python stack:" in str(warning.message)


@pytest.mark.parametrize("options", ON_WORKERS, ids=str)
def test_a_step_that_is_cut_off_is_named_with_its_stack(
    options: Any, folder: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(limits, "BUSY_S", 1.0)
    envs = muster.make_vec(Slow, 2, env_kwargs={"folder": folder}, **options)
    envs.reset()
    envs.send(np.array([0, 3]))
    with pytest.warns(RuntimeWarning) as seen:
        envs.close()
    (warning,) = seen
    is_thread = options.get("backend") == "thread"
    assert str(warning.message).startswith(
        f"worker 1 (env 1) was {'left behind' if is_thread else 'killed'} before it closed env 1: "
        "it was in step of env 1 for "
    )
    assert "test_slow_close.py" in str(warning.message)
    assert warning.filename == __file__
    assert lines(capfd.readouterr().err) == []
    assert whole(folder) == [0]


def test_envs_that_had_not_begun_are_named_too(folder: str) -> None:
    envs = muster.make_vec(Slow, 4, num_workers=1, env_kwargs={"folder": folder, "never": 1})
    with pytest.warns(RuntimeWarning, match=r"env 1, which did not end within timeout=0.3; envs 2, 3 had not begun"):
        envs.close(timeout=0.3)


def test_terminate_waits_for_nothing_and_says_nothing(folder: str) -> None:
    envs = muster.make_vec(Slow, 2, num_workers=2, env_kwargs={"folder": folder, "never": 1})
    envs.close(terminate=True)
    assert whole(folder) == []


@pytest.mark.parametrize("options", [*ON_WORKERS, *slow(CALLER_STEPS)], ids=str)
def test_ctrl_c_ends_the_wait(options: Any, folder: str) -> None:
    envs = muster.make_vec(Slow, 2, env_kwargs={"folder": folder, "never": 1}, **options)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        envs.close()
    timer.join()
    envs.close()


def dummy(folder: str, **kwargs: Any) -> Any:
    pytest.importorskip("stable_baselines3")
    from muster.interop.sb3 import DummyVecEnv

    return DummyVecEnv([lambda: Slow(folder, **kwargs)] * 4)


def sync(folder: str, **kwargs: Any) -> Any:
    from muster.interop.gymnasium import SyncVectorEnv

    return SyncVectorEnv([lambda: Slow(folder, **kwargs)] * 4)


def serial(folder: str, **kwargs: Any) -> Any:
    return muster.make_vec(Slow, 4, backend="serial", env_kwargs={"folder": folder, **kwargs})


def caller_steps(folder: str, **kwargs: Any) -> Any:
    return muster.make_vec(Slow, 6, num_workers=1, caller_steps=True, env_kwargs={"folder": folder, **kwargs})


@pytest.mark.parametrize("make", [serial, caller_steps, *slow(dummy, sync)])
def test_ctrl_c_in_the_calling_thread_leaves_the_other_envs_unclosed(make: Any, folder: str) -> None:
    first = 3 if make is caller_steps else 0
    envs = make(folder, never=first + 1)
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.warns(RuntimeWarning) as seen, pytest.raises(KeyboardInterrupt):
        envs.close()
    timer.join()
    rest = f"{first + 2}, 3" if first == 0 else "5"
    (said,) = [str(one.message) for one in seen]
    assert said == (
        f"Ctrl-C ended close() of env {first + 1}; env{'s' * (first == 0)} {rest} had not begun. "
        "What was not written is lost.\nMore: docs/problems/slow-close.md"
    )
    assert first in whole(folder)
    assert not Path(folder, f"video-{first + 2}").exists()
    envs.close()


@pytest.mark.parametrize("options", ON_WORKERS, ids=str)
def test_a_pending_step_ends_before_the_envs_close(options: Any, folder: str) -> None:
    envs = muster.make_vec(Slow, 2, env_kwargs={"folder": folder}, **options)
    envs.reset()
    envs.send(np.array([2, 2]))
    envs.close()
    assert whole(folder) == [0, 1]
    assert len(list(Path(folder).glob("stepped-*"))) == 2


def test_a_dead_worker_takes_no_time_from_the_others(folder: str) -> None:
    envs = muster.make_vec(Slow, 2, num_workers=2, env_kwargs={"folder": folder, "seconds": 0.2})
    os.kill(envs.stats()["workers"][0]["pid"], signal.SIGKILL)
    envs.close()
    assert whole(folder) == [1]


def test_another_thread_may_close_while_this_one_waits_for_a_call(folder: str) -> None:
    envs = muster.make_vec(Slow, 2, num_workers=2, env_kwargs={"folder": folder, "seconds": 0.2})
    thread = threading.Thread(target=envs.close)
    thread.start()
    thread.join()
    assert whole(folder) == [0, 1]


def test_a_replaced_worker_has_the_time_to_close(folder: str) -> None:
    kwargs = {"folder": folder, "seconds": 1.2}
    envs = muster.make_vec(Alone, 1, env_kwargs=kwargs, on_failure="restart", autoreset_mode="same_step")
    envs.reset()
    assert "ValueError" in envs.step(np.array([1]))[4]["restarted"][0]
    assert whole(folder) == [0]
    envs.close(terminate=True)


def test_garbage_collection_has_a_bound_of_its_own(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closing, "ABANDONED_S", 0.3)
    envs = muster.make_vec(Slow, 2, num_workers=2, env_kwargs={"folder": folder, "never": 1})
    dropped = {"envs": envs}
    del envs
    with pytest.warns(RuntimeWarning, match=r"worker 1 .*in close\(\) of env 1.*the 0.3 s that garbage collection"):
        dropped.clear()
    assert whole(folder) == [0]


def test_the_interpreters_exit_says_what_it_cuts(folder: str) -> None:
    program = (
        "import muster, test_slow_close as here\n"
        "from muster.pool import closing\n"
        "closing.ABANDONED_S = 0.3\n"
        f"envs = muster.make_vec(here.Slow, 2, num_workers=2, env_kwargs={{'folder': {folder!r}, 'never': 1}})"
    )
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    done = programs.run("-c", program, env={**os.environ, "PYTHONPATH": path}, check=True)
    assert "RuntimeWarning: worker 1 (env 1) was killed in close() of env 1" in done.stderr
    assert whole(folder) == [0]


@pytest.mark.parametrize("value", [0, -1.0, "60", True])
def test_a_close_timeout_that_makes_no_sense_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="close_timeout must be a number of seconds greater than 0, got"):
        muster.make_vec("CartPole-v1", close_timeout=value)
    with pytest.raises(ConfigError, match="close_timeout must be a number of seconds greater than 0, got"):
        muster.MultiCollector("CartPole-v1", frames_per_batch=4, num_collectors=1, close_timeout=value)


# ---- drop-ins wait as their originals do


FORKED = {"start_method": "fork"}  # a fresh process would import SB3


def sb3(folder: str, **kwargs: Any) -> Any:
    from muster.interop.sb3 import make_vec_env

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cls = pytest.importorskip("muster.interop.sb3").SubprocVecEnv
        return make_vec_env(Slow, 2, env_kwargs={"folder": folder, **kwargs}, vec_env_cls=cls, vec_env_kwargs=FORKED)


def gymnasiums(folder: str, **kwargs: Any) -> Any:
    from muster.interop.gymnasium import AsyncVectorEnv

    return AsyncVectorEnv([lambda: Slow(folder, **kwargs)] * 2)


@pytest.mark.parametrize("make", [sb3, gymnasiums])
def test_drop_ins_wait_for_ever_for_the_step_and_for_the_close(
    make: Any, folder: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for module, name in ((limits, "CLOSE_S"), (limits, "BUSY_S"), (closing, "NOTICE_S")):
        monkeypatch.setattr(module, name, 0.1)
    envs = make(folder, seconds=0.3)
    envs.reset()
    envs.step_async(np.array([2, 2]))
    with contextlib.nullcontext() if make is sb3 else pytest.warns(UserWarning, match="waiting for a pending call"):
        envs.close()
    assert whole(folder) == [0, 1]
    assert len(list(Path(folder).glob("stepped-*"))) == 2
    (line,) = lines(capfd.readouterr().err)
    assert "worker 0 (env 0) is still in step of env 0 for " in line
    assert line.endswith(". Waiting for as long as that takes; Ctrl-C ends the wait")


@pytest.mark.parametrize("kind", ["step", *slow("nothing", "call")])
def test_gymnasiums_timeout_is_not_for_the_close(kind: str, folder: str) -> None:
    envs = gymnasiums(folder, seconds=0.5)
    envs.reset()
    said: Any = contextlib.nullcontext()
    if kind != "nothing":
        said = pytest.warns(UserWarning, match="waiting for a pending call")
        envs.step_async(np.array([0, 0])) if kind == "step" else envs.call_async("hang", None)
        time.sleep(0.5)
    with said:
        envs.close(timeout=0)
    assert whole(folder) == [0, 1]


@pytest.mark.parametrize("kind", ["step", *slow("call")])
def test_gymnasiums_timeout_is_for_the_pending_call_and_ends_all(kind: str, folder: str) -> None:
    envs = gymnasiums(folder, seconds=100.0)
    envs.reset()
    envs.step_async(np.array([0, 3])) if kind == "step" else envs.call_async("hang", 1)
    with pytest.warns() as seen:
        envs.close(timeout=0.5)
    waiting, cut = [str(one.message) for one in seen]
    assert "waiting for a pending call" in waiting
    assert cut.startswith("worker 0 (env 0) was killed in close() of env 0, which did not end within timeout=0.5.")
    doing = "in step of env 1 for" if kind == "step" else "answering call('hang') for"
    assert f"worker 1 (env 1) was killed before it closed env 1: it was {doing}" in cut
    assert whole(folder) == []


def test_torchrls_shutdown_timeout_is_for_each_process_and_for_their_end(folder: str) -> None:
    parallel = pytest.importorskip("muster.interop.torchrl")
    kwargs = {"folder": folder, "seconds": 0.25, "never": 1}
    env = parallel.ParallelEnv(2, Slow, create_env_kwargs=kwargs, mp_start_method="fork", shutdown_timeout=0.2)
    with pytest.warns(RuntimeWarning, match=r"worker 1 .* env 1, which did not end within shutdown_timeout=0.2"):
        env.close()
    assert whole(folder) == [0]


def test_envs_of_collectors_have_their_time_too(folder: str) -> None:
    pytest.importorskip("torchrl")
    collector = muster.MultiCollector(
        Plain,
        num_envs=4,
        num_collectors=2,
        frames_per_batch=100_000,
        sync=False,
        context="fork",
        close_timeout=0.3,
        make_vec_options={"env_kwargs": {"folder": folder, "seconds": 0.2}},
    )
    next(iter(collector))  # each collector goes on with its next batch
    collector.shutdown()
    assert whole(folder) == [0, 1, 2, 3]
