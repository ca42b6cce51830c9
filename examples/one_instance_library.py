"""A simulator that can be loaded once per process: every env gets a process of its own. Needs a C compiler (cc)."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

import muster

SIMULATOR = """
static int initialised, height;
int simulator_init(void) { return initialised++ ? -1 : 0; }
int simulator_climb(int by) { return height += by; }
void simulator_restart(void) { height = 0; }
"""


class Climber(gym.Env[Any, Any]):
    """A climber, obs ``[height]``. The library refuses a second ``simulator_init`` in the same process."""

    # Enough for Muster to give every env a process, also without one_env_per_process=True.
    metadata = {"one_per_process": True}  # noqa: RUF012  # Gymnasium's own form
    observation_space = gym.spaces.Box(0, np.inf, (1,), np.float64)
    action_space = gym.spaces.Discrete(4)

    def __init__(self, library: str) -> None:
        self.library = ctypes.CDLL(library)
        if self.library.simulator_init() != 0:
            raise RuntimeError("the simulator runs already in this process")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.library.simulator_restart()
        return np.zeros(1), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        height = self.library.simulator_climb(int(action))
        return np.array([height], np.float64), float(action), height >= 10, False, {}


def build_library(folder: Path) -> str:
    source, library = folder / "simulator.c", folder / "simulator.so"
    source.write_text(SIMULATOR)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    return str(library)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        library = build_library(Path(folder))
        Climber(library)  # uses up the one instance of this process, which does not matter
        with muster.make_vec(Climber, num_envs=3, env_kwargs={"library": library}, one_env_per_process=True) as envs:
            envs.reset(seed=0)
            for _ in range(2):
                obs, *_ = envs.step(np.array([1, 2, 3]))
            print("heights:", obs[:, 0].tolist())
            print("processes:", len({worker["pid"] for worker in envs.stats()["workers"]}))


if __name__ == "__main__":
    main()
