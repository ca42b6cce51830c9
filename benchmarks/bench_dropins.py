"""How long do stepping and training take with a drop-in, against the same program with the original?

8 envs in 8 processes, as the originals have them, and for comparison packed in 2. SB3:
``PPO("MlpPolicy", make_vec_env("CartPole-v1", n_envs=8, ...), n_steps=128, batch_size=256)`` with Muster's
SubprocVecEnv, with SB3's own, and with SB3's DummyVecEnv. TorchRL: a PPO loop over 8 CartPole-v1 with Muster's
ParallelEnv and with TorchRL's. Stepping: random actions, without a policy. One torch thread. Envs and workers are
started before the clock. The contenders take turns within each round; a ratio is the median over the rounds of the
ratio within the round, for the first contender of each program.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import gymnasium
import numpy as np
import torch

from results import heading, table, write_section

_NUM_ENVS = 8
Learn = Callable[[int], None]
Opened = tuple[Learn, Callable[[], None]]


def sb3_ppo(make_vec_env: Callable[..., object], vec_env_cls: type, **vec_env_kwargs: object) -> Opened:
    """SB3's PPO on these classes: a function that learns for a number of env steps, and one that closes the envs."""
    from stable_baselines3 import PPO

    options = {"vec_env_cls": vec_env_cls, "vec_env_kwargs": vec_env_kwargs}
    envs = make_vec_env("CartPole-v1", n_envs=_NUM_ENVS, seed=0, **options)
    model = PPO("MlpPolicy", envs, n_steps=128, batch_size=256, seed=0, device="cpu")
    return lambda steps: model.learn(steps, reset_num_timesteps=False), envs.close


