"""Envs with one trait each, which the doctor has to find."""

from __future__ import annotations

import ctypes
import os
import subprocess
import time
from typing import Any

import gymnasium as gym
import numpy as np


class Patient(gym.Env[Any, Any]):
    """A healthy env, except for its `trait`, which most often shows in the third step."""

    observation_space = gym.spaces.Box(0, 1, (3,), np.float64)
    action_space = gym.spaces.Box(-1, 1, (2,), np.float32)
    instances = steps = 0
    shared = np.zeros(3)

    def __init__(self, trait: str = "") -> None:
        self.trait = trait
        if trait in ("alone", "three in a process"):
            Patient.instances += 1
            if Patient.instances > (1 if trait == "alone" else 3):
                raise RuntimeError("licence in use")
        if trait == "hangs at once":
            time.sleep(600)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.count = 0
        Patient.shared = np.zeros(3)
        return self._obs(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.count += 1
        Patient.steps += 1
        if self.count == 3:
            self._suffer()
        if self.trait == "hangs in the end" and Patient.steps > 3000:
            time.sleep(600)
        if self.trait == "slow now and then" and Patient.steps % 200 == 0:
            time.sleep(0.1)
        if self.trait == "changes its action":
            action *= 0.5
        reward = float(action[0]) if self.trait == "rewards its action" else 0.0
        return self._obs(), reward, False, self.count >= 10, {"count": self.count}

    def _suffer(self) -> None:
        if self.trait == "segfault":
            ctypes.string_at(0)
        if self.trait == "exit":
            os._exit(3)
        if self.trait == "hang":
            time.sleep(600)
        if self.trait == "raise":
            raise KeyError("no such level")

    def _obs(self) -> Any:
        drawn = self.np_random.random(3)
        if self.trait == "unseeded":
            return np.frombuffer(os.urandom(3), np.uint8) / 255
        if self.trait == "hash order":
            return np.full(3, hash("a") % 1000 / 1000)
        if self.trait == "disturbs":
            Patient.shared = Patient.shared / 2 + drawn / 2
            return Patient.shared.copy()
        return drawn


class Sharing(Patient):
    """Steps only while it has the lock that it shares with others."""

    def __init__(self, lock: Any) -> None:
        super().__init__()
        self.lock = lock

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        with self.lock:
            return super().step(action)


def make_patient(trait: str = "") -> Patient:
    return Patient(trait)


existing = Patient()


def make_existing() -> Patient:
    return existing


class Starting(Patient):
    """Starts a process in a group of its own, and another one that becomes an orphan."""

    def __init__(self, file: str) -> None:
        super().__init__()
        subprocess.Popen(["tail", "-f", file], process_group=0)
        subprocess.run(f"timeout 1000 tail -f {file} &", shell=True, check=True)


class Shelling(Patient):
    """Starts a process that inherits all inheritable fds."""

    def __init__(self, file: str) -> None:
        super().__init__()
        os.system(f"tail -f {file} &")


class Holding(Patient):
    """Starts a process in a group of its own, and hangs while it is built."""

    def __init__(self, file: str) -> None:
        super().__init__()
        subprocess.Popen(["tail", "-f", file], process_group=0)
        time.sleep(1000)
