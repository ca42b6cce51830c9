"""A simulator as some vendors ship it: a C library that can be initialised once in a process."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

SOURCE = """
static int initialised, position;
int init(void) { return initialised++ ? -1 : 0; }
int move(int by) { return position += by; }
void back(void) { position = 0; }
"""


def compile_library(folder: Path) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "these tests need a C compiler"
    source, library = folder / "simulator.c", folder / "libsimulator.so"
    source.write_text(SOURCE)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True)
    return library


class Simulator(gym.Env[Any, Any]):
    """An env with obs ``[position]``; one step moves by the action."""

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


class DeclaredSimulator(Simulator):
    metadata = {"one_per_process": True}  # noqa: RUF012  # Gymnasium's own form
