"""Train PPO on an Atari game in Python: what `muster train CrazyClimberNoFrameskip-v4` does, to build upon.

    pip install "muster-rl[train]" ale-py
    python examples/atari.py                                       # ten minutes on two cores
    python examples/atari.py --env ALE/Pong-v5 --total-steps 2000000

A step is one action, which the game repeats for 4 frames. The policy sees the last 4 frames, grey and 84 x 84, as in
Mnih et al. 2015.
"""

import argparse

from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

import muster
from muster.algorithms import PPO, PPOConfig

parser = argparse.ArgumentParser()
parser.add_argument("--env", default="CrazyClimberNoFrameskip-v4")
parser.add_argument("--total-steps", type=int, default=200_000)
parser.add_argument("--seed", type=int, default=1)
arguments = parser.parse_args()


def four_frames(env):
    return FrameStackObservation(AtariPreprocessing(env, frame_skip=4), 4)


# The values of CleanRL's ppo_atari.
config = PPOConfig(
    total_steps=arguments.total_steps,
    seed=arguments.seed,
    num_envs=8,
    num_steps=128,
    num_minibatches=4,
    update_epochs=4,
    learning_rate=2.5e-4,
    clip_coef=0.1,
    clip_vloss=True,
    ent_coef=0.01,
    clip_rewards=1.0,
    torch_threads=2,
)
game = {"frameskip": 1, "repeat_action_probability": 0.0}  # the wrapper skips frames; no action is repeated at random
with muster.make_vec(
    arguments.env, config.num_envs, env_kwargs=game, wrappers=[four_frames], autoreset_mode="same_step"
) as envs:
    for metrics in PPO(envs, config).train():
        mean_return, policy_loss = metrics.episodes.mean_return, metrics.losses.policy_loss
        print(f"{metrics.steps:,} steps, mean return {mean_return:.1f}, policy loss {policy_loss:.6f}")
