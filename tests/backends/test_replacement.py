"""Replacing a worker: the others go on meanwhile, what was asked for is done after all, in a fresh process or not."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import muster
from envs import Scripted
from muster.errors import WorkerDied
from one_instance import DeclaredSimulator, compile_library
from processes import kill_worker
from slow import slow

ACTIONS = np.zeros(4, np.int64)
BOUND_S = 30.0
pytestmark = pytest.mark.usefixtures("leaves_nothing")


class Env(Scripted):
    """Observes ``[env_index, options["goal"], step]``. Reads files in `folder`: what to do, and whether to go on.

    ``wait-1`` lets env 1 wait in its constructor until the file is gone; ``reset-1`` makes its next resets fail, as
    often as the file has lines, each in the way that the line says.
    """

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder, self.goal = Path(folder), -1
        while (self.folder / f"wait-{self.index}").exists():
            time.sleep(0.01)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        orders = self.folder / f"reset-{self.index}"
        first, *rest = orders.read_text().split() if orders.exists() else [""]
        orders.write_text("\n".join(rest) or "well")
        if first == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if first == "raises":
            raise ValueError("asked for")
        self.goal = (options or {}).get("goal", 0)
        return super().reset(seed=seed)

    def step(self, action: Any) -> Any:
        if action == 1:
            raise ValueError("asked for")
        return super().step(action)

    def _obs(self) -> Any:
        return np.array([self.index, self.goal, self.steps], np.float32)


def make(folder: Path, **options: Any) -> Any:
    settings: dict[str, Any] = {"num_workers": 2, "on_failure": "restart", **options}
    return muster.make_vec(Env, 4, env_kwargs={"folder": str(folder)}, **settings)


def recv_until(envs: Any, done: Callable[[Any], bool]) -> None:
    """Takes what is ready, and sends on at once, until `done(batch)`."""
    deadline = time.monotonic() + BOUND_S
    while not done(batch := envs.recv(min_envs=1)):
        assert time.monotonic() < deadline
        envs.send(ACTIONS[: len(batch.env_ids)], batch.env_ids)


# ---- resets that are asked again


@pytest.mark.parametrize(
    ("failures", "mode"),
    [("dies", "next_step"), ("raises", "same_step"), ("dies dies", "disabled"), ("dies raises raises", "next_step")],
)
def test_a_retried_reset_is_given_its_options(tmp_path: Path, failures: str, mode: str) -> None:
    with make(tmp_path, autoreset_mode=mode) as envs:
        envs.reset(seed=0)
        envs.step(ACTIONS)
        (tmp_path / "reset-1").write_text("\n".join(failures.split()))
        obs, infos = envs.reset(seed=0, options={"goal": 7})
        np.testing.assert_array_equal(obs, [[env, 7, 0] for env in range(4)])
        assert infos["_restarted"][1]
        obs, rewards, _, truncated, _ = envs.step(ACTIONS)
        np.testing.assert_array_equal(obs, [[env, 7, 1] for env in range(4)])
        assert not truncated.any()
        assert (rewards == 1).all()


def test_a_retried_reset_leaves_the_envs_outside_its_mask_alone(tmp_path: Path) -> None:
    with make(tmp_path) as envs:
        envs.reset(seed=0)
        envs.step(ACTIONS)
        (tmp_path / "reset-1").write_text("raises")
        obs, _ = envs.reset(options={"goal": 7, "reset_mask": np.array([False, True, False, False])})
        np.testing.assert_array_equal(obs, [[0, 0, 1], [1, 7, 0], [2, 0, 1], [3, 0, 1]])
        # Where the worker dies, its other envs' episodes are lost, and told as truncated with their next answer.
        (tmp_path / "reset-1").write_text("dies")
        obs, _ = envs.reset(options={"goal": 8, "reset_mask": np.array([False, True, True, False])})
        np.testing.assert_array_equal(obs, [[0, 0, 1], [1, 8, 0], [2, 8, 0], [3, 0, 1]])
        obs, _, _, truncated, _ = envs.step(ACTIONS)
        assert truncated.tolist() == [True, False, False, False]
        np.testing.assert_array_equal(obs, [[0, 0, 1], [1, 8, 1], [2, 8, 1], [3, 0, 2]])


def test_an_autoreset_after_a_restart_is_given_no_options(tmp_path: Path) -> None:
    with make(tmp_path) as envs:
        envs.reset(seed=0, options={"goal": 7})
        assert envs.step(ACTIONS + [0, 1, 0, 0])[3].tolist() == [False, True, False, False]
        np.testing.assert_array_equal(envs.step(ACTIONS)[0][1], [1, 0, 0])


# ---- while the replacement builds its envs


@pytest.mark.parametrize("context", ["forkserver", "fork", *slow("spawn")])
def test_the_others_are_delivered_while_a_replacement_builds(tmp_path: Path, context: str) -> None:
    with make(tmp_path, context=context) as envs:
        envs.reset(seed=0)
        (tmp_path / "wait-3").touch()
        kill_worker(envs, 1)
        envs.send(ACTIONS)
        rows: list[int] = []

        def has_many(batch: Any) -> bool:
            rows.extend(batch.env_ids.tolist())
            return len(rows) > 100

        recv_until(envs, has_many)
        assert set(rows) == {0, 1}
        (tmp_path / "wait-3").unlink()
        lost: set[int] = set()

        def has_the_lost(batch: Any) -> bool:
            lost.update(batch.env_ids[batch.truncated].tolist())
            return {2, 3} <= lost

        recv_until(envs, has_the_lost)
        assert lost == {2, 3}


@pytest.mark.slow
def test_building_does_not_count_as_a_step(tmp_path: Path) -> None:
    with make(tmp_path, step_timeout=4.0) as envs:
        envs.reset(seed=0)
        (tmp_path / "wait-3").touch()
        kill_worker(envs, 1)
        envs.send(ACTIONS)
        with pytest.raises(muster.errors.WaitTimeout):
            envs.recv(timeout=6.0)
        (tmp_path / "wait-3").unlink()
        assert envs.recv().truncated.tolist() == [False, False, True, True]
        assert envs.stats()["restarts"] == 2


def test_a_dead_worker_is_noticed_while_another_still_builds(tmp_path: Path) -> None:
    class DiesAtOnce(Env):
        def __init__(self, folder: str) -> None:
            super().__init__(folder)
            if self.index == 3:
                os.abort()

    (tmp_path / "wait-1").touch()
    kwargs = {"folder": str(tmp_path)}
    start = time.monotonic()
    with pytest.raises(WorkerDied, match="worker 1 .*SIGABRT"):
        muster.make_vec(DiesAtOnce, 4, num_workers=2, env_kwargs=kwargs, memory_check="off", context="fork")
    assert time.monotonic() - start < BOUND_S


def test_a_death_is_noticed_though_others_are_always_ready(tmp_path: Path) -> None:
    with make(tmp_path) as envs:
        envs.reset(seed=0)
        os.kill(envs.stats()["workers"][1]["pid"], signal.SIGSTOP)
        envs.send(ACTIONS)
        kill_worker(envs, 1)
        recv_until(envs, lambda batch: batch.truncated.any())


# ---- libraries that can be initialised once in a process


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(compile_library(tmp_path_factory.mktemp("simulator")))


class Raising(DeclaredSimulator):
    """Action 2 raises. Notes when it is closed."""

    def __init__(self, library: str, notes: str) -> None:
        super().__init__(library)
        self.notes = notes

    def step(self, action: Any) -> Any:
        if action == 2:
            raise ValueError("asked for")
        obs, *rest, _ = super().step(action)
        return obs, *rest, {"moved": float(action), "name": "simulator"}

    def close(self) -> None:
        (Path(self.notes) / str(os.getpid())).touch()


@pytest.mark.parametrize("context", ["forkserver", *slow("spawn", "fork")])
def test_an_env_alone_in_its_process_gets_a_fresh_one(library: str, context: str, tmp_path: Path) -> None:
    kwargs = {"library": library, "notes": str(tmp_path)}
    with muster.make_vec(Raising, 2, env_kwargs=kwargs, context=context, on_failure="restart") as envs:
        envs.reset(seed=0)
        envs.step(np.array([1, 1]))
        before = [worker["pid"] for worker in envs.stats()["workers"]]
        obs, _, _, truncated, infos = envs.step(np.array([1, 2]))
        assert obs[:, 0].tolist() == [2, 1]
        assert truncated.tolist() == [False, True]
        assert "ValueError: asked for" in infos["restarted"][1]
        assert [path.name for path in tmp_path.iterdir()] == [str(before[1])]  # it was closed first
        after = [worker["pid"] for worker in envs.stats()["workers"]]
        assert after[0] == before[0]
        assert after[1] != before[1]
        assert envs.step(np.array([1, 1]))[0][:, 0].tolist() == [3, 0]
        infos = envs.step(np.array([1, 1]))[4]
        assert infos["moved"].tolist() == [1, 1]
        assert infos["name"].tolist() == ["simulator"] * 2
        assert envs.stats()["restarts"] == 1
