"""Envs that do a deed at a certain moment, and the deeds. Imports no torch, which workers would import, too."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

import muster
from sample_envs import Counter

Deed = Callable[[], Any]
DEED_STEP = 2
LONG_S = 600.0


class Doing(Counter):
    """Does the deed for each moment: `build`, `reset`, `step` (the second one of an episode), `close`.

    A deed's result, if not None, replaces the right result. at: the env that does the deeds; the others do none.
    """

    def __init__(self, at: int = 0, **deeds: Deed) -> None:
        super().__init__(length=100)
        info = muster.get_worker_info()
        self.deeds = deeds if info is None or info.env_index in (None, at) else {}
        self.do("build")

    def do(self, moment: str, otherwise: Any = None) -> Any:
        result = self.deeds[moment]() if moment in self.deeds else None
        return otherwise if result is None else result

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        result = super().reset(seed=seed, options=options)
        return self.do("reset", result)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        result = super().step(action)
        return self.do("step", result) if self.count == DEED_STEP else result

    def close(self) -> None:
        self.do("close")


class Alone(Counter):
    """Declares that it must be alone in its process."""

    metadata = {"one_per_process": True}  # noqa: RUF012  # Gymnasium's own form


class FullHouse(Counter):
    """Has a library that allows one env in a process."""

    built = 0

    def __init__(self) -> None:
        super().__init__()
        FullHouse.built += 1
        if FullHouse.built > 1:
            raise OSError("the simulator is loaded already")


class Unasked(Counter):
    """Has a reset without arguments, as before Gym 0.26."""

    def reset(self) -> Any:  # type: ignore[override]
        return super().reset()


class Observing(Counter):
    """Observes samples of `space`."""

    def __init__(self, space: gym.Space[Any], action_space: gym.Space[Any] | None = None) -> None:
        super().__init__()
        self.observation_space = space
        if action_space is not None:
            self.action_space = action_space

    def _obs(self) -> Any:
        self.observation_space.seed(0)
        return self.observation_space.sample()


class Big(Counter):
    """Holds 20 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.ballast = np.ones(2_500_000)


class NotRebuilt:
    """An object that can be pickled, but not unpickled."""

    def __reduce__(self) -> Any:
        return refuse, ()


class Sticky:
    """An object that hangs where it is unpickled."""

    def __reduce__(self) -> Any:
        return hang, ()


def refuse() -> None:
    raise OSError("not in this process")


def fail() -> None:
    raise ValueError("the gear is broken")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def be_alarmed() -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGALRM)


def abort() -> None:
    signal.signal(signal.SIGABRT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGABRT)


def leave() -> None:
    os._exit(3)


def leave_with_words() -> None:
    os.write(2, b"simulator: licence expired\nsimulator: giving up\n")  # sys.stderr may be one that pytest has replaced
    time.sleep(0.2)  # otherwise the lines that the worker's relay has read, but not written yet, are lost
    os._exit(3)


def crash() -> None:
    ctypes.string_at(0)


def close_fds() -> None:
    os.closerange(3, 256)


def hang() -> None:
    time.sleep(LONG_S)


def nap() -> None:
    time.sleep(0.15)


def give_lock() -> Any:
    return np.zeros(3), 0.0, False, False, {"score": 1.0, "deep": {"the_lock": threading.Lock()}}


class OnceOnly:
    """A deed that is done the first time only, in all processes together: it leaves a file."""

    def __init__(self, deed: Deed, mark: Path) -> None:
        self.deed, self.mark = deed, mark

    def __call__(self) -> Any:
        if self.mark.exists():
            return None
        self.mark.touch()
        return self.deed()


class NotFirst(OnceOnly):
    """A deed that is done each time except the first."""

    def __call__(self) -> Any:
        if self.mark.exists():
            return self.deed()
        return self.mark.touch()
