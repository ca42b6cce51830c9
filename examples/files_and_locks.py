"""Open files, databases and locks: built where the env runs, or shared by envs that stay in one process."""

from __future__ import annotations

import sqlite3
import tempfile
import threading
from pathlib import Path
from typing import IO, Any

import gymnasium as gym
import numpy as np

import muster


class Logbook(gym.Env[Any, Any]):
    """Draws levels from a database and writes a line per step. obs ``[level]``."""

    observation_space = gym.spaces.Box(0, 100, (1,), np.float64)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, levels: sqlite3.Connection, log: IO[str], lock: Any = None) -> None:
        self.levels = levels
        self.log = log
        self.lock = lock or threading.Lock()
        self.level = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        (self.level,) = self.levels.execute("SELECT level FROM levels WHERE id = ?", (seed or 0,)).fetchone()
        return np.array([self.level], np.float64), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.level += int(action)
        with self.lock:
            self.log.write(f"{self.level}\n")
            self.log.flush()
        return np.array([self.level], np.float64), 0.0, False, False, {}


def open_log(folder: str) -> IO[str]:
    """Opens a file for each env, closed with the env. muster.lazy calls this in the worker."""
    info = muster.get_worker_info()
    assert info is not None
    return open(Path(folder) / f"env-{info.unique_index}.log", "w")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        database = str(Path(folder) / "levels.db")
        connection = sqlite3.connect(database)
        with connection:
            connection.execute("CREATE TABLE levels (id INTEGER, level INTEGER)")
            connection.executemany("INSERT INTO levels VALUES (?, ?)", [(i, 10 * i) for i in range(4)])
        connection.close()

        # In worker processes: each env opens its own.
        own = {"levels": muster.lazy(sqlite3.connect, database), "log": muster.lazy(open_log, folder)}
        with muster.make_vec(Logbook, num_envs=4, env_kwargs=own) as envs:
            envs.reset(seed=0)
            envs.step(np.array([0, 1, 0, 1]))
        print("own files:", [Path(folder, f"env-{i}.log").read_text().strip() for i in range(4)])

        # In threads of this process: all envs share one file and one lock, which are the same objects.
        lock = threading.Lock()
        with open(Path(folder) / "all.log", "w+") as log:
            shared = {"levels": own["levels"], "log": log, "lock": lock}
            with muster.make_vec(Logbook, num_envs=4, backend="thread", env_kwargs=shared) as envs:
                envs.reset(seed=0)
                envs.step(np.array([0, 1, 0, 1]))
                print("one lock:", all(one is lock for one in envs.get_attr("lock")))
            log.seek(0)
            print("one file:", sorted(int(line) for line in log))


if __name__ == "__main__":
    main()
