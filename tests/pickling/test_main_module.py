"""What a script defines is in the `__main__` of its workers: envs pickle objects of it, and let pools call it."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

HEAD = """
import collections, dataclasses, enum, functools, multiprocessing, pickle, sys
import gymnasium as gym, numpy as np

LIMIT = 7
COUNTS = {"resets": 0}

class State:
    def __init__(self, x):
        self.x = x

@dataclasses.dataclass
class Pose:
    x: int

class Colour(enum.Enum):
    RED = 1

Pair = collections.namedtuple("Pair", "a b")

def square(x):
    return x * x

@functools.lru_cache
def limited(x):
    return min(x, LIMIT)

def count():
    global TOTAL
    TOTAL += 1
    return TOTAL

TOTAL = 0

def prepare():
    pass

class Pickling(gym.Env):
    observation_space = gym.spaces.Box(-9, 999, (3,), np.float64)
    action_space = gym.spaces.Discrete(2)
    class Inner:
        pass
    def __init__(self, method="fork"):
        self.method = method
    def reset(self, *, seed=None, options=None):
        sent = [State(3), Pose(1), Colour.RED, Pair(1, 2), self.Inner(), square, limited, State, type(self)]
        back = pickle.loads(pickle.dumps(sent))
        assert [type(one) for one in back] == [type(one) for one in sent] and back[5:] == sent[5:]
        with multiprocessing.get_context(self.method).Pool(1) as pool:
            squares, at_most = pool.map(square, [2, 3]), pool.map(limited, [9])
            assert type(pool.map(State, [1])[0]) is State
        assert count() == sys.modules["__main__"].TOTAL
        return np.array([sum(squares), at_most[0], TOTAL], float), {}
    def step(self, action):
        return np.zeros(3), 0.0, False, False, {"state": State(4)}

def made(kind, **options):
    if kind == "make_vec":
        envs = muster.make_vec(Pickling, 1, **options)
        rows = envs.reset()[0]
        assert type(envs.step([0])[-1]["state"][0]) is State
        assert type(envs.call(lambda env, index: pickle.loads(pickle.dumps(State(5))))[0]) is State
    elif kind == "sb3":
        envs = muster.interop.sb3.SubprocVecEnv([Pickling])
        rows = envs.reset()
    elif kind == "gymnasium":
        envs = muster.interop.gymnasium.AsyncVectorEnv([Pickling])
        rows = envs.reset()[0]
    envs.close()
    print(rows[0].tolist(), flush=True)
"""
RunScript = Callable[..., list[str]]


@pytest.fixture
def run(tmp_path: Path) -> RunScript:
    """Runs the code that follows HEAD in a script, and returns the lines that it prints."""

    def run_script(code: str) -> list[str]:
        (tmp_path / "train.py").write_text(HEAD + textwrap.dedent(code))
        command = [sys.executable, "-W", "error", "-W", "ignore:.*fork:DeprecationWarning", "train.py"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=100)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run_script


def test_an_env_pickles_what_the_script_defines_and_lets_a_pool_call_it(run: RunScript) -> None:
    said = run(
        """
        import muster
        made("make_vec")
        made("make_vec", worker_init=prepare)
        made("make_vec", context="fork")
        made("make_vec", backend="serial")
        """
    )
    assert said == ["[13.0, 7.0, 1.0]"] * 4


def test_where_there_is_a_guard_processes_that_an_env_spawns_find_the_script_too(run: RunScript) -> None:
    said = run(
        """
        if __name__ == "__main__":
            import muster
            made("make_vec", env_kwargs={"method": "spawn"})
            made("make_vec", env_kwargs={"method": "fork"}, worker_init="script")
        """
    )
    assert said == ["[13.0, 7.0, 1.0]"] * 2


@pytest.mark.slow
def test_so_it_is_in_drop_ins_and_however_workers_start(run: RunScript) -> None:
    for package in ("stable_baselines3", "torch"):
        pytest.importorskip(package)
    said = run(
        """
        if __name__ == "__main__":
            import muster, muster.interop.gymnasium, muster.interop.sb3
            made("sb3")
            made("gymnasium")
            for context in ("forkserver", "spawn", "fork"):
                for method in ("forkserver", "spawn", "fork"):
                    made("make_vec", context=context, env_kwargs={"method": method})
        """
    )
    assert said[:3] == ["[13.0, 7.0, 1.0]"] * 3
    assert [row.rpartition(",")[0] for row in said[3:]] == ["[13.0, 7.0"] * 8


def test_an_env_of_an_id_is_there_and_what_a_call_brings_later_spares_what_is_in_use(run: RunScript) -> None:
    said = run(
        """
        import muster

        class Later:
            pass

        def act(env, index):
            assert pickle.loads(pickle.dumps(Later)) is Later
            return count(), sys.modules["__main__"].TOTAL, limited(9)

        gym.register("Pickling-v0", Pickling)
        with muster.make_vec(lambda: gym.make("Pickling-v0", disable_env_checker=True), 1) as envs:
            print(envs.reset()[0][0].tolist())
            TOTAL, LIMIT = 10, 5
            limited.cache_clear()
            print(envs.call(act)[0])
            print(envs.reset()[0][0].tolist())
        """
    )
    assert said == ["[13.0, 7.0, 1.0]", "(11, 1, 5)", "[13.0, 7.0, 2.0]"]
