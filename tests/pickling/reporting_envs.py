"""Envs that use what multiprocessing shares. Imports little: every worker imports this module."""

from __future__ import annotations

import multiprocessing

import gymnasium as gym
import numpy as np

import muster


class Reporting(gym.Env):
    """Uses what it is given: puts returns into `queue`, counts in `value`, and ends episodes when `event` is set."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012  # Gymnasium's own form
    observation_space = gym.spaces.Box(-1, 1e9, (2,), np.float64)
    action_space = gym.spaces.Discrete(5000)

    def __init__(self, queue=None, value=None, event=None, lock=None, path=None, memory=None, pipe=None, others=()):
        self.queue, self.value, self.event, self.lock, self.path = queue, value, event, lock, path
        self.memory, self.pipe, self.others = memory, pipe, others
        self.index = muster.get_worker_info().env_index

    def reset(self, *, seed=None, options=None):
        self.sum = 0.0
        return self._obs(), {}

    def step(self, action):
        self.sum += float(action)
        if self.value is not None:
            for _ in range(int(action)):
                with self.value.get_lock():
                    self.value.value += 1
        if self.lock is not None:
            with self.lock:
                self.path.write_text(str(int(self.path.read_text()) + 1))
        if self.pipe is not None:
            self.pipe.send((self.index, self.sum))
        over = self.event is not None and self.event.is_set()
        if over and self.queue is not None:
            self.queue.put((self.index, self.sum))
        return self._obs(), float(action), over, False, {}

    def use(self, memory):
        np.ndarray((8,), np.float64, memory.buf)[self.index] += 1

    def _obs(self):
        if self.memory is not None:
            np.ndarray((8,), np.float64, self.memory.buf)[self.index] = self.index + 1
        return np.array([self.index, self.sum])


class PutsAtClose(Reporting):
    def close(self):
        for i in range(30):
            self.queue.put((i, "x" * 1000))


def send_through_the_last(env, index):
    env.unwrapped.others[-1].send("hello")


def making_its_own():
    ctx = multiprocessing.get_context("spawn")
    return Reporting(queue=ctx.Queue(), event=ctx.Event())
