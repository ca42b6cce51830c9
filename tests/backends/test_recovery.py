"""on_failure="restart" where the fault matrix does not reach: send and recv, calls, idle deaths, seeds, crash loops."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import muster
from muster.errors import ClosedError, WorkerDied, WorkerError, WorkerTimeout
from processes import kill_worker, parent_of, wait_for_end
from slow import slow

ACTIONS = np.zeros(4, np.int64)
pytestmark = pytest.mark.usefixtures("leaves_nothing")


class Env(gym.Env[Any, Any]):
    """Observes ``[env_index, episode, step, draw]``; an episode has ten steps. Action 1 dies, 2 raises, 3 is slow.

    The infos' layout depends on the episode: what a lost worker said of its layouts must be forgotten with it.
    """

    observation_space = gym.spaces.Box(-np.inf, np.inf, (4,), np.float32)
    action_space = gym.spaces.Discrete(5)
    slow_s = 0.4

    def __init__(self) -> None:
        info = muster.get_worker_info()
        assert info is not None
        self.index, self.episode, self.steps = info.env_index, -1, 0

    def _obs(self) -> Any:
        return np.array([self.index, self.episode, self.steps, self.np_random.random()], np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        if options and options.get("stop"):
            os.kill(os.getpid(), signal.SIGSTOP)
        self.episode, self.steps = self.episode + 1, 0
        return self._obs(), {}

    def step(self, action: Any) -> Any:
        if action == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if action == 2:
            raise ValueError("asked for")
        if action == 3:
            time.sleep(self.slow_s)
        if action == 4:
            os.kill(os.getpid(), signal.SIGSTOP)
        self.steps += 1
        info = {"steps": self.steps} if self.episode % 2 else {"text": f"env {self.index}", "steps": float(self.steps)}
        return self._obs(), 1.0, self.steps == 10, False, info

    def die(self, index: int) -> None:
        if index == self.index:
            os._exit(7)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


def make(**options: Any) -> Any:
    return muster.make_vec(Env, 4, num_workers=2, **{"on_failure": "restart", **options})


@pytest.fixture
def envs() -> Iterator[Any]:
    with make() as envs:
        yield envs


def test_send_and_recv_deliver_the_others_and_the_restarted(envs: Any) -> None:
    obs, _ = envs.reset(seed=0)
    envs.send(np.array([3, 2]), [0, 1])
    batch = envs.recv(min_envs=1)
    rows = {env: batch.obs[row] for row, env in enumerate(batch.env_ids.tolist())}
    while len(rows) < 2:
        batch = envs.recv(min_envs=1)
        rows |= {env: batch.obs[row] for row, env in enumerate(batch.env_ids.tolist())}
    np.testing.assert_array_equal(rows[1], obs[1])
    assert rows[0][2] == 1
    envs.send(ACTIONS)
    batch = envs.recv()
    np.testing.assert_array_equal(batch.obs[:, 2], [2, 0, 1, 1])


def test_finished_rows_of_a_worker_that_dies_are_lost_with_it(envs: Any) -> None:
    obs, _ = envs.reset(seed=0)
    envs.send(np.array([0, 4]), [0, 1])  # env 0 is ready, env 1 stops their worker
    time.sleep(0.3)
    os.kill(envs.stats()["workers"][0]["pid"], signal.SIGKILL)
    batch = envs.recv()
    assert batch.truncated.all()
    np.testing.assert_array_equal(batch.obs, obs[:2])
    assert envs.stats()["restarts"] == 2


def test_infos_of_the_replacement_are_read_by_its_own_layouts(envs: Any) -> None:
    envs.reset(seed=0)
    assert envs.step(ACTIONS)[4]["text"].tolist() == [f"env {i}" for i in range(4)]
    envs.reset()
    assert "text" not in envs.step(ACTIONS)[4]
    kill_worker(envs, 0)
    envs.step(ACTIONS)
    envs.step(ACTIONS)
    infos = envs.step(ACTIONS)[4]
    assert infos["text"].tolist() == ["env 0", "env 1", None, None]
    assert infos["steps"].tolist() == [1.0, 1.0, 4.0, 4.0]


class Talking(gym.Env[Any, Any]):
    """Its observations and infos hold parts that go by mail. Action 1 raises, 2 dies."""

    observation_space = gym.spaces.Sequence(gym.spaces.Discrete(100))
    action_space = gym.spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.steps = 0
        return (0,), {"text": "reset"}

    def step(self, action: Any) -> Any:
        if action == 1:
            raise ValueError("asked for")
        if action == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        self.steps += 1
        return (self.steps,) * 2, 1.0, False, False, {"steps": self.steps, "text": f"step {self.steps}"}


@pytest.mark.parametrize("mode", ["same_step", *slow("next_step")])
@pytest.mark.parametrize(
    ("backend", "action"),
    [("serial", 1), ("process", 2), *(pytest.param(one, 1, marks=pytest.mark.slow) for one in ("thread", "process"))],
)
def test_a_restarted_env_repeats_what_went_by_mail_and_its_infos_go_on(backend: str, action: int, mode: str) -> None:
    options = {"backend": backend, "autoreset_mode": mode, "on_failure": "restart"}
    with muster.make_vec(Talking, 2, num_workers=None if backend == "serial" else 2, **options) as envs:
        envs.reset()
        envs.step(ACTIONS[:2])
        obs, _, _, truncated, infos = envs.step(np.array([0, action]))
        assert truncated.tolist() == [False, True]
        assert infos["steps"][0] == 2
        if mode == "same_step":
            assert obs == ((2, 2), (0,))
            assert infos["final_obs"][1] == (1, 1)
        else:
            assert obs == ((2, 2), (1, 1))
            obs, _, _, _, infos = envs.step(ACTIONS[:2])
            assert obs == ((3, 3), (0,))
            assert infos["text"].tolist() == ["step 3", "reset"]
        obs, *_, infos = envs.step(ACTIONS[:2])
        assert obs[1] == (1, 1)
        assert infos["text"][1] == "step 1"


def test_death_while_idle_is_told_at_the_next_step(envs: Any) -> None:
    obs, _ = envs.reset(seed=0)
    kill_worker(envs, 1)
    got, rewards, _, truncated, infos = envs.step(ACTIONS)
    assert truncated.tolist() == [False, False, True, True]
    assert rewards.tolist() == [1, 1, 0, 0]
    np.testing.assert_array_equal(got[2:], obs[2:])
    assert "worker 1 (envs 2 to 3) died: killed by SIGKILL" in infos["restarted"][2]


def test_death_while_idle_is_settled_by_a_reset(envs: Any) -> None:
    envs.reset(seed=0)
    kill_worker(envs, 0)
    envs.reset(seed=0)
    assert not envs.step(ACTIONS)[3].any()


def test_both_workers_die_at_once(envs: Any) -> None:
    envs.reset(seed=0)
    pids = [worker["pid"] for worker in envs.stats()["workers"]]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert envs.step(ACTIONS)[3].all()
    np.testing.assert_array_equal(envs.step(ACTIONS)[0][:, 2], 0)
    np.testing.assert_array_equal(envs.step(ACTIONS)[0][:, 2], 1)


def test_worker_that_dies_in_a_call_costs_the_call_only(envs: Any) -> None:
    envs.reset(seed=0)
    with pytest.raises(WorkerDied, match=r"exit code 7. It was answering call\('die'\)"):
        envs.call("die", 2)
    assert envs.get_attr("index") == (0, 1, 2, 3)
    assert envs.step(ACTIONS)[3].tolist() == [False, False, True, True]


def test_call_to_a_worker_that_died_before(envs: Any) -> None:
    envs.reset(seed=0)
    kill_worker(envs, 0)
    with pytest.raises(WorkerDied, match="SIGKILL"):
        envs.get_attr("index")
    envs.set_attr("index", [5, 6, 7, 8])
    assert envs.get_attr("index") == (5, 6, 7, 8)


def test_worker_that_dies_in_reset_is_asked_again(envs: Any) -> None:
    envs.reset(seed=0)
    pid = envs.stats()["workers"][0]["pid"]
    envs.call(lambda env, index: setattr(env, "episode", 20))
    os.kill(pid, signal.SIGSTOP)
    envs.reset_async(seed=0)
    os.kill(pid, signal.SIGKILL)
    obs, _ = envs.reset_wait()
    np.testing.assert_array_equal(obs[:, 1], [0, 0, 21, 21])
    np.testing.assert_array_equal(envs.step(ACTIONS)[0][:, 2], 1)


def test_step_timeout_counts_in_resets_and_calls() -> None:
    with make(step_timeout=2.0) as envs:
        envs.reset(seed=0)
        with pytest.raises(WorkerTimeout, match=r"answering call\('sleep'\)"):
            envs.call("sleep", 1000.0)
        assert envs.stats()["restarts"] == 4
        obs, _ = envs.reset(seed=0)
        np.testing.assert_array_equal(obs[:, 1], 0)


@pytest.mark.slow
def test_a_worker_with_many_slow_envs_is_not_too_slow() -> None:
    with make(step_timeout=5.0) as envs:
        envs.reset(seed=0)
        envs.set_attr("slow_s", 3.0)
        for _ in range(2):
            assert not envs.step(ACTIONS + 3)[3].any()  # 6 s for each worker
        time.sleep(6.0)
        assert not envs.step(ACTIONS)[3].any()  # it was not asked for anything


def test_short_waits_do_not_put_off_the_step_timeout() -> None:
    with make(step_timeout=2.0) as envs:
        envs.reset(seed=0)
        os.kill(envs.stats()["workers"][0]["pid"], signal.SIGSTOP)
        envs.send(ACTIONS)
        deadline = time.monotonic() + 60.0
        truncated = np.zeros(0)
        while not truncated.any() and time.monotonic() < deadline:
            try:
                truncated = envs.recv(timeout=0.05).truncated
            except muster.errors.WaitTimeout:
                continue
        assert truncated.tolist() == [True, True, False, False]


def test_restarts_draw_new_but_reproducible_numbers() -> None:
    def draws() -> list[Any]:
        with make(autoreset_mode="same_step") as envs:
            first, _ = envs.reset(seed=3)
            raised = envs.step(ACTIONS + [2, 0, 0, 0])[0]
            kill_worker(envs, 0)
            return [first[:, 3], raised[:2, 3], envs.step(ACTIONS)[0][:2, 3]]

    one, other = draws(), draws()
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)
    assert len({*one[0].tolist(), one[1][0], *one[2].tolist()}) == 7


class Seeded(Env):
    """Its workers' seeds and its own, so far."""

    def __init__(self) -> None:
        super().__init__()
        info = muster.get_worker_info()
        assert info is not None
        assert info.seed is not None
        self.seeds = [info.seed]

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.seeds += [] if seed is None else [seed]
        return super().reset(seed=seed, options=options)