def torchrl_ppo(envs: object) -> Opened:
    """A PPO loop in TorchRL's own terms: rollouts of 32 steps, through a replay buffer, 4 epochs of one minibatch."""
    from tensordict.nn import TensorDictModule
    from torch import nn
    from torchrl.data import LazyTensorStorage, ReplayBuffer, SamplerWithoutReplacement
    from torchrl.modules import OneHotCategorical, ProbabilisticActor, ValueOperator
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value import GAE

    body = TensorDictModule(nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2)), ["observation"], ["logits"])
    actor = ProbabilisticActor(body, ["logits"], distribution_class=OneHotCategorical, return_log_prob=True)
    critic = ValueOperator(nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 1)), ["observation"])
    loss, gae = ClipPPOLoss(actor, critic), GAE(gamma=0.99, lmbda=0.95, value_network=critic)
    optimizer = torch.optim.Adam(loss.parameters(), 3e-4)
    frames = 32 * _NUM_ENVS
    buffer = ReplayBuffer(storage=LazyTensorStorage(frames), sampler=SamplerWithoutReplacement(), batch_size=frames)

    def learn(steps: int) -> None:
        for _ in range(steps // frames):
            with torch.no_grad():
                buffer.extend(gae(envs.rollout(32, actor, break_when_any_done=False)).reshape(-1))
            for _ in range(4):
                losses = loss(buffer.sample())
                optimizer.zero_grad()
                (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
                optimizer.step()

    return learn, envs.close


def open_sb3() -> dict[str, Opened]:
    """The contenders of SB3's PPO, started."""
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

    from muster.interop import sb3

    return {
        "SB3 PPO, Muster's SubprocVecEnv": sb3_ppo(sb3.make_vec_env, sb3.SubprocVecEnv),
        "SB3 PPO, Muster's SubprocVecEnv(num_workers=2)": sb3_ppo(sb3.make_vec_env, sb3.SubprocVecEnv, num_workers=2),
        "SB3 PPO, SB3's SubprocVecEnv": sb3_ppo(make_vec_env, SubprocVecEnv),
        "SB3 PPO, SB3's DummyVecEnv": sb3_ppo(make_vec_env, DummyVecEnv),
    }


def open_torchrl() -> dict[str, Opened]:
    """The contenders of TorchRL's PPO loop, started."""
    from torchrl.envs import ParallelEnv
    from torchrl.envs.libs.gym import GymEnv

    from muster.interop import torchrl

    def make() -> object:
        return GymEnv("CartPole-v1")

    return {
        "TorchRL PPO, Muster's ParallelEnv": torchrl_ppo(torchrl.ParallelEnv(_NUM_ENVS, make)),
        "TorchRL PPO, Muster's ParallelEnv(num_processes=2)": torchrl_ppo(
            torchrl.ParallelEnv(_NUM_ENVS, make, num_processes=2)
        ),
        "TorchRL PPO, TorchRL's ParallelEnv": torchrl_ppo(ParallelEnv(_NUM_ENVS, make)),
    }


def stepping(envs: Any, action_space: gymnasium.Space[Any]) -> Opened:
    """Steps `envs` by random actions of one env's `action_space`."""
    action_space.seed(0)
    actions = [np.array([action_space.sample() for _ in range(_NUM_ENVS)]) for _ in range(64)]
    envs.reset()

    def learn(steps: int) -> None:
        for row in range(steps // _NUM_ENVS):
            envs.step(actions[row % len(actions)])

    return learn, envs.close


def open_stepping(env_id: str) -> dict[str, Opened]:
    """The drop-ins of Gymnasium and SB3 and their originals, started."""
    from stable_baselines3.common.vec_env import SubprocVecEnv

    from muster.interop import gymnasium as muster_gymnasium
    from muster.interop import sb3

    fns = [functools.partial(gymnasium.make, env_id)] * _NUM_ENVS
    space = gymnasium.make(env_id).action_space
    name = env_id.partition("-")[0]
    return {
        f"{name} in AsyncVectorEnv, Muster's": stepping(muster_gymnasium.AsyncVectorEnv(fns), space),
        f"{name} in AsyncVectorEnv, Muster's (num_workers=2)": stepping(
            muster_gymnasium.AsyncVectorEnv(fns, num_workers=2), space
        ),
        f"{name} in AsyncVectorEnv, Gymnasium's": stepping(gymnasium.vector.AsyncVectorEnv(fns), space),
        f"{name} in SubprocVecEnv, Muster's": stepping(sb3.SubprocVecEnv(fns), space),
        f"{name} in SubprocVecEnv, SB3's": stepping(SubprocVecEnv(fns, start_method="fork"), space),
    }


_PROGRAMS: dict[str, Callable[[], dict[str, Opened]]] = {
    "sb3": open_sb3,
    "torchrl": open_torchrl,
    "cartpole": functools.partial(open_stepping, "CartPole-v1"),
    "halfcheetah": functools.partial(open_stepping, "HalfCheetah-v5"),
}


def measure(programs: list[str], rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds per 100,000 env steps of each contender, one figure per round."""
    opened = {name: contender for program in programs for name, contender in _PROGRAMS[program]().items()}
    seconds: dict[str, list[float]] = {name: [] for name in opened}
    try:
        for learn, _ in opened.values():
            learn(1024)  # compiles and allocates what the first use needs
        for turn in range(rounds):
            names = list(opened)[turn % len(opened) :] + list(opened)[: turn % len(opened)]
            for name in names:
                start = time.perf_counter()
                opened[name][0](steps)
                seconds[name].append((time.perf_counter() - start) / steps * 1e5)
    finally:
        for _, close in opened.values():
            close()
    return seconds


def report(seconds: dict[str, list[float]]) -> str:
    """A table: seconds per 100,000 env steps, and the ratio to Muster's contender of the same program."""
    rows = []
    for name, own in seconds.items():
        ours = next(values for other, values in seconds.items() if other.split(",")[0] == name.split(",")[0])
        ratios = [mine / theirs for mine, theirs in zip(ours, own, strict=True)]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        rows.append([name, f"{statistics.median(own):.1f}", f"{statistics.median(ratios):.2f}", spread])
    return table(["program", "s per 100k steps", "Muster's time / this", "spread"], rows)


def main() -> None:
    """Measures and prints; with ``--write`` also into RESULTS.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", nargs="+", choices=_PROGRAMS, default=list(_PROGRAMS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16_384, help="env steps of each contender in each round")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    seconds = measure(arguments.programs, arguments.rounds, arguments.steps)
    text = f"{heading('Drop-ins against their originals')}\n{report(seconds)}"
    print(text)
    if arguments.write:
        write_section("Drop-ins against their originals", text)


if __name__ == "__main__":
    main()
