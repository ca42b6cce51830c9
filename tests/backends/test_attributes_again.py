"""What `set_attr` set last, in envs that are built again: it is set again, and where that fails, it is told."""

from __future__ import annotations

import os
import signal
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from agent_envs import Script

import muster
from muster.errors import EnvError, WorkerDied
from processes import kill_worker, wait_for_end
from slow import slow

GO_ON, DIE, RAISE = 0, 1, 2
FORK = {"backend": "process", "context": "fork"}
IN_PROCESS = [{"backend": "serial"}, {"backend": "thread"}]
FAULTS = [
    *((FORK, DIE), (FORK, RAISE), (IN_PROCESS[0], RAISE)),
    *(pytest.param({"context": context}, DIE, marks=pytest.mark.slow) for context in ("forkserver", "spawn")),
    pytest.param(IN_PROCESS[1], RAISE, marks=pytest.mark.slow),
]
pytestmark = pytest.mark.usefixtures("leaves_nothing")


class Task(gym.Env[Any, Any]):
    """Observes its goal and its speed, of which a setter makes the tenfold."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = gym.spaces.Discrete(3)

    def __init__(self, once: str | None = None) -> None:
        self.goal: Any = 0.0
        self._speed = 1.0
        self.once = once

    @property
    def speed(self) -> float:
        return self._speed

    @speed.setter
    def speed(self, speed: float) -> None:
        self._speed = 10 * speed

    @property
    def level(self) -> str:
        return "none"

    @level.setter
    def level(self, level: str) -> None:
        assert self.once is not None
        with open(f"{self.once}-{level}", "x"):  # a level can be taken once
            pass

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        if action == DIE:
            os.kill(os.getpid(), signal.SIGKILL)
        if action == RAISE:
            raise ValueError("asked for")
        return self._obs(), 1.0, False, False, {}

    def _obs(self) -> Any:
        return np.array([self.goal, self.speed])


class Scaled(gym.Wrapper[Any, Any, Any, Any]):
    scale = 1.0


def make(once: Path | None = None, num_envs: int = 2, **how: Any) -> Any:
    if how.get("backend") != "serial":
        how["num_workers"] = 2
    envs = muster.make_vec(
        lambda: Scaled(gym.wrappers.TimeLimit(Task(once and str(once)), 100)), num_envs, on_failure="restart", **how
    )
    envs.reset(seed=0)
    return envs


def restart_env_0(envs: Any, fault: int) -> Any:
    """Lets env 0 fail and be built again; returns the infos of the row that told so."""
    *_, infos = envs.step(np.array([fault] + [GO_ON] * (envs.num_envs - 1)))
    assert infos["_restarted"][0]
    return infos


@pytest.mark.parametrize("mode", ["next_step", *slow("same_step")])
@pytest.mark.parametrize(("how", "fault"), FAULTS)
def test_what_was_set_last_is_set_again(how: dict[str, Any], fault: int, mode: str) -> None:
    with make(autoreset_mode=mode, **how) as envs:
        envs.set_attr("goal", [1.0, 2.0])
        envs.set_attr("goal", [5.0, 6.0])
        envs.set_attr("speed", 2.0)
        envs.set_attr("scale", (3.0, 4.0))
        restart_env_0(envs, fault)
        obs, *_ = envs.step(np.zeros(2, np.int64))
        assert obs.tolist() == [[5.0, 20.0], [6.0, 20.0]]
        assert (envs.get_attr("goal"), envs.get_attr("scale")) == ((5.0, 6.0), (3.0, 4.0))
        restart_env_0(envs, fault)  # and again
        assert envs.get_attr("goal") == (5.0, 6.0)


class Ordered(Task):
    """A new task begins with a goal of its own; a plan is worked off."""

    plan: Any = ()

    @property
    def task(self) -> float:
        return self._speed

    @task.setter
    def task(self, task: float) -> None:
        self.goal, self._speed = 0.0, task

    def step(self, action: Any) -> Any:
        if action == GO_ON and self.plan:
            self.plan.pop()
        return super().step(action)


@pytest.mark.parametrize("how", [FORK, IN_PROCESS[0], *slow(IN_PROCESS[1])], ids=str)
def test_values_are_set_in_the_order_in_which_they_were_set_last_and_as_they_were_then(how: dict[str, Any]) -> None:
    workers = {} if how["backend"] == "serial" else {"num_workers": 2}
    with muster.make_vec(Ordered, 2, on_failure="restart", **workers, **how) as envs:
        envs.reset()
        envs.set_attr("goal", 1.0)
        envs.set_attr("task", 2.0)
        envs.set_attr("goal", 7.0)
        envs.set_attr("plan", [[1, 2, 3], [4, 5, 6]])
        envs.step(np.zeros(2, np.int64))
        for _ in range(2):
            restart_env_0(envs, RAISE)
            assert envs.get_attr("goal") == (7.0, 7.0)
            assert envs.get_attr("plan")[0] == [1, 2, 3]
            envs.step(np.zeros(2, np.int64))  # the reset
            envs.step(np.zeros(2, np.int64))


def test_each_process_is_given_the_value_as_it_was_sent() -> None:
    with make() as envs:
        goal = np.array(5.0)
        envs.set_attr("goal", goal)
        goal += 1.0  # not the envs' any more
        restart_env_0(envs, DIE)
        obs, *_ = envs.step(np.zeros(2, np.int64))
        assert obs[:, 0].tolist() == [5.0, 5.0]


@pytest.mark.parametrize("context", ["forkserver", *slow("fork")])
def test_an_env_that_died_while_nobody_waited_has_it_at_once(context: str) -> None:
    with make(context=context) as envs:
        envs.set_attr("goal", [5.0, 6.0])
        wait_for_end(kill_worker(envs, 0))
        with pytest.raises(WorkerDied):
            envs.get_attr("goal")
        assert envs.get_attr("goal") == (5.0, 6.0)
        wait_for_end(kill_worker(envs, 0))
        obs, *_, infos = envs.step(np.zeros(2, np.int64))
        assert infos["_restarted"].tolist() == [True, False]
        wait_for_end(kill_worker(envs, 0))
        obs, _ = envs.reset()
        assert obs[:, 0].tolist() == [5.0, 6.0]


class Deadly(Task):
    """Ends its process the first time that its first env is given a goal."""

    @property
    def goal(self) -> Any:
        return self._goal

    @goal.setter
    def goal(self, goal: Any) -> None:
        if goal == 1.0 and self.once is not None and not os.path.exists(self.once):
            Path(self.once).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        self._goal = goal


@pytest.mark.parametrize("dies", ["before", "meanwhile"])
def test_a_value_reaches_the_envs_of_a_worker_that_dies_before_or_while_it_is_set(dies: str, tmp_path: Path) -> None:
    env = partial(Deadly, str(tmp_path / "dead") if dies == "meanwhile" else None)
    with muster.make_vec(env, 4, num_workers=2, context="fork", on_failure="restart") as envs:
        envs.reset()
        if dies == "before":
            wait_for_end(kill_worker(envs, 0))
        envs.set_attr("goal", [1.0, 2.0, 3.0, 4.0])
        assert envs.get_attr("goal") == (1.0, 2.0, 3.0, 4.0)
        *_, infos = envs.step(np.zeros(4, np.int64))
        assert infos["_restarted"].tolist() == [True, True, False, False]
        assert envs.get_attr("goal") == (1.0, 2.0, 3.0, 4.0)


@pytest.mark.parametrize(("how", "fault"), FAULTS)
def test_what_cannot_be_set_again_is_told(tmp_path: Path, how: dict[str, Any], fault: int) -> None:
    with make(tmp_path / "taken", **how) as envs:
        envs.set_attr("level", ["a", "b"])
        envs.set_attr("goal", 5.0)
        with pytest.warns(RuntimeWarning, match=r"env 0 was built again, and what set_attr had set is lost: 'level'"):
            infos = restart_env_0(envs, fault)
        assert "could not be set again: 'level' (FileExistsError: " in infos["restarted"][0]
        assert ("asked for" if fault == RAISE else "SIGKILL") in infos["restarted"][0]
        with warnings.catch_warnings():  # the warning comes once, the reason each time
            warnings.simplefilter("error")
            envs.step(np.zeros(2, np.int64))
            infos = restart_env_0(envs, fault)
            obs, *_ = envs.step(np.zeros(2, np.int64))
        assert "'level'" in infos["restarted"][0]
        assert obs[:, 0].tolist() == [5.0, 5.0]
        assert envs.stats()["restarts"] == 2


def test_a_reset_tells_what_was_lost_with_an_idle_worker(tmp_path: Path) -> None:
    with make(tmp_path / "taken") as envs:
        envs.set_attr("level", ["a", "b"])
        wait_for_end(kill_worker(envs, 0))
        with pytest.warns(RuntimeWarning, match="'level'"):
            _, infos = envs.reset(seed=3)
        assert infos["_restarted"].tolist() == [True, False]
        assert "could not be set again: 'level'" in infos["restarted"][0]


class Unwelcome:
    """Can be rebuilt while there is a file at `path`."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return _rebuild, (self.path,)