def test_seeds_after_restarts_fit_into_an_int() -> None:
    with muster.make_vec(Seeded, 8, num_workers=2, on_failure="restart") as envs:
        envs.reset(seed=0)
        envs.step(np.full(8, 2))
        envs.step(np.zeros(8, np.int64))
        seeds = np.array(envs.get_attr("seeds"))
        assert seeds.shape == (8, 2)
        assert seeds.max() < 2**31


def test_worker_that_dies_after_the_last_row_of_an_episode_loses_none() -> None:
    with make() as envs:
        envs.reset(seed=0)
        for _ in range(10):
            terminated = envs.step(ACTIONS)[2]
        assert terminated.all()
        kill_worker(envs, 0)
        obs, rewards, terminated, truncated, _ = envs.step(ACTIONS)
        assert not (terminated | truncated).any()
        np.testing.assert_array_equal(obs[:, 1:3], [[0, 0], [0, 0], [1, 0], [1, 0]])
        np.testing.assert_array_equal(rewards, 0)


def test_crash_loop_ends_in_an_error_that_says_so() -> None:
    envs = make(max_restarts=3)
    envs.reset(seed=0)
    for _ in range(3):
        envs.step(ACTIONS + [0, 0, 0, 2])
        envs.step(ACTIONS)
    with pytest.raises(WorkerError, match="worker 1 failed 4 times within 60 s .max_restarts=3.*ValueError: asked for"):
        envs.step(ACTIONS + [0, 0, 0, 2])
    with pytest.raises(ClosedError):
        envs.step(ACTIONS)
    envs.close()


