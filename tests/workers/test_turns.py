"""Workers that build their envs in turns: max_concurrent_starts."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import muster
from envs import Scripted
from muster.errors import ConfigError, EnvError, WorkerTimeout
from processes import kill_worker
from slow import slow


class Crowded(Scripted):
    """Cannot be built where `most` others are just being built. Notes in `notes` the order in which envs begin.

    dies, hangs: the env that does so, once, while it is built.
    """

    def __init__(self, notes: str, most: int = 2, build_s: float = 0.05, dies: int = -1, hangs: int = -1) -> None:
        super().__init__()
        info = muster.get_worker_info()
        assert info is not None
        self.notes, index = Path(notes), info.env_index
        try:
            if (at_once := self.count(1, f"{index} ")) > most:
                raise RuntimeError(f"{at_once} at once")
            time.sleep(60 if index == hangs else build_s)
            if index == dies and not (self.notes / "died").exists():
                (self.notes / "died").touch()
                self.count(-1)
                os._exit(3)
        finally:
            self.count(-1)

    def count(self, by: int, note: str = "") -> int:
        with (self.notes / "order").open("a") as order, (self.notes / "count").open("a+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            count = int(file.read() or 0) + by
            file.truncate(0)
            file.write(str(count))
            order.write(note)
        return count


def async_vector_env(env: Any, num_envs: int, env_kwargs: Any, **options: Any) -> Any:
    from muster.interop.gymnasium import AsyncVectorEnv

    return AsyncVectorEnv([lambda: env(**env_kwargs)] * num_envs, **options)


def subproc_vec_env(env: Any, num_envs: int, env_kwargs: Any, **options: Any) -> Any:
    pytest.importorskip("stable_baselines3")
    from muster.interop.sb3 import SubprocVecEnv

    return SubprocVecEnv([lambda: env(**env_kwargs)] * num_envs, **options)


def multi_collector(env: Any, num_envs: int, env_kwargs: Any, **options: Any) -> Any:
    pytest.importorskip("tensordict")
    options |= {"num_collectors": num_envs, "frames_per_batch": num_envs}
    return muster.MultiCollector(env, None, num_envs=num_envs, make_vec_options={"env_kwargs": env_kwargs}, **options)


WAYS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "forkserver": (muster.make_vec, {"context": "forkserver"}),
    "spawn": (muster.make_vec, {"context": "spawn"}),
    "fork": (muster.make_vec, {"context": "fork"}),
    "unjudged": (muster.make_vec, {"memory_check": "off"}),
    "caller_steps": (muster.make_vec, {"num_workers": 7, "caller_steps": True, "on_failure": "raise"}),
    "AsyncVectorEnv": (async_vector_env, {}),
    "SubprocVecEnv": (subproc_vec_env, {}),
    "MultiCollector": (multi_collector, {}),
}


@pytest.mark.filterwarnings("ignore:.*is started again:RuntimeWarning")
@pytest.mark.parametrize("way", ["forkserver", "fork", "unjudged", "caller_steps", *slow("spawn", *list(WAYS)[5:])])
def test_so_many_workers_build_at_once_and_all_run(way: str, tmp_path: Path) -> None:
    make, options = WAYS[way]
    kwargs = {"notes": str(tmp_path), "dies": -1 if way == "caller_steps" else 3}
    options = {"max_concurrent_starts": 2, "on_failure": "restart", **options}
    envs = make(Crowded, 8, env_kwargs=kwargs, **options)
    getattr(envs, "close", getattr(envs, "shutdown", None))()
    begun = [int(word) for word in (tmp_path / "order").read_text().split()]
    assert sorted({*begun}) == list(range(8))
    order = [env for env in begun if env != 3]
    # As one begins, one of those before it may be told to and be slow; the others have begun.
    assert all(sum(late < env for late in order[i:]) <= 1 for i, env in enumerate(order))


def test_without_turns_that_env_fails(tmp_path: Path) -> None:
    with pytest.raises(EnvError, match="at once"):
        muster.make_vec(Crowded, 8, env_kwargs={"notes": str(tmp_path), "build_s": 1.0}, memory_check="off")


def test_replacements_take_turns_and_keep_nobody(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_concurrent_starts": 1, "on_failure": "restart", "num_workers": 4}
    kwargs = {"notes": str(tmp_path), "most": 1, "build_s": 0.3}
    with muster.make_vec(Crowded, 4, env_kwargs=kwargs, **options) as envs:
        envs.reset(seed=0)
        envs.send(envs.sample_actions())
        for worker in range(3):
            kill_worker(envs, worker)
        steps = 0
        while envs.stats()["restarts"] < 3 or steps < 50:
            ids = envs.recv(min_envs=1).env_ids
            steps += int(3 in ids)
            envs.send(envs.sample_actions()[ids], ids)
        envs.recv()
        assert envs.stats()["restarts"] == 3


def test_a_start_has_its_own_time_and_one_that_hangs_says_who_waits(tmp_path: Path) -> None:
    kwargs: dict[str, Any] = {"notes": str(tmp_path), "build_s": 0.5}
    options: dict[str, Any] = {"num_workers": 8, "max_concurrent_starts": 1, "start_timeout": 3.0}
    muster.make_vec(Crowded, 8, env_kwargs=kwargs, **options).close()  # takes 4 s in all
    kwargs = {"notes": str(tmp_path), "hangs": 2}
    with pytest.raises(WorkerTimeout, match=r"env 2\b[^$]*2 of 8 are done, and 5 wait for their turn"):
        muster.make_vec(Crowded, 8, env_kwargs=kwargs, **options)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True])
def test_a_number_of_at_least_one(wrong: Any) -> None:
    with pytest.raises(ConfigError, match="max_concurrent_starts must be a whole number of at least 1"):
        muster.make_vec(Scripted, 2, max_concurrent_starts=wrong)


@pytest.mark.parametrize("backend", ["thread", "serial"])
def test_it_is_for_processes(backend: str) -> None:
    with pytest.raises(ConfigError, match="max_concurrent_starts must be left out"):
        muster.make_vec(Scripted, 2, backend=backend, max_concurrent_starts=1)
