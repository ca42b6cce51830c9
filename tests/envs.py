"""An env that does what its script says."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

import muster

LAST_WORDS = "simulator: licence expired\nsimulator: giving up"


class Scripted(gym.Env[Any, Any]):
    """Observes ``[env_index, episode, step]``, and ends an episode after `steps`.

    raises_at, hangs_at, dies_at: when it raises a ValueError, hangs, or ends its process with last words on stderr: a
    step's number, or "build", "reset", "act" (a method to be called) or "close".  env: the only one that does it.
    once: a file that exists once it was done, so that it is done no second time.
    obs_space, action_space: others than its own; observations are then samples.
    """

    action_space = gym.spaces.Discrete(2)

    def __init__(
        self,
        steps: int = 1_000_000,
        raises_at: int | str | None = None,
        hangs_at: int | str | None = None,
        dies_at: int | str | None = None,
        env: int | None = None,
        once: str | Path | None = None,
        obs_space: gym.Space[Any] | None = None,
        action_space: gym.Space[Any] | None = None,
    ) -> None:
        info = muster.get_worker_info()
        self.index = info.env_index if info is not None and info.env_index is not None else 0
        self.deeds = {raises_at: self._raise, hangs_at: self._hang, dies_at: self._die}
        self.length, self.env, self.once = steps, env, once
        self.samples = obs_space is not None
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32) if obs_space is None else obs_space
        if action_space is not None:
            self.action_space = action_space
        self.episode, self.steps = -1, 0
        self.act("build")

    def act(self, moment: int | str = "act") -> int:
        """Does what is due at the moment."""
        if self.deeds.get(moment) and self.env in (None, self.index) and not (self.once and Path(self.once).exists()):
            if self.once:
                Path(self.once).touch()
            self.deeds[moment]()
        return self.steps

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode, self.steps = self.episode + 1, 0
        self.act("reset")
        return self._obs(), {}

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self.steps += 1
        self.act(self.steps)
        return self._obs(), 1.0, self.steps >= self.length, False, {}

    def close(self) -> None:
        self.act("close")

    def _obs(self) -> Any:
        if self.samples:
            self.observation_space.seed(0)
            return self.observation_space.sample()
        return np.array([self.index, self.episode, self.steps], np.float32)

    def _raise(self) -> None:
        raise ValueError("the gear is broken")

    def _hang(self) -> None:
        time.sleep(600.0)

    def _die(self) -> None:
        os.write(2, f"{LAST_WORDS}\n".encode())  # sys.stderr may be one that pytest has replaced
        time.sleep(0.2)  # otherwise the lines that the worker's relay has read, but not written yet, are lost
        os._exit(3)