class BuildsOnce(Env):
    def __init__(self, mark: str) -> None:
        super().__init__()
        with Path(f"{mark}-{self.index}").open("x"):
            pass


def test_env_that_cannot_be_built_again_is_a_crash_loop(tmp_path: Path) -> None:
    options = {"num_workers": 2, "env_kwargs": {"mark": str(tmp_path / "built")}}
    envs = muster.make_vec(BuildsOnce, 4, on_failure="restart", max_restarts=2, **options)
    envs.reset(seed=0)
    kill_worker(envs, 0)
    with pytest.raises(WorkerError, match="FileExistsError"):
        envs.step(ACTIONS)
    envs.close()


class HoldsItsAddress(Env):
    """A simulator in the env's own process, with a thread that keeps its address also after it has been closed."""

    def __init__(self, name: str) -> None:
        super().__init__()
        server = socket.socket(socket.AF_UNIX)
        server.bind(f"\0{name}-{self.index}")  # of Linux's abstract names, which no file stands for
        server.listen()
        threading.Thread(target=server.accept, daemon=True).start()


def test_what_cannot_be_built_again_in_its_process_gets_another() -> None:
    kwargs = {"name": f"muster-test-{os.getpid()}"}
    with muster.make_vec(HoldsItsAddress, 2, env_kwargs=kwargs, on_failure="restart", max_restarts=3) as envs:
        envs.reset(seed=0)
        for _ in range(2):  # the first time it is tried in vain in its process, which counts as a failure, too
            _, _, _, truncated, infos = envs.step([2, 0])
            assert truncated.tolist() == [True, False]
            assert "asked for" in infos["restarted"][0]
            envs.step([0, 0])
        assert envs.stats()["restarts"] == 2


