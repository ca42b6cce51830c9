"""Envs behind clients with `reset` and `step` of their own, as OpenEnv has them: a hundred wait in one worker."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces

import muster


@dataclass
class StepResult:
    """What such a client returns."""

    observation: dict[str, Any]
    reward: float | None
    done: bool


class EchoClient:
    """A client; an answer takes 0.1 s. Put yours in its place: ``EchoEnv(base_url="http://...")``."""

    def reset(self) -> StepResult:
        time.sleep(0.1)
        return StepResult({"message": "", "length": 0}, None, done=False)

    def step(self, message: str) -> StepResult:
        time.sleep(0.1)
        return StepResult({"message": message, "length": len(message)}, len(message) / 10, done=message == "bye")

    def close(self) -> None: ...


class Remote:
    """The client as an env. The last message is in the infos."""

    observation_space, action_space = spaces.Box(0, 100, (1,), np.float32), spaces.Text(100)

    def __init__(self) -> None:
        self.client = EchoClient()

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return self._row(self.client.reset())[::4]

    def step(self, action: str) -> tuple[Any, ...]:
        return self._row(self.client.step(action))

    def _row(self, result: StepResult) -> tuple[Any, ...]:
        seen = result.observation
        return np.float32([seen["length"]]), result.reward or 0.0, result.done, False, {"message": seen["message"]}

    def close(self) -> None:
        self.client.close()


if __name__ == "__main__":
    with muster.make_vec(Remote, num_envs=100, num_workers=1, concurrent=True) as envs:
        envs.reset(seed=0)
        began = time.perf_counter()
        obs, rewards, terminated, truncated, infos = envs.step(["hello"] * 99 + ["bye"])
        print(f"100 steps of 0.1 s in under a second: {time.perf_counter() - began < 1}")
        print(f"rewards {rewards[0]}, {rewards[99]:.1f}; messages {infos['message'][0]}, {infos['message'][99]}")
        print(f"over: {terminated.sum()} of 100, in {envs.stats()['processes']} process")
