"""Workers that die or take too long, and envs that are restarted."""

from __future__ import annotations

import builtins
import io
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gymnasium as gym
import numpy as np

import muster
from processes import kill_worker
from situations.acting_envs import (
    DEED_STEP,
    Counter,
    Deed,
    Doing,
    NotFirst,
    OnceOnly,
    Sticky,
    abort,
    be_alarmed,
    close_fds,
    crash,
    fail,
    hang,
    kill,
    leave,
    leave_with_words,
    nap,
    stop,
)
from situations.recording import raised, situation, situations

ACTIONS = np.zeros(2, np.int64)
# A worker that gets no CPU time for so long must not look as if it hung.
STEP_TIMEOUT_S = 1.0
START_TIMEOUT_S = 2.0


def two_envs(backend: str = "process", *, env: Any = Doing, env_kwargs: Any = None, **options: Any) -> Any:
    """Two envs with one worker, if any. options: deeds of env 1, and options of `make_vec`."""
    deeds = {name: options.pop(name) for name in ("build", "reset", "step", "close") if name in options}
    workers = {} if backend == "serial" else {"num_workers": 1}
    kwargs = {"at": 1, **deeds} if env is Doing else env_kwargs
    return muster.make_vec(env, 2, backend=backend, env_kwargs=kwargs, **workers, **options)


def play(envs: Any, steps: int = DEED_STEP) -> Any:
    """The result of the last of `steps` steps after a reset."""
    envs.reset(seed=0)
    result = None
    for _ in range(steps):
        result = envs.step(ACTIONS)
    return result


@contextmanager
def file_reads(**texts: str) -> Iterator[None]:
    """Makes files of the system hold these texts: ``proc__meminfo`` is /proc/meminfo, and one _ stands for a dot."""
    opened, made_up = io.open, {f"/{name.replace('__', '/').replace('_', '.')}": text for name, text in texts.items()}

    def read(file: Any, *args: Any, **kwargs: Any) -> Any:
        text = made_up.get(os.fspath(file)) if isinstance(file, (str, Path)) else None
        return opened(file, *args, **kwargs) if text is None else io.StringIO(text)

    with patch.object(io, "open", read), patch.object(builtins, "open", read):
        yield


def oom_kills(count: int) -> Any:
    return file_reads(sys__fs__cgroup__memory_events=f"low 0\noom {count}\noom_kill {count}\n")


# ---- deaths


def in_step(deed: Deed) -> Any:
    def die() -> None:
        with oom_kills(0), two_envs(step=deed) as envs:
            play(envs)

    return die


situations(
    "death",
    {
        "SIGKILL in a step": in_step(kill),
        "os._exit in a step": in_step(leave),
        "with last words on stderr": in_step(leave_with_words),
        "a segfault": in_step(crash),
        "SIGABRT": in_step(abort),
        "another signal": in_step(be_alarmed),
    },
)


@situation("death: SIGKILL where the kernel has killed for memory")
def _() -> None:
    with oom_kills(1), two_envs(step=kill) as envs:
        play(envs)


@situation("death: file descriptors closed, found out by a call")
def _() -> None:
    with two_envs(step=close_fds) as envs:
        play(envs)
        envs.get_attr("count")


@situation("death: while building")
def _() -> None:
    two_envs(build=leave)


@situation("death: in a reset, and what the next call says")
def _() -> Iterator[Any]:
    with two_envs(reset=leave) as envs:
        yield raised(envs.reset)
        yield raised(envs.step, ACTIONS)


@situation("death: while answering a call")
def _() -> Iterator[Any]:
    with two_envs(close=leave) as envs:
        envs.reset()
        yield raised(envs.call, "do", "close")


@situation("death: of an idle worker")
def _() -> Iterator[Any]:
    with two_envs() as envs, oom_kills(0):
        play(envs)
        kill_worker(envs, 0)
        yield raised(envs.step, ACTIONS)


# ---- timeouts


@situation("timeout: of each way to wait for processes")
def _() -> Iterator[Any]:
    with two_envs(step=nap, reset=nap, close=nap) as envs:
        envs.reset_async()
        yield raised(envs.reset_wait, timeout=0.01)
        envs.reset_wait()
        envs.step(ACTIONS)
        envs.step_async(ACTIONS)
        yield raised(envs.step_wait, timeout=0.01)
        yield raised(envs.recv, timeout=0.01)
        yield raised(envs.recv, min_envs=2, timeout=0)
        envs.step_wait()
        envs.call_async("do", "close")
        yield raised(envs.call_wait, timeout=0.01)
        envs.call_wait()