class Draws(Env):
    """Draws from the generators that a process shares, as many simulators do."""

    def step(self, action: Any) -> Any:
        if action == 1:
            os._exit(3)
        return np.full(4, random.random(), np.float32), 0.0, False, False, {}


@pytest.mark.parametrize("seed", [None, 0])
def test_a_replacement_does_not_draw_what_the_one_before_it_drew(seed: int | None) -> None:
    def drawn() -> list[float]:
        with muster.make_vec(Draws, 1, on_failure="restart") as envs:
            envs.reset(seed=seed)
            rows = []
            for _ in range(3):
                envs.step([1])
                envs.step([0])
                rows.append(float(envs.step([0])[0][0, 0]))
            return rows

    first, second = drawn(), drawn()
    assert len({*first}) == 3
    assert (first == second) is (seed == 0)


class SlowToBuild(Env):
    def __init__(self) -> None:
        super().__init__()
        if self.index == 3:
            time.sleep(1000)


class HangsWhenRebuilt:
    def __setstate__(self, state: object) -> None:
        time.sleep(1000.0)

    def __getstate__(self) -> object:
        return {"some": "thing"}


@pytest.mark.slow
def test_what_hangs_when_it_is_rebuilt_in_the_worker_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("muster.pool.watch.AFTER_S", [5.0])
    told = r"values of env_kwargs(.|\n)*lazy(.|\n)*in __setstate__\n.*in _loaded\n.*in unpack"
    with pytest.raises(WorkerTimeout, match=told):
        muster.make_vec(lambda **_: Env(), 1, env_kwargs={"value": HangsWhenRebuilt()}, start_timeout=10.0)
    [said] = caplog.messages
    assert re.match(r"worker 0 \(env 0\) has been starting for .*=10.0\.(.|\n)*env_kwargs(.|\n)*lazy", said)
    assert "in __setstate__" in said


@pytest.mark.slow
def test_start_timeout_names_the_worker_and_shows_where_it_is() -> None:
    with pytest.raises(WorkerTimeout, match=r"worker 1 .*start_timeout=15.0, building its envs(.|\n)*in __init__"):
        muster.make_vec(SlowToBuild, 4, num_workers=2, start_timeout=15.0)


class DiesBuilding(Env):
    def __init__(self) -> None:
        super().__init__()
        os.write(2, b"about to abort\n")
        os.abort()


def test_death_while_building_quotes_stderr() -> None:
    with pytest.raises(WorkerDied, match=r"SIGABRT. It was building its envs for [\d.e-]+ s(.|\n)*about to abort"):
        muster.make_vec(DiesBuilding, 4, num_workers=2)


def test_launcher_that_dies_is_replaced(envs: Any) -> None:
    envs.reset(seed=0)
    worker = envs.stats()["workers"][0]["pid"]
    launcher = parent_of(worker)
    assert launcher != os.getpid()
    os.kill(launcher, signal.SIGKILL)
    wait_for_end(worker)  # its workers die with it
    result = envs.step(ACTIONS)
    assert result[3].all()
    assert "launcher process was lost" in result[4]["restarted"][0]
    np.testing.assert_array_equal(envs.step(ACTIONS)[0][:, 2], 0)
