"""A loop of ``recv(min_envs=1)`` over envs whose info keys change with every episode; each value of a row is checked.

An env's rows follow from four numbers: its birth (drawn when it is built), the episode, the step and the action. So the
loop knows what each row must hold, and a row that is stale, doubled, lost, torn or another env's is noticed.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np

import muster

NUM_ENVS = 8
NUM_KEYS = 80  # more than the layouts that a worker keeps: the rest travels as whole dicts
_WORDS = 64
_RESET = -1  # in the place of the action


def obs_of(birth: int, episode: int, step: int, action: int) -> Any:
    """int64 ``[64]``: the four numbers, again and again."""
    return np.resize(np.array([birth, episode, step, action]), _WORDS)


def reward_of(birth: int, episode: int, step: int, action: int) -> float:
    return birth % 97 + episode + 0.25 * step + 100.0 * action


def info_of(birth: int, episode: int, step: int) -> dict[str, Any]:
    """An info with one key of the episode's own, whose kind belongs to the key."""
    number = (birth + episode) % NUM_KEYS
    value = 1000 * episode + step
    values = [
        float(value),
        value,
        np.arange(3) + value,
        f"step {value}",
        {"inner": value, "text": str(value)},
    ]
    return {"step": step, f"key{number}": values[number % len(values)]}


def steps_of(birth: int, episode: int) -> int:
    """The length of an episode."""
    return 2 + (birth + episode) % 3


class Changing(gym.Env[Any, Any]):
    """The env. raises: whether some of its steps raise."""

    observation_space = gym.spaces.Box(-(2**62), 2**62, (_WORDS,), np.int64)
    action_space = gym.spaces.Discrete(3)

    def __init__(self, raises: bool = False) -> None:
        self.birth = int.from_bytes(os.urandom(5))
        self.episode, self.steps, self.raises = 0, 0, raises

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.episode, self.steps = self.episode + 1, 0
        return obs_of(self.birth, self.episode, 0, _RESET), info_of(self.birth, self.episode, 0)

    def step(self, action: Any) -> Any:
        self.steps += 1
        now = self.birth, self.episode, self.steps
        if self.raises and sum(now) % 11 == 0:
            raise ValueError("one of the steps that raise")
        over = self.steps == steps_of(self.birth, self.episode)
        terminated = over and self.episode % 2 == 1
        taken = (*now, int(action))
        return obs_of(*taken), reward_of(*taken), terminated, over and not terminated, info_of(*now)


def info_at(infos: dict[str, Any], row: int) -> dict[str, Any]:
    """The info of one env, out of the columns of a batch."""
    own = {}
    for key, column in infos.items():
        if not key.startswith("_") and infos[f"_{key}"][row]:
            own[key] = info_at(column, row) if isinstance(column, dict) else column[row]
    return own


@dataclass
class Tracked:
    """The last row of one env, and the action of the next one."""

    birth: int = 0
    episode: int = 0
    step: int = 0
    obs: Any = None
    action: int = 0


@dataclass
class FirstReady:
    """The loop, with same_step autoreset. restarted: the number of rows that reported a restart."""

    envs: Any
    envs_of: list[Tracked] = field(default_factory=lambda: [Tracked() for _ in range(NUM_ENVS)])
    rows: int = 0
    restarted: int = 0

    def run(self, rows: int) -> None:
        """Receives `rows` rows, and raises AssertionError where one is wrong."""
        obs, infos = self.envs.reset(seed=0)
        for env in range(NUM_ENVS):
            self._begin(env, obs[env], info_at(infos, env))
        self._send(np.arange(NUM_ENVS))
        while self.rows < rows:
            batch = self.envs.recv(min_envs=1)
            assert len(batch.env_ids)
            for row, env in enumerate(batch.env_ids.tolist()):
                self._check(batch, row, env)
            self.rows += len(batch.env_ids)
            self._send(batch.env_ids)

    def _send(self, ids: Any) -> None:
        actions = np.random.default_rng(self.rows).integers(3, size=len(ids))
        for env, action in zip(ids.tolist(), actions.tolist(), strict=True):
            self.envs_of[env].action = action
        self.envs.send(actions, ids)

    def _begin(self, env: int, obs: Any, info: dict[str, Any]) -> None:
        birth, episode, *_ = map(int, obs)
        np.testing.assert_array_equal(obs, obs_of(birth, episode, 0, _RESET))
        np.testing.assert_equal(info, info_of(birth, episode, 0))
        self.envs_of[env] = Tracked(birth, episode, 0, obs)

    def _check(self, batch: Any, row: int, env: int) -> None:
        last, obs, info = self.envs_of[env], batch.obs[row], info_at(batch.infos, row)
        final_obs, final_info = info.pop("final_obs", None), info.pop("final_info", {})
        flags = bool(batch.terminated[row]), bool(batch.truncated[row])
        if info.pop("restarted", None) is not None:
            self.restarted += 1
            assert (batch.rewards[row], *flags) == (0.0, False, True)
            np.testing.assert_array_equal(final_obs, last.obs)
            assert final_info == {}
            self._begin(env, obs, info)
            assert self.envs_of[env].birth != last.birth
            return
        now = last.birth, last.episode, last.step + 1
        over = now[2] == steps_of(last.birth, last.episode)
        assert batch.rewards[row] == reward_of(*now, last.action)
        assert flags == (over and now[1] % 2 == 1, over and now[1] % 2 == 0)
        if over:
            np.testing.assert_array_equal(final_obs, obs_of(*now, last.action))
            np.testing.assert_equal(final_info, info_of(*now))
            self._begin(env, obs, info)
            assert (self.envs_of[env].birth, self.envs_of[env].episode) == (last.birth, last.episode + 1)
            return
        assert (final_obs, final_info) == (None, {})
        np.testing.assert_array_equal(obs, obs_of(*now, last.action))
        np.testing.assert_equal(info, info_of(*now))
        last.step, last.obs = now[2], obs


@contextlib.contextmanager
def killing(envs: Any, every_s: float) -> Any:
    """Kills a worker at random, again and again, until the body ends."""
    ends = threading.Event()

    def kill() -> None:
        while not ends.wait(random.uniform(0.0, 2 * every_s)):
            pid = random.choice(envs.stats()["workers"])["pid"]
            with contextlib.suppress(ProcessLookupError):
                if pid is not None:
                    os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def check_rows(rows: int, *, raises: bool = False, kill_every_s: float | None = None, **options: Any) -> int:
    """Checks so many rows of envs made with `options`; returns how many of them reported a restart."""
    if raises or kill_every_s is not None:
        options |= {"on_failure": "restart", "max_restarts": 10**6}
    recipe = {"env_kwargs": {"raises": raises}, "autoreset_mode": "same_step"}
    with muster.make_vec(Changing, NUM_ENVS, **recipe, **options) as envs:
        loop = FirstReady(envs)
        with contextlib.nullcontext() if kill_every_s is None else killing(envs, kill_every_s):
            loop.run(rows)
    return loop.restarted
