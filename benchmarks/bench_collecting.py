"""How fast are rollouts collected, against peers and against a loop written by hand?

Frames per second on CartPole-v1, 1 torch thread, collected in rollouts of 128 steps: once with random actions, once
with an actor-critic of two 64-64 tanh networks that samples actions and stores log-probabilities and values. All
contenders run in turns in one process. A figure is the median of the rounds; the ratio is Muster's frames per second
to those of each contender.

`--loop-only` leaves the peers out: Muster's collector against the hand-written loop over the same kind of vector env.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict.nn import TensorDictModule
from torch import nn

import muster
from results import heading, machine, table, versions, write_section

_STEPS = 128
_ENV = "CartPole-v1"
_OPTIONS = {"backend": "process", "caller_steps": True}
_QUESTION = "Collecting"

Run = Callable[[], int]  # collects one rollout, returns its frames


class ActorCritic(nn.Module):
    """An actor-critic: observations [N, 4] to a dict of actions [N], their log-probabilities [N] and values [N]."""

    def __init__(self) -> None:
        super().__init__()
        self.actor, self.critic = _mlp(2), _mlp(1)

    def forward(self, obs: torch.Tensor) -> dict[str, torch.Tensor]:
        log_probs = self.actor(obs).log_softmax(-1)
        action = torch.multinomial(log_probs.exp(), 1)
        chosen = log_probs.gather(-1, action).squeeze(-1)
        return {"action": action.squeeze(-1), "log_prob": chosen, "value": self.critic(obs).squeeze(-1)}


def _mlp(outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))


def with_keys(net: ActorCritic) -> TensorDictModule:
    """The policy `net` as a module with TensorDict's keys."""
    return TensorDictModule(
        lambda obs: tuple(net(obs).values()), in_keys=["observation"], out_keys=["action", "log_prob", "value"]
    )


def collector(policy: nn.Module | None, num_envs: int) -> tuple[Run, Callable[[], None]]:
    """Muster's collector."""
    made = muster.Collector(
        _ENV, policy, num_envs=num_envs, frames_per_batch=_STEPS * num_envs, seed=0, make_vec_options=_OPTIONS
    )
    return lambda: made.rollout().numel(), made.shutdown


def hand_written(policy: nn.Module | None, num_envs: int) -> tuple[Run, Callable[[], None]]:
    """The loop that one would write for `policy` over Muster's vector env: arrays made once, every step stored."""
    envs = muster.make_vec(_ENV, num_envs, autoreset_mode="same_step", copy=False, **_OPTIONS)
    state = {"obs": torch.from_numpy(np.array(envs.reset(seed=0)[0]))}
    obs = torch.empty(_STEPS + 1, num_envs, 4)
    actions = torch.empty(_STEPS, num_envs, dtype=torch.int64)
    extras = {name: torch.empty(_STEPS, num_envs) for name in ("log_prob", "value")}
    rewards, ended = np.empty((_STEPS, num_envs), np.float32), np.empty((2, _STEPS, num_envs), np.bool_)
    finals: list[tuple[int, int, Any]] = []

    @torch.no_grad()
    def run() -> int:
        obs[0] = state["obs"]
        finals.clear()
        for t in range(_STEPS):
            outputs = policy(obs[t]) if policy is not None else {"action": torch.randint(0, 2, (num_envs,))}
            actions[t] = outputs["action"]
            for name, column in extras.items() if policy is not None else ():
                column[t] = outputs[name]
            after, rewards[t], ended[0, t], ended[1, t], infos = envs.step(actions[t].numpy())
            obs[t + 1] = torch.from_numpy(after)
            if "final_obs" in infos:
                finals.extend((t, int(env), infos["final_obs"][env]) for env in np.flatnonzero(infos["_final_obs"]))
        state["obs"] = obs[_STEPS].clone()
        return _STEPS * num_envs

    return run, envs.close


