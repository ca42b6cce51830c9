"""Train MAPPO on PettingZoo's multiwalker in Python: three walkers learn to carry a package together.

    pip install "muster-rl[train,marl]" "pettingzoo[sisl]"
    python examples/multiwalker.py                          # about six minutes on two cores
    python examples/multiwalker.py --total-steps 3000000    # what `muster train pettingzoo/sisl/multiwalker_v9` does

The walkers share one network, and the critic sees the state of the env. One that falls ends the episode for all, at 100
points each; the package is worth 4.3 points for each unit of its way. At first what pays is to stand:
after 100,000 steps episodes last 411 of 500 steps instead of 102, and the package hardly moves.
"""

import argparse

import numpy as np
import torch
from pettingzoo.sisl import multiwalker_v9

import muster
from muster.algorithms import MAPPO, MAPPOConfig

# The values of the command's preset.
CONFIG = {
    "num_envs": 16,
    "num_steps": 256,
    "num_minibatches": 16,
    "update_epochs": 6,
    "learning_rate": 5e-4,
    "normalize_observations": True,
    "normalize_rewards": True,
}


def carry(mappo, seed):
    """How far the walkers carry the package in one episode by the likeliest actions, and its steps."""
    env = multiwalker_v9.parallel_env()
    observations, _ = env.reset(seed=seed)
    package, steps = env.unwrapped.env.package, 0
    start = package.position.x
    while env.agents:
        seen = torch.from_numpy(np.stack([[observations[agent] for agent in env.agents]]))  # [1, 3, 31]
        actions = mappo.act({"walker": seen})["walker"][0].numpy()  # [3, 4]
        observations, *_ = env.step(dict(zip(env.agents, actions, strict=True)))
        steps += 1
    return package.position.x - start, steps


def report(when, mappo):
    way, steps = np.mean([carry(mappo, seed) for seed in range(10)], axis=0)
    print(f"{when}: the package comes {way:.1f} far, an episode lasts {steps:.0f} of 500 steps")


parser = argparse.ArgumentParser()
parser.add_argument("--total-steps", type=int, default=100_000)
parser.add_argument("--seed", type=int, default=0)
arguments = parser.parse_args()

config = MAPPOConfig(total_steps=arguments.total_steps, seed=arguments.seed, **CONFIG)
with muster.make_vec("pettingzoo/sisl/multiwalker_v9", config.num_envs, autoreset_mode="same_step", state=True) as envs:
    mappo = MAPPO(envs, config)
    report("untrained", mappo)
    for metrics in mappo.train():
        print(f"{metrics.steps:,} steps, mean return {metrics.episodes.mean_return:.1f}")
    report("trained", mappo)
