"""The end of a vector env: all of it closes, what takes long has its time, and what is cut off is named."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from faulty_envs import hang_in_c

import muster
import programs
from envs import Scripted
from hanging import hang, released
from muster.errors import ClosedError, EnvError
from muster.pool import closing, limits
from muster.pool.launcher_client import LauncherClient
from processes import kill_worker
from slow import slow

HERE = Path(__file__).parent
ACTIONS = np.zeros(2, np.int64)
# Wide enough for a busy machine: a test that hangs here hangs forever, or for 1,000 s.
BOUND_S = 30.0
pytestmark = pytest.mark.usefixtures("leaves_nothing")
LINE = "muster: close(): "
FORKSERVER = {"num_workers": 2, "context": "forkserver"}
FORK = {"num_workers": 2, "context": "fork"}
SPAWN = {"num_workers": 2, "context": "spawn"}
THREAD = {"backend": "thread", "num_workers": 2}
SERIAL = {"backend": "serial"}
CALLER_STEPS = {"num_workers": 1, "caller_steps": True}
ON_WORKERS = [FORKSERVER, THREAD, *slow(FORK, SPAWN)]
ON_ALL = [*ON_WORKERS, SERIAL, *slow(CALLER_STEPS)]


class Slow(Scripted):
    """Writes a file when it is closed, for `seconds`; for ever if it is env `never`. raises: what its close raises.

    Action 1 raises, 2 takes long, 3 takes for ever, 4 too, in C.
    """

    action_space = gym.spaces.Discrete(5)

    def __init__(
        self, folder: str, seconds: float = 0.0, never: int | None = None, raises: BaseException | None = None
    ) -> None:
        super().__init__()
        self.file, self.seconds, self.never = Path(folder, f"video-{self.index}"), seconds, never
        self.raises = raises

    def step(self, action: Any) -> Any:
        if action == 1:
            raise ValueError("asked for")
        if action == 2:
            time.sleep(0.3)
            self.file.with_name(f"stepped-{self.index}").touch()
        if action == 4:
            hang_in_c()
        self.hang(self.index if action == 3 else None)
        return super().step(action)

    def hang(self, index: int | None) -> None:
        if self.index == index:
            hang()

    def close(self) -> None:
        if self.raises is not None:
            raise self.raises
        self.file.write_text("head ")
        end = time.monotonic() + self.seconds
        self.hang(self.never)
        while time.monotonic() < end:
            time.sleep(0.01)
        with self.file.open("a") as file:
            file.write("index")


class Plain(Slow):
    def step(self, action: Any) -> Any:
        return Scripted.step(self, action)


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


# ---- what ends it


def in_another_thread(envs: Any) -> None:
    thread = threading.Thread(target=envs.close)
    thread.start()
    thread.join()


def left_by_an_error(envs: Any) -> None:
    with pytest.raises(KeyError), envs:
        raise KeyError


def while_a_call_is_pending(envs: Any) -> None:
    envs.call_async("index")
    time.sleep(0.2)
    envs.close()


def while_a_step_is_pending(envs: Any) -> None:
    folder = envs.get_attr("file")[0].parent
    envs.send(np.array([2, 2]))
    envs.close()
    assert len(list(folder.glob("stepped-*"))) == 2  # it ends before the envs close


def with_a_dead_worker(envs: Any) -> None:
    kill_worker(envs, 0)
    envs.close()


ENDS: list[Callable[[Any], None]] = [lambda envs: envs.close(), in_another_thread, left_by_an_error]
ENDS += [while_a_call_is_pending, while_a_step_is_pending, with_a_dead_worker]


@pytest.mark.parametrize("options", ON_WORKERS, ids=str)
@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
def test_all_envs_are_closed_whatever_ends_it(end: Callable[[Any], None], options: Any, folder: str) -> None:
    if end is with_a_dead_worker and options is THREAD:
        return  # nothing kills a thread
    envs = muster.make_vec(Slow, 2, env_kwargs={"folder": folder, "seconds": 0.1}, **options)
    envs.reset()
    end(envs)
    assert whole(folder) == ([1] if end is with_a_dead_worker else [0, 1])
    envs.close()
    with pytest.raises(ClosedError):
        envs.step(ACTIONS)


@pytest.mark.parametrize("options", [FORKSERVER, THREAD, SERIAL], ids=str)
def test_garbage_collection_closes_and_sets_no_context_variable(options: Any, folder: str) -> None:
    # Before Python 3.12 it may begin within `ContextVar.set` (of NumPy, for one), which goes on with freed memory then.
    envs = muster.make_vec(Slow, 2, env_kwargs={"folder": folder}, **options)
    envs.reset()
    called: list[Any] = []
    sys.setprofile(lambda _, event, function: called.append(function))
    try:
        del envs
        gc.collect()
    finally:
        sys.setprofile(None)
    assert whole(folder) == [0, 1]
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

    dropped: Any = muster.make_vec(Scripted, 1, **options)
    dropped.itself = dropped  # only garbage collection frees it
    del dropped
    gc.disable()
    sys.setprofile(collect)
    try:
        envs = muster.make_vec(Scripted, 1, **options)
    finally:
        sys.setprofile(None)
        gc.enable()
    assert collected
    with envs:
        envs.reset()
        assert envs.step(ACTIONS[:1])[0].tolist() == [[0.0, 0.0, 1.0]]


class ClosedInAStep(Scripted):
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


@pytest.mark.parametrize("error", [SystemExit(5), GeneratorExit("no")], ids=repr)
@pytest.mark.parametrize(
    "options", [{"num_workers": 1}, *slow(SERIAL, {"backend": "thread", "num_workers": 1})], ids=str
)
def test_what_a_close_raises_names_the_env_and_hides_nothing(options: Any, error: BaseException, folder: str) -> None:
    kwargs = {"folder": folder, "raises": error}
    envs = muster.make_vec(Slow, 2, env_kwargs=kwargs, **options)
    with pytest.raises(EnvError, match=f"env 0 .*{type(error).__name__}: {error}") as raised:
        envs.close()
    assert f"env 1 ({type(error).__name__})" in raised.value.__notes__[-1]
    envs.close()
    with pytest.raises(KeyboardInterrupt) as left, muster.make_vec(Slow, 2, env_kwargs=kwargs, **options):
        raise KeyboardInterrupt
    assert "an env failed to close: env 0 (worker 0" in left.value.__notes__[0]


# ---- what takes long, and what is cut off


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


NEVER = {"never": 1}
# The number of envs, the env's arguments, what is done before, `close`'s timeout, what is said, and who has closed.
CUT_OFF: dict[str, tuple[int, dict[str, Any], Callable[[Any], Any], float | None, str, list[int]]] = {
    "a close": (
        *(4, NEVER, lambda envs: None, None),
        *("worker 0 (envs 0 to 1) was {} in close() of env 1, which did not end within close_timeout=0.3.", [0, 2, 3]),
    ),
    "a close, others behind it": (
        *(8, NEVER, lambda envs: None, 0.3),
        "worker 0 (envs 0 to 3) was {} in close() of env 1, which did not end within timeout=0.3; envs 2, 3 had not",
        [0, 4, 5, 6, 7],
    ),
    "a close without any time": (2, NEVER, lambda envs: None, 0.0, "worker 1 (env 1) was {} ", []),
    "a step": (
        *(2, {}, lambda envs: envs.send(np.array([0, 3])), None),
        *("worker 1 (env 1) was {} before it closed env 1: it was in step of env 1 for ", [0]),
    ),
    "a step in C": (
        *(2, {}, lambda envs: envs.send(np.array([0, 4])), None),
        *("worker 1 (env 1) was {} before it closed env 1: it was in step of env 1 for ", [0]),
    ),
    "a call": (
        *(2, {}, lambda envs: envs.call_async("hang", 1), 1000.0),
        *("worker 1 (env 1) was {} before it closed env 1: it was answering call('hang')", [0]),
    ),
}


@pytest.mark.parametrize("options", ON_WORKERS, ids=str)
@pytest.mark.parametrize("what", CUT_OFF)
def test_what_is_cut_off_is_named_with_its_stack(
    what: str, options: Any, folder: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if what == "a step in C" and options is THREAD:
        return  # nothing ends it
    num_envs, kwargs, begin, timeout, said, closed = CUT_OFF[what]
    monkeypatch.setattr(limits, "BUSY_S", 0.5)
    envs = muster.make_vec(Slow, num_envs, env_kwargs={"folder": folder, **kwargs}, close_timeout=0.3, **options)
    envs.reset()
    begin(envs)
    start = time.monotonic()
    with pytest.warns(RuntimeWarning) as seen:
        envs.close(timeout=timeout)
    assert time.monotonic() - start < BOUND_S
    (warning,) = seen
    verb = "left behind" if options is THREAD else "killed"
    assert str(warning.message).startswith(said.format(verb))
    assert "Its Python stack:" in str(warning.message)
    assert Path(__file__).name in str(warning.message)
    assert warning.filename == __file__
    assert timeout == 0.0 or whole(folder) == closed
    assert lines(capfd.readouterr().err) == []
    if options is THREAD:
        with released():  # they go on, and close
            pass
        assert whole(folder) == list(range(num_envs))


def test_terminate_waits_for_nothing_and_says_nothing(folder: str) -> None:
    envs = muster.make_vec(Slow, 2, num_workers=2, env_kwargs={"folder": folder, "never": 1})
    envs.close(terminate=True)
    assert whole(folder) == []


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
        "Data that was not written is lost.\nMore: docs/problems/slow-close.md"
    )
    assert first in whole(folder)
    assert not Path(folder, f"video-{first + 2}").exists()
    envs.close()


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
        "import muster, test_close as here\n"
        "from muster.pool import closing\n"
        "closing.ABANDONED_S = 0.3\n"
        f"envs = muster.make_vec(here.Slow, 2, num_workers=2, env_kwargs={{'folder': {folder!r}, 'never': 1}})"
    )
    path = os.pathsep.join([os.path.dirname(__file__), *sys.path])
    done = programs.run("-c", program, env={**os.environ, "PYTHONPATH": path}, check=True)
    assert "RuntimeWarning: worker 1 (env 1) was killed in close() of env 1" in done.stderr
    assert whole(folder) == [0]


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


# ---- the end of the whole program

# Each line that a worker writes is one `write`. Where Python is unbuffered, print() makes two writes of a line, and the
# lines of two workers get mixed.
PROGRAM = """
import os, signal, sys, threading, time
import faulty_envs, muster
from envs import Scripted
import numpy as np

class Env(Scripted):
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
