"""Agents of several kinds in one env: `simple_tag`, where adversaries chase a faster agent.

Each kind is a group with spaces of its own. Groups come from the agents' names; ``groups=`` would choose others.
Needs: pip install 'muster-rl[marl]'
"""

from __future__ import annotations

import argparse

import numpy as np

import muster


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-envs", type=int, default=8)
    parser.add_argument("--num-steps", type=int, default=200)
    args = parser.parse_args()

    with muster.make_vec(
        "pettingzoo/mpe/simple_tag_v3",
        args.num_envs,
        env_kwargs={"num_adversaries": 3, "max_cycles": 50},
        state=True,
    ) as envs:
        envs.action_space.seed(0)
        obs, infos = envs.reset(seed=0)
        for group, agents in envs.groups.items():
            acts = envs.single_action_space[group]
            print(f"{group}: {', '.join(agents)}; observations {obs[group].shape}, actions {acts}")

        returns = {group: np.zeros((args.num_envs, len(agents))) for group, agents in envs.groups.items()}
        episodes = 0
        for _ in range(args.num_steps):
            obs, rewards, terminated, truncated, infos = envs.step(envs.sample_actions())
            for group in envs.groups:
                # A row counts where its agent was there, also if for the last time.
                returns[group] += np.where(infos["alive"][group], rewards[group], 0)
            episodes += int((terminated | truncated).sum())
        for group, agents in envs.groups.items():
            mean = returns[group].sum() / max(1, episodes * len(agents))
            print(f"{group}: mean return of an agent {mean:.2f}")
        print(f"{episodes} episodes; state of one env: {infos['state'].shape[1:]}")


if __name__ == "__main__":
    main()