def sb3(kind: str, num_envs: int) -> tuple[Run, Callable[[], None]]:
    """SB3's ``collect_rollouts`` of PPO, with its default 64-64 tanh policy."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.vec_env import DummyVecEnv, SubprocVecEnv

    envs = make_vec_env(_ENV, num_envs, vec_env_cls=DummyVecEnv if kind == "dummy" else SubprocVecEnv)
    ppo = PPO("MlpPolicy", envs, n_steps=_STEPS, device="cpu")
    _, callback = ppo._setup_learn(10**9, None)

    def run() -> int:
        ppo.collect_rollouts(ppo.env, callback, ppo.rollout_buffer, n_rollout_steps=_STEPS)
        return _STEPS * num_envs

    return run, envs.close


def torchrl(kind: str, with_policy: bool, num_envs: int) -> tuple[Run, Callable[[], None]]:
    """TorchRL's collectors: over a SerialEnv, over a ParallelEnv, or two collector processes."""
    from torchrl import collectors
    from torchrl.envs import GymEnv, ParallelEnv, SerialEnv

    def make_env() -> Any:
        return GymEnv(_ENV, categorical_action_encoding=True)

    policy = with_keys(ActorCritic()) if with_policy else None
    frames = {"frames_per_batch": _STEPS * num_envs, "total_frames": -1}
    if kind == "multi":
        made = collectors.MultiSyncCollector([lambda: SerialEnv(num_envs // 2, make_env)] * 2, policy, **frames)
    else:
        made = collectors.Collector(
            (SerialEnv if kind == "serial" else ParallelEnv)(num_envs, make_env), policy, **frames
        )
    batches = iter(made)
    return lambda: next(batches).numel(), made.shutdown


def contenders(with_policy: bool, num_envs: int, loop_only: bool) -> dict[str, tuple[Run, Callable[[], None]]]:
    """The contenders by name, Muster's collector first."""
    policy = ActorCritic() if with_policy else None
    found = {"Muster": collector(policy, num_envs), "loop by hand": hand_written(policy, num_envs)}
    if policy is not None:
        found["Muster, TensorDictModule"] = collector(with_keys(policy), num_envs)
    if loop_only:
        return found
    if with_policy:
        found |= {f"SB3, {kind}": sb3(kind, num_envs) for kind in ("dummy", "subproc")}
    kinds = ("serial", "parallel") if with_policy else ("serial", "parallel", "multi")
    return found | {f"TorchRL, {kind}": torchrl(kind, with_policy, num_envs) for kind in kinds}


def measure(runs: dict[str, Run], rounds: int, seconds: float) -> dict[str, list[float]]:
    """Frames per second of each contender, round by round."""
    rates: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            frames, start = 0, time.perf_counter()
            while time.perf_counter() - start < seconds:
                frames += run()
            rates[name].append(frames / (time.perf_counter() - start))
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each turn")
    parser.add_argument("--loop-only", action="store_true")
    parser.add_argument("--write", action="store_true", help="put the result into RESULTS.md")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    sections = []
    for with_policy in (False, True):
        opened = contenders(with_policy, arguments.num_envs, arguments.loop_only)
        try:
            runs = {name: run for name, (run, _) in opened.items()}
            for run in runs.values():
                run()
            rates = measure(runs, arguments.rounds, arguments.seconds)
        finally:
            for _, close in opened.values():
                close()
        rows = []
        for name, values in rates.items():
            ratios = [own / other for own, other in zip(rates["Muster"], values, strict=True)]
            spread = f"{min(values):,.0f} to {max(values):,.0f}"
            rows.append([name, f"{statistics.median(values):,.0f}", spread, f"{statistics.median(ratios):.2f}"])
        what = "actor-critic" if with_policy else "random actions"
        header = [f"{what}, {arguments.num_envs} envs", "frames/s", "spread", "Muster's ratio"]
        sections.append(table(header, rows))
    text = "\n\n".join(sections)
    print(f"{machine()}\n{versions()}\n\n{text}")
    if arguments.write:
        write_section(_QUESTION, f"{heading(_QUESTION)}\n{text}")


if __name__ == "__main__":
    main()