@situation("timeout: of a call to threads")
def _() -> Iterator[Any]:
    with two_envs("thread", close=nap) as envs:
        envs.call_async("do", "close")
        yield raised(envs.call_wait, timeout=0.01)
        envs.call_wait()


@situation("timeout: step_timeout")
def _() -> None:
    with two_envs(step=hang, step_timeout=STEP_TIMEOUT_S) as envs:
        play(envs)


@situation("timeout: step_timeout of a process that is stopped")
def _() -> None:
    with two_envs(step=stop, step_timeout=STEP_TIMEOUT_S) as envs:
        play(envs)


@situation("timeout: step_timeout in a call")
def _() -> Iterator[Any]:
    with muster.make_vec(Doing, 1, num_workers=1, env_kwargs={"close": hang}, step_timeout=STEP_TIMEOUT_S) as envs:
        yield raised(envs.call, "do", "close")


@situation("timeout: start_timeout")
def _() -> None:
    two_envs(build=hang, start_timeout=START_TIMEOUT_S)


@situation("timeout: start_timeout, in an argument that is being unpickled")
def _() -> None:
    muster.make_vec(Counter, 1, num_workers=1, env_kwargs={"length": Sticky()}, start_timeout=START_TIMEOUT_S)


@situation("timeout: start_timeout of a thread")
def _() -> None:
    two_envs("thread", build=nap, start_timeout=0.05)


# ---- restarts


def reasons(envs: Any, infos: Any) -> str:
    """The reasons of the envs that were restarted."""
    told = [f"{env}: {infos['restarted'][env]}" for env in range(envs.num_envs) if infos["_restarted"][env]]
    return "restarted: " + "\n".join(told)


def restarting(backend: str = "serial", **options: Any) -> Any:
    return two_envs(backend, on_failure="restart", **options)


@situation("restart: after a raise in a step")
def _() -> Iterator[Any]:
    with restarting(step=fail) as envs:
        yield reasons(envs, play(envs)[-1])


@situation("restart: after a raise in a reset")
def _() -> Iterator[Any]:
    with tempfile.TemporaryDirectory() as folder, restarting(reset=OnceOnly(fail, Path(folder) / "mark")) as envs:
        yield reasons(envs, envs.reset()[1])


@situation("restart: after a death")
def _() -> Iterator[Any]:
    with restarting("process", step=leave_with_words) as envs:
        yield reasons(envs, play(envs)[-1])


@situation("restart: after a death between two steps")
def _() -> Iterator[Any]:
    with restarting("process") as envs, oom_kills(0):
        play(envs)
        kill_worker(envs, 0)
        yield reasons(envs, envs.step(ACTIONS)[-1])


@situation("restart: after a timeout")
def _() -> Iterator[Any]:
    with restarting("process", step=hang, step_timeout=STEP_TIMEOUT_S) as envs:
        yield reasons(envs, play(envs)[-1])


@situation("restart: after a call that killed the worker")
def _() -> Iterator[Any]:
    with restarting("process", close=leave) as envs:
        yield raised(envs.call, "do", "close")


@situation("restart: too often, by raising")
def _() -> Iterator[Any]:
    with restarting(step=fail, max_restarts=1) as envs:
        play(envs)
        yield raised(play, envs)
        yield raised(envs.reset)


@situation("restart: too often, by dying")
def _() -> None:
    with restarting("process", step=leave, max_restarts=0) as envs:
        play(envs)


@situation("restart: an env that cannot be built anew")
def _() -> Iterator[Any]:
    with tempfile.TemporaryDirectory() as folder:
        deeds = {"build": NotFirst(fail, Path(folder) / "mark"), "step": leave}
        with restarting("process", max_restarts=1, **deeds) as envs:
            yield raised(play, envs)


@situation("restart: an env that is laid out otherwise when it is built anew")
def _() -> Iterator[Any]:
    built: list[Any] = []

    def make_env() -> Any:
        env = Doing(step=fail)
        if len(built) > 1:
            env.observation_space = gym.spaces.Box(-1, 1, (7,), np.float32)
        built.append(env)
        return env

    with restarting(env=make_env, max_restarts=1) as envs:
        yield raised(play, envs)
