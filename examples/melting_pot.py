"""Six Melting Pot envs in parallel: from a factory, and from an id.

`dmlab2d.Lab2d`, the engine below, cannot be pickled, so no env can be sent to a worker. Each worker builds its own.
Install Melting Pot without TensorFlow first: python -m muster.envs.install_meltingpot
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import muster
from muster.envs.melting_pot import load_substrates

SUBSTRATE = "commons_harvest__open"


def make_commons() -> Any:
    """Builds one substrate. Runs in the worker, where `from meltingpot import substrate` works, too."""
    substrate = load_substrates()
    return substrate.build(SUBSTRATE, roles=substrate.get_config(SUBSTRATE).default_player_roles)


def play(envs: Any, num_steps: int) -> None:
    """Steps with random actions, and prints the time and memory that this takes."""
    start = time.perf_counter()
    obs, _ = envs.reset(seed=0)
    print(f"{envs.num_envs} envs reset in {time.perf_counter() - start:.1f} s, groups {dict(envs.groups)}")
    print("observations:", {key: one.shape for key, one in (obs["player"] | obs["shared"]).items()})

    start = time.perf_counter()
    for _ in range(num_steps):
        rewards = envs.step(envs.sample_actions())[1]
    seconds = time.perf_counter() - start
    print(f"{num_steps * envs.num_envs / seconds:.0f} env steps per second, rewards {rewards['player'].shape}")

    workers = envs.stats()["workers"]
    for worker in workers:
        print(f"worker {worker['pid']}: {worker['memory_bytes'] / 1e6:.0f} MB of its own")
    total = sum(worker["memory_bytes"] for worker in workers)
    print(f"{total / envs.num_envs / 1e6:.0f} MB for each env")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num-envs", type=int, default=6)
    parser.add_argument("--num-steps", type=int, default=100)
    args = parser.parse_args()
    for source in (make_commons, f"meltingpot/{SUBSTRATE}"):
        print(f"--- from {source if isinstance(source, str) else source.__name__}")
        with muster.make_vec(source, args.num_envs) as envs:
            play(envs, args.num_steps)


if __name__ == "__main__":
    main()
