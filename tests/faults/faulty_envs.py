"""Envs that fail once each, in every way that we have seen."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from envs import Scripted

FAULT_STEP = 3


class TwoArguments(Exception):
    """An exception that raises a TypeError when it is unpickled."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(f"{what} in {where}")


class KeywordOnly(Exception):
    """Another exception that raises a TypeError when it is unpickled."""

    def __init__(self, *, what: str) -> None:
        super().__init__(what)


class HoldsLock(Exception):
    """An exception that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("holds a lock")
        self.lock = threading.Lock()


class FaultyEnv(Scripted):
    """Does `fault` once in env `at`, in its step number `FAULT_STEP` or in the place that the fault is named after.

    mark: a file that exists once the fault has happened, so that a restarted env does not repeat it.
    """

    def __init__(self, fault: str, mark: str, at: int = 1) -> None:
        super().__init__()
        self.fault, self.mark, self.at = fault, mark, at
        self._due("raise in __init__")

    def _due(self, *faults: str) -> bool:
        if self.index != self.at or self.fault not in faults or Path(self.mark).exists():
            return False
        Path(self.mark).touch()
        if self.fault.startswith("raise in "):
            raise ValueError(self.fault)
        return True

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        self._due("raise in reset")
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        obs, reward, terminated, truncated, info = super().step(action)
        if self.steps == FAULT_STEP:
            self._due("raise in step")
            if self._due(*ACTS):
                ACTS[self.fault]()
            if self._due(*OBSERVATIONS):
                obs = OBSERVATIONS[self.fault]
            if self._due("reward None"):
                reward = None
            if self._due("unpicklable info"):
                info = {"score": 1.0, "deep": {"the_lock": threading.Lock()}}
        return obs, reward, terminated, truncated, info

    def close(self) -> None:
        self._due("raise in close")


def _raise(make: Callable[[], BaseException]) -> Callable[[], None]:
    def act() -> None:
        raise make()

    return act


def _kill(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def hang_in_c() -> None:
    """Locks a mutex twice; PyDLL does not release the GIL, and no signal ends the wait."""
    libc, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)


def hang_in_python() -> None:
    while True:
        time.sleep(0.01)


def start_threads() -> None:
    for _ in range(3):
        threading.Thread(target=time.sleep, args=(1000,), daemon=False).start()


def start_children(process_group: int | None = None) -> None:
    """Starts a child that ignores SIGTERM and closes its fds, that child's own child, and a plain forked child.

    process_group: of the first child; 0 for a group of its own, as `timeout` and a shell's jobs have.
    """
    code = (
        "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)']); time.sleep(1000)"
    )
    subprocess.Popen([sys.executable, "-c", code], process_group=process_group)
    if os.fork() == 0:  # inherits everything that the worker has open
        time.sleep(1000)
        os._exit(0)


def flood_output() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.write("a line of noise that nobody has asked for\n" * 20_000)
        stream.flush()


ACTS: dict[str, Callable[[], None]] = {
    "two arguments": _raise(lambda: TwoArguments("it broke", "the middle")),
    "keyword-only": _raise(lambda: KeywordOnly(what="it broke")),
    "unpicklable exception": _raise(HoldsLock),
    "SystemExit": _raise(lambda: SystemExit(3)),
    "os._exit": lambda: os._exit(3),
    "SIGKILL": _kill(signal.SIGKILL),
    "SIGSTOP": _kill(signal.SIGSTOP),
    "segfault": lambda: ctypes.string_at(0) and None,
    "hang in Python": hang_in_python,
    "hang in C": hang_in_c,
    "closes fds": lambda: os.closerange(3, 256),
    "threads": start_threads,
    "children": start_children,
    "output flood": flood_output,
}

OBSERVATIONS: dict[str, Any] = {
    "wrong shape": np.zeros(1, np.float32),
    "wrong dtype": np.zeros(3, np.complex64),
    "obs None": None,
    "obs string": "three numbers",
    "obs NaN": np.full(3, np.nan, np.float32),
}
