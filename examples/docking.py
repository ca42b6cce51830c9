"""Train PPO on an env of your own: a ship that has to arrive at a dock, slowly.

    pip install "muster-rl[train]"
    muster train examples/docking.py:Docking --total-steps 200k     # about 20 seconds; prints where the run lies
    muster eval runs/RUN --trust                                    # returns of whole episodes
    python examples/docking.py runs/RUN                             # flies, and shows the way on the terminal

Nothing here knows of Muster but the last lines: any class or function that returns a Gymnasium env trains like this,
in processes of its own.
"""

import sys

import gymnasium as gym
import numpy as np
from gymnasium import spaces

THRUSTS = np.float32([[0, 0], [1, 0], [-1, 0], [0, 1], [0, -1]])


class Docking(gym.Env):
    """The dock is at (0, 0), of radius 0.1; the ship starts at rest, anywhere in the square of -1 to 1.

    Observations: position x, y and velocity x, y.  Actions: 0 none, 1 to 4 thrust to the right, left, up, down.
    The reward is how much nearer the ship has come, less 0.01 a step; 1 for docking, and -1 for leaving the square or
    arriving faster than 0.5.
    """

    def __init__(self, max_steps=200):
        self.observation_space = spaces.Box(-np.inf, np.inf, (4,), np.float32)
        self.action_space = spaces.Discrete(len(THRUSTS))
        self.max_steps = max_steps

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position = self.np_random.uniform(-0.9, 0.9, 2).astype(np.float32)
        self.velocity = np.zeros(2, np.float32)
        self.steps = 0
        return self._observation(), {}

    def step(self, action):
        distance = np.linalg.norm(self.position)
        self.velocity += 0.05 * THRUSTS[action]
        self.position += 0.05 * self.velocity
        self.steps += 1

        nearer = distance - np.linalg.norm(self.position)
        arrived = np.linalg.norm(self.position) < 0.1
        outside = np.abs(self.position).max() > 1
        docked = arrived and np.linalg.norm(self.velocity) < 0.5
        reward = nearer - 0.01 + (1 if docked else -1 if arrived or outside else 0)
        infos = {"docked": bool(docked)}
        return self._observation(), float(reward), bool(arrived or outside), self.steps >= self.max_steps, infos

    def _observation(self):
        return np.concatenate([self.position, self.velocity])


def fly(run):
    """Flies one episode by what the run has learnt, and draws it: one letter each 5 steps."""
    import muster

    policy, env = muster.load_policy(run), Docking()
    sky = [[" "] * 41 for _ in range(21)]
    sky[10][20] = "#"
    observation, infos = env.reset(seed=1)
    total, done = 0.0, False
    while not done:
        if env.steps % 5 == 0:
            x, y = observation[:2]
            sky[round(10 - 10 * float(y))][round(20 + 20 * float(x))] = chr(ord("a") + env.steps // 5 % 26)
        observation, reward, terminated, truncated, infos = env.step(policy(observation))
        total, done = total + reward, terminated or truncated
    print("\n".join("".join(row).rstrip() for row in sky))
    print(f"{'docked' if infos['docked'] else 'not docked'} after {env.steps} steps, return {total:.2f}")


if __name__ == "__main__":
    fly(sys.argv[1])
