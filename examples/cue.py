"""A cue that is to be remembered: an env that no policy without memory can solve.

muster train examples/cue.py:Cue --policy gru --total-steps 200k
muster train examples/cue.py:Cue --total-steps 200k    # without memory it stays at 0.5
"""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

import muster


class Cue(gym.Env[Any, Any]):
    """Shows -1 or 1 once, then 0 for ``delay`` steps; then it asks, and the choice of the cue (0 or 1) is worth 1.

    Observations: the cue, and 1 where it asks, float32 [2].
    """

    observation_space = spaces.Box(-1, 1, (2,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, delay: int = 20) -> None:
        self.delay = delay

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps, self.cue = 0, int(self.np_random.integers(2))
        return np.array([2 * self.cue - 1, 0], np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        over = self.steps == self.delay
        reward = float(over and action == self.cue)
        self.steps += 1
        return np.array([0, self.steps == self.delay], np.float32), reward, over, False, {}


def main() -> None:
    with muster.make_vec(Cue, 4, num_workers=2) as envs:
        obs, _ = envs.reset(seed=0)
        print("cues:", obs[:, 0])
        for _ in range(20):
            obs, *_ = envs.step(envs.action_space.sample())
        print("asks:", obs[:, 1])


if __name__ == "__main__":
    main()
