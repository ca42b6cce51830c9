"""Simulators as some vendors ship them: a C library that can be initialised once in a process.

A second initialisation is refused, crashes, or silently shares the state of the first.
"""

from __future__ import annotations

import ctypes
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

import muster

SOURCE = """
static int initialised, position;
int init(void) { return initialised++ ? SECOND : 0; }
int move(int by) { return position += by; }
void back(void) { position = 0; }
"""


SECONDS = {"refuses": "-1", "crashes": "(*(volatile int *)0 = 0)", "shares": "0"}


def compile_library(folder: Path, second: str = "refuses") -> Path:
    """The compiled library. second: what it does when it is initialised a second time, a key of SECONDS."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "these tests need a C compiler"
    source, library = folder / f"{second}.c", folder / f"lib{second}.so"
    source.write_text(SOURCE.replace("SECOND", SECONDS[second]))
    subprocess.run([compiler, "-O0", "-shared", "-fPIC", "-o", library, source], check=True)
    return library


class Simulator(gym.Env[Any, Any]):
    """An env with obs ``[position]``; one step moves by the action."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012  # Gymnasium's own form
    observation_space = gym.spaces.Box(-1e6, 1e6, (1,), np.float64)
    action_space = gym.spaces.Discrete(3)

    def __init__(self, library: str) -> None:
        self._library = ctypes.CDLL(library)
        if self._library.init() != 0:
            raise RuntimeError("the simulator runs already in this process")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._library.back()
        return np.zeros(1), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.array([float(self._library.move(int(action)))]), 0.0, False, False, {}


class ClassVariable(gym.Env[Any, Any]):
    """An env whose position belongs to its class, so that all envs of a process share it. library: not used."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012  # Gymnasium's own form
    observation_space = gym.spaces.Box(-1e6, 1e6, (1,), np.float64)
    action_space = gym.spaces.Discrete(3)
    position = 0.0

    def __init__(self, library: str = "") -> None:
        """Takes the arguments of a Simulator."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        type(self).position = 0.0
        return np.zeros(1), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        type(self).position += float(action)
        return np.array([self.position]), 0.0, False, False, {}


class GlobalGenerator(ClassVariable):
    """An env that seeds NumPy's global generator and draws from it."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        np.random.seed(3)  # noqa: NPY002  # as careless envs do
        return np.zeros(1), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.array([np.random.rand() * int(action)]), 0.0, False, False, {}  # noqa: NPY002


class Listening(gym.Env[Any, Any]):
    """An env that holds an address while it lives. A seat for each env index, or one for the whole machine."""

    observation_space = gym.spaces.Box(-1e6, 1e6, (1,), np.float64)
    action_space = gym.spaces.Discrete(3)

    def __init__(self, address: str, only_one: bool = False) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        seat = "" if only_one else muster.get_worker_info().env_index
        self.socket.bind(f"\0{address}{seat}")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        return np.zeros(1), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        time.sleep(0.002)  # long enough for two trials to meet
        return np.zeros(1), 0.0, False, False, {}

    def close(self) -> None:
        self.socket.close()


class DeclaredSimulator(Simulator):
    metadata = {"one_per_process": True}  # noqa: RUF012  # Gymnasium's own form
