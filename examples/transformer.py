"""Trains a network of one's own in Python: a transformer that reads the parts of a Dict observation.

    pip install "muster-rl[train]"
    python examples/transformer.py                     # about a minute
    muster eval runs/transformer --trust               # what it has learnt, again

Six things are on a shelf, and the heaviest one of the wanted sort is to be taken. Whoever takes any of the wanted sort
is right half of the time; to compare them, a network has to look at all of them at once.
"""

import argparse

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import nn

import muster
from muster.algorithms import head_of, masked

SORTS, THINGS = 3, 6


class Shelf(gym.Env):
    """Ten shelves, one behind the other. The reward is 1 for the heaviest thing of the wanted sort.

    Observations: the wanted sort, and for each thing its sort, one-hot, and its weight from 0 to 1.  Actions: a thing.
    """

    def __init__(self):
        self.observation_space = spaces.Dict(
            wanted=spaces.Discrete(SORTS), things=spaces.Box(0, 1, (THINGS, SORTS + 1), np.float32)
        )
        self.action_space = spaces.Discrete(THINGS)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._fill(), {}

    def step(self, action):
        right = action == self.heaviest
        self.steps += 1
        return self._fill(), float(right), False, self.steps == 10, {}

    def _fill(self):
        sorts, weights = self.np_random.integers(SORTS, size=THINGS), self.np_random.random(THINGS)
        wanted = int(self.np_random.choice(sorts))
        self.heaviest = int(np.argmax(np.where(sorts == wanted, weights, -1)))
        return {"wanted": wanted, "things": np.float32(np.column_stack([np.eye(SORTS)[sorts], weights]))}


class Transformer(nn.Module):
    """A `muster.algorithms.PolicyNetwork`: a token for what is wanted, and one for each thing, which has a score."""

    def __init__(self, observation_space, action_space, width=32):
        super().__init__()
        self.head = head_of(action_space)
        self.wanted = nn.Embedding(int(observation_space["wanted"].n), width)
        self.things = nn.Linear(observation_space["things"].shape[-1], width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.score, self.value = nn.Linear(width, 1), nn.Linear(width, 1)

    def forward(self, obs, masks=None, memory=None):
        """Logits [B, 6] and values [B], for a TensorDict with "wanted" [B] and "things" [B, 6, 4]."""
        tokens = self.layers(torch.cat([self.wanted(obs["wanted"]).unsqueeze(1), self.things(obs["things"])], 1))
        return masked(self.score(tokens[:, 1:]).squeeze(-1), masks), self.value(tokens[:, 0]).squeeze(-1)

    def decide(self, obs, masks, memory):
        return self.forward(obs, masks)[0], None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--total-steps", type=int, default=50_000)
    parser.add_argument("--run-dir", default="runs/transformer")
    options = parser.parse_args()

    run = muster.train(
        Shelf,
        {"num_envs": 16, "num_steps": 64, "num_workers": 2, "normalize_observations": False},
        run_dir=options.run_dir,
        policy=Transformer,
        total_steps=options.total_steps,
        callback=lambda metrics: not metrics["mean_return"] > 9.7,  # False ends the run
    )

    env, right = Shelf(), 0
    obs, _ = env.reset(seed=1)
    for _ in range(200):
        obs, reward, *_ = env.step(run.policy(obs))
        right += reward
    print(f"right on {right:.0f} of 200 shelves after {run.metrics['steps'][-1]:,.0f} steps")


if __name__ == "__main__":
    main()
