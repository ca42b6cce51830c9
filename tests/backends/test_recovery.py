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
from typing import Any

import gymnasium as gym
import numpy as np
import pytest

import muster
from envs import Scripted
from muster.errors import ClosedError, WorkerDied, WorkerError, WorkerTimeout
from processes import kill_worker, parent_of, wait_for_end

ACTIONS = np.zeros(4, np.int64)
pytestmark = pytest.mark.usefixtures("leaves_nothing")


class Env(Scripted):
    """An episode has ten steps. Action 1 dies, 2 raises, 3 is slow, 4 stops its process."""

    action_space = gym.spaces.Discrete(5)
    slow_s = 0.4

    def __init__(self) -> None:
        super().__init__(steps=10)

    def step(self, action: Any) -> Any:
        if action == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if action == 2:
            raise ValueError("asked for")
        if action == 3:
            time.sleep(self.slow_s)
        if action == 4:
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().step(action)

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


def test_death_while_idle_is_settled_by_a_reset(envs: Any) -> None:
    envs.reset(seed=0)
    kill_worker(envs, 0)
    envs.reset(seed=0)
    assert not envs.step(ACTIONS)[3].any()


def test_a_reset_after_a_known_death_takes_its_seed_or_a_new_one() -> None:
    def observed() -> list[Any]:
        with muster.make_vec("CartPole-v1", 4, num_workers=2, on_failure="restart") as envs:
            rows = [envs.reset(seed=0)[0]]
            for seed in (0, None):
                kill_worker(envs, 0)
                with pytest.raises(WorkerDied, match="killed by SIGKILL"):
                    envs.get_attr("render_mode")
                rows.append(envs.reset(seed=seed)[0])
            return rows

    first, again, unseeded = observed()
    np.testing.assert_array_equal(first, again)
    assert not (unseeded == first).any()
    np.testing.assert_array_equal(unseeded, observed()[2])


def test_worker_that_dies_in_a_call_costs_the_call_only(envs: Any) -> None:
    envs.reset(seed=0)
    with pytest.raises(WorkerDied, match=r"exit code 7. It was answering call\('die'\)"):
        envs.call("die", 2)
    assert envs.get_attr("index") == (0, 1, 2, 3)
    assert envs.step(ACTIONS)[3].tolist() == [False, False, True, True]


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
        return np.full(3, random.random(), np.float32), 0.0, False, False, {}


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