def _rebuild(path: str) -> float:
    if not os.path.exists(path):
        raise OSError("no more of these")
    return 7.0


def test_a_value_that_cannot_be_rebuilt_again_is_told(tmp_path: Path) -> None:
    left = tmp_path / "left"
    left.touch()
    with make() as envs:
        envs.set_attr("goal", Unwelcome(str(left)))
        left.unlink()
        with pytest.warns(
            RuntimeWarning, match=r"(?s)lost: 'goal' \(muster.errors.CannotTravel: .*OSError: no more of these"
        ):
            infos = restart_env_0(envs, DIE)
        assert "'goal'" in infos["restarted"][0]


def test_what_an_env_refused_is_not_set_again(tmp_path: Path) -> None:
    with make(tmp_path / "taken") as envs:
        envs.set_attr("level", ["a", "b"])
        with pytest.raises(EnvError, match="FileExistsError"):
            envs.set_attr("level", ["a", "c"])
        envs.set_attr("goal", 5.0)
        with pytest.warns(RuntimeWarning, match="taken-a"):
            restart_env_0(envs, DIE)


@pytest.mark.parametrize("fault", [RAISE, *slow(DIE)])
def test_an_env_alone_in_its_process_has_it_too(fault: int) -> None:
    class Alone(Task):
        metadata = {"one_per_process": True}  # noqa: RUF012

    with muster.make_vec(Alone, 2, num_workers=2, on_failure="restart") as envs:
        envs.reset()
        envs.set_attr("goal", [5.0, 6.0])
        restart_env_0(envs, fault)
        assert envs.get_attr("goal") == (5.0, 6.0)


class Team(Script):
    """Env 0 raises in each step."""

    goal: Any = 0.0

    def step(self, actions: Any) -> Any:
        if muster.get_worker_info().env_index == 0:
            raise ValueError("asked for")
        return super().step(actions)


def test_several_agents_envs_are_given_it_too() -> None:
    with muster.make_vec(Team, 2, num_workers=2, on_failure="restart") as envs:
        envs.reset()
        envs.set_attr("goal", [5.0, 6.0])
        assert envs.step({"a": np.ones((2, 2), np.int64), "b": np.ones((2, 1), np.int64)})[3].tolist() == [True, False]
        assert envs.get_attr("goal") == (5.0, 6.0)
