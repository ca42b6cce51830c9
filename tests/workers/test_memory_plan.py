"""A vector env that will not fit into memory is an error before the machine is filled."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

import muster
from envs import Scripted
from muster.errors import NotEnoughMemory
from muster.pool import resources
from slow import slow

ENV_BYTES = 30_000_000
LIBRARY_BYTES = 60_000_000
library = None


class Big(Scripted):
    """Holds 30 MB; the first in a process also loads 60 MB that all share. Notes that it was built."""

    def __init__(self, notes: str):
        global library
        super().__init__()
        if library is None:
            library = np.ones(LIBRARY_BYTES, np.uint8)
        self.data = np.ones(ENV_BYTES, np.uint8)
        (Path(notes) / str(self.index)).touch()


@pytest.fixture
def left(monkeypatch):
    """Pretends that this many bytes are left."""

    def pretend(count: int) -> None:
        monkeypatch.setattr(resources, "memory_left", lambda: (count, "of a limit made up by the test"))

    return pretend


def built(folder: Path) -> set[int]:
    return {int(path.name) for path in folder.iterdir()}


@pytest.mark.parametrize("context", ["forkserver", *slow("fork")])
def test_too_many_envs_are_refused_after_the_first_two(tmp_path, left, context):
    left(200_000_000)
    before = psutil.Process().children(recursive=True)
    with pytest.raises(NotEnoughMemory) as raised:
        muster.make_vec(Big, 40, num_workers=2, env_kwargs={"notes": str(tmp_path)}, context=context)
    said = str(raised.value)
    assert "40 envs in 2 processes will not fit into memory" in said
    assert "200 MB are left (of a limit made up by the test)" in said
    assert 'memory_check="warn"' in said
    assert max(built(tmp_path)) < 20  # the other worker had not begun
    left_over = set(psutil.Process().children(recursive=True)) - set(before)
    assert [one for one in left_over if one.name() != "muster-launcher"] == []  # which tests keep


def test_the_number_that_would_fit_fits(tmp_path, left):
    left(200_000_000)
    kwargs = {"notes": str(tmp_path)}
    with pytest.raises(NotEnoughMemory, match=r"About \d+ envs would fit") as raised:
        muster.make_vec(Big, 40, num_workers=2, env_kwargs=kwargs, context="fork")
    fits = int(str(raised.value).partition("About ")[2].split()[0])
    assert 3 <= fits <= 8
    muster.make_vec(Big, fits, num_workers=2, env_kwargs=kwargs, context="fork").close()


def test_libraries_count_once_for_each_worker(tmp_path, left):
    # 6 more envs of 30 MB and one more worker with 60 MB of libraries fit; 7 envs of 90 MB would not.
    left(400_000_000)
    muster.make_vec(Big, 8, num_workers=2, env_kwargs={"notes": str(tmp_path)}, context="fork").close()
    assert built(tmp_path) == set(range(8))


def test_a_warning_where_that_is_asked_for(tmp_path, left):
    left(50_000_000)
    with (
        pytest.warns(ResourceWarning, match="4 envs in 2 processes will not fit"),
        muster.make_vec(
            Big, 4, num_workers=2, env_kwargs={"notes": str(tmp_path)}, context="fork", memory_check="warn"
        ) as envs,
    ):
        envs.reset()


def test_fewer_processes_are_advised_where_each_env_has_one(tmp_path, left):
    left(200_000_000)
    with pytest.raises(NotEnoughMemory, match=r"may share processes\."):
        muster.make_vec(Big, 20, env_kwargs={"notes": str(tmp_path)}, context="fork")


@pytest.mark.parametrize("caller_steps", [False, *slow(True)])
def test_one_process_for_each_env_is_counted(tmp_path, left, caller_steps):
    left(1_000_000)
    with pytest.raises(NotEnoughMemory, match=f"3 envs in {3 - caller_steps} processes will not fit"):
        muster.make_vec(Big, 3, env_kwargs={"notes": str(tmp_path)}, context="fork", caller_steps=caller_steps)


class Together(Scripted):
    """Is built only once three are being built."""

    def __init__(self, notes: str):
        super().__init__()
        (Path(notes) / str(self.index)).touch()
        until = time.monotonic() + 20.0
        while len(built(Path(notes))) < 3:
            if time.monotonic() > until:
                raise TimeoutError("the others have not begun")
            time.sleep(0.01)


def drop_in(module: str, name: str, fn: Callable[[], Any]) -> Any:
    return getattr(import_module(f"muster.interop.{module}"), name)([fn] * 3)


@pytest.mark.parametrize(
    ("left_bytes", "make"),
    [
        (0, lambda fn: muster.make_vec([fn] * 3, memory_check="off")),
        (3 * 10**9, lambda fn: muster.make_vec([fn] * 3)),
        (2 * 10**9, lambda fn: muster.make_vec([fn] * 3)),  # after 1 s
        *(
            pytest.param(left, partial(drop_in, *of), marks=pytest.mark.slow)
            for of in (("gymnasium", "AsyncVectorEnv"), ("sb3", "SubprocVecEnv"))
            for left in (2 * 10**9, 3 * 10**9)
        ),
    ],
)
def test_envs_are_built_at_the_same_time(tmp_path: Path, left, left_bytes: int, make: Callable[[Any], Any]):
    left(left_bytes)
    make(partial(Together, str(tmp_path))).close()


@pytest.mark.slow
@pytest.mark.parametrize("left_bytes", [10**9, 9 * 10**9])
def test_replicas_are_built_at_the_same_time(tmp_path: Path, left, left_bytes: int):
    left(left_bytes)
    notes = {"notes": str(tmp_path)}
    options = {"make_vec_options": {"env_kwargs": notes}}
    with muster.MultiCollector(Together, num_collectors=3, num_envs=3, frames_per_batch=6, **options):
        assert built(tmp_path) == {0, 1, 2}


@pytest.mark.slow
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("check", ["error", "warn"])
def test_room_for_three_of_eight(monkeypatch, early: bool, check: str):
    me = psutil.Process()

    def left() -> tuple[int, str]:
        workers = [child.pid for child in me.children(recursive=True) if child.name().startswith("muster-w")]
        held = [resources.private_bytes(pid) or 0 for pid in workers]
        return max(0, 500_000_000 - sum(held)), "of a limit made up by the test"

    monkeypatch.setattr(resources, "memory_left", left)
    start = partial(muster.make_vec, Slow, 8, num_workers=8, env_kwargs={"early": early}, memory_check=check)
    sentence = "8 envs in 8 processes will not fit into memory.*About [234] envs would fit"
    if check == "error":
        with pytest.raises(NotEnoughMemory, match=sentence):
            start()
    else:
        with pytest.warns(ResourceWarning, match=sentence) as warned, start():
            assert len(warned) == 1


class Slow(Scripted):
    """Takes 2 s; holds 140 MB from the first of them on, or from the last."""

    def __init__(self, early: bool):
        super().__init__()
        time.sleep(2.0 * (not early))
        self.data = np.ones(140_000_000, np.uint8)
        time.sleep(2.0 * early)


def test_another_word_is_refused():
    with pytest.raises(ValueError, match="memory_check must be one of 'error', 'warn', 'off'"):
        muster.make_vec("CartPole-v1", 2, memory_check="maybe")


def write_cgroup(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def test_the_tightest_cgroup_counts_and_idle_page_cache_does_not(tmp_path, monkeypatch):
    own = tmp_path / "job" / "step"
    write_cgroup(tmp_path / "job", {"memory.max": "1000000", "memory.current": "900000", "memory.stat": "anon 5\n"})
    monkeypatch.setattr(resources, "CGROUP", tmp_path)
    monkeypatch.setattr(resources, "_own_cgroup", lambda: own)
    assert resources.memory_left() == (100_000, "of the cgroup's memory.max=1000000")
    write_cgroup(tmp_path / "job", {"memory.stat": "anon 5\ninactive_file 300000\n"})
    assert resources.memory_left()[0] == 400_000
    write_cgroup(own, {"memory.max": "max\n", "memory.current": "900000"})
    assert resources.memory_left()[0] == 400_000
    write_cgroup(own, {"memory.max": "500000", "memory.current": "600000"})
    assert resources.memory_left()[0] == 0


def test_without_cgroups_the_machine_is_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(resources, "CGROUP", tmp_path)
    left, name = resources.memory_left()
    assert 0 < left <= psutil.virtual_memory().total
    assert name == "free in this machine"
