"""What do collectors on other nodes cost, beside the same collectors at home?

Two collectors, at home and on two raylets of this machine, take turns. CPU per frame is that of this process, the
collectors and, on nodes, of Ray: its raylets, head and node hosts. The cost of a batch is its time on nodes less its
time at home, for envs that do nothing; the cost of weights is the time of a batch that has to wait for new ones, less
that of one that has not. A straggler is 20 times slower than the other collector. TorchRL's RayCollector has two
collectors on the same raylets. A machine of two cores shows no scaling.
"""

from __future__ import annotations

import argparse
import functools
import os
import secrets
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from torch import nn

import muster
from bench_idle import family_cpu_ns
from results import heading, machine, table, versions, write_section

_QUESTION = "Collectors on nodes"
_BATCHES = 12
Run = Callable[[], Any]


class Pixels(gymnasium.Env[Any, Any]):
    """Observations of `size` bytes, for nothing. slow_s: how long a step takes in the last collector."""

    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, size: int = 8, slow_s: float = 0.0) -> None:
        self.observation_space = gymnasium.spaces.Box(0, 255, (size,), np.uint8)
        self._seen = np.zeros(size, np.uint8)
        self._slow_s = slow_s

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        info = muster.get_worker_info()
        is_slow = info is not None and info.worker_index == info.num_workers - 1
        self._sleep_s = self._slow_s if is_slow else self._slow_s / 20
        return self._seen, {}

    def step(self, action: Any) -> Any:
        if self._sleep_s:
            time.sleep(self._sleep_s)
        return self._seen, 0.0, False, False, {}


class Heavy(nn.Module):
    """Acts at random; its weights are `size` bytes that it does not look at."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(size // 4))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(observation), dtype=torch.int64)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))


class Net(nn.Module):
    """Two 64-64 tanh layers, whose choice is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return torch.distributions.Categorical(logits=self.net(observation)).sample()


def both(cluster: muster.RayCluster, env: Any, policy: nn.Module, **options: Any) -> list[muster.MultiCollector]:
    """The same collectors at home and on nodes."""
    options = {"num_collectors": 2, "compact": True, "policy": policy, **options}
    return [muster.MultiCollector(env, cluster=where, **options) for where in (None, cluster)]


def timed(run: Run, batches: int = _BATCHES) -> float:
    """The median time of a call, in milliseconds."""
    times = []
    for _ in range(batches):
        start = time.perf_counter()
        run()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def cpu_per_frame_us(collector: muster.MultiCollector, frames: int) -> float:
    start, done = family_cpu_ns(), 0
    began = time.perf_counter()
    while time.perf_counter() - began < 2.0:
        collector.update_policy_weights_()
        collector.rollout()
        done += frames
    return (family_cpu_ns() - start) / 1e3 / done


def turns(
    measure: Callable[[muster.MultiCollector], float], sides: Sequence[muster.MultiCollector], rounds: int
) -> Any:
    """By side the figures of all rounds; the collectors are shut down."""
    for side in sides:
        side.rollout()
    figures = [[measure(side) for side in sides] for _ in range(rounds)]
    for side in sides:
        side.shutdown()
    return list(zip(*figures, strict=True))


def spread(figures: Sequence[float], unit: str = "") -> str:
    low, middle, high = np.percentile(figures, [25, 50, 75])
    return f"{middle:.2f}{unit} ({low:.2f} - {high:.2f})"


def ratios(of: Sequence[float], to: Sequence[float]) -> str:
    return spread([one / other for one, other in zip(of, to, strict=True)])


def differences(of: Sequence[float], to: Sequence[float]) -> str:
    return spread([one - other for one, other in zip(of, to, strict=True)], " ms")


def report(cluster: muster.RayCluster, rounds: int) -> str:
    rows = []
    for frames, goal in ((16_384, "1.15"), (2_048, "1.25")):
        sides = both(cluster, "CartPole-v1", Net(), num_envs=16, frames_per_batch=frames)
        home, nodes = turns(functools.partial(cpu_per_frame_us, frames=frames), sides, rounds)
        what = f"CPU per frame, CartPole, {frames:,} frames"
        rows.append([what, f"{statistics.median(nodes):.1f} us", ratios(nodes, home), goal])
    for size in (64, 16_384, 131_072):
        sides = both(cluster, functools.partial(Pixels, size), Heavy(8), frames_per_batch=128)
        home, nodes = turns(lambda side: timed(side.rollout), sides, rounds)
        megabytes = 130 * size / 1e6
        goal = f"{5 + 3 * megabytes:.1f} ms"
        rows.append([f"a batch of {megabytes:.2f} MB", spread(nodes, " ms"), differences(nodes, home), goal])
    for size, goal_ms in ((10_000, 4), (1_000_000, 24), (100_000_000, 480)):
        policy = Heavy(size)
        with muster.MultiCollector(Pixels, policy, num_collectors=2, frames_per_batch=16, cluster=cluster) as one:

            def with_weights(one: muster.MultiCollector = one) -> None:
                one.update_policy_weights_()
                one.rollout()

            one.rollout()
            with_weights()
            pairs = [(timed(with_weights, 5), timed(one.rollout, 5)) for _ in range(rounds)]
        new, old = zip(*pairs, strict=True)
        rows.append([f"weights of {size / 1e6:g} MB", spread(new, " ms"), differences(new, old), f"{goal_ms} ms"])
    slow = functools.partial(Pixels, 8, 0.02)
    options = {"num_collectors": 2, "frames_per_batch": 256, "cluster": cluster}
    with muster.MultiCollector(slow, Heavy(8), preemptive_threshold=0.5, **options) as one:
        one.rollout()
        figures = [timed(one.rollout, 3) for _ in range(rounds)]
    fast_ms = 128 * 1.1  # a sleep of 1 ms takes 1.1
    rows.append(["a straggler, threshold 0.5", spread(figures, " ms"), spread([f / fast_ms for f in figures]), "1.5"])
    rows.append(["frames/s, to RayCollector", *against_torchrl(cluster, rounds), "3"])
    return table(["two collectors on two nodes", "there", "to home", "goal"], rows) + "\n"


def against_torchrl(cluster: muster.RayCluster, rounds: int) -> list[str]:
    """Frames per second, and their ratio to those of TorchRL's RayCollector."""
    from tensordict.nn import TensorDictModule
    from torchrl.collectors.distributed import RayCollector
    from torchrl.envs import GymEnv

    frames = 2_048
    policy = TensorDictModule(Net(), in_keys=["observation"], out_keys=["action"])
    with muster.MultiCollector(
        "CartPole-v1", Net(), num_collectors=2, frames_per_batch=frames, cluster=cluster
    ) as ours:
        ours.rollout()
        theirs = RayCollector(
            create_env_fn=[functools.partial(GymEnv, "CartPole-v1", categorical_action_encoding=True)] * 2,
            policy=policy,
            frames_per_batch=frames,
            total_frames=1_000_000_000,
            num_collectors=2,
            remote_configs={"num_cpus": 0, "num_gpus": 0, "memory": 100 << 20},
            sync=True,
        )
        batches = iter(theirs)
        next(batches)
        figures = []
        for _ in range(rounds):
            own, other = timed(ours.rollout), timed(lambda: next(batches), 3)
            figures.append((frames / own * 1e3, other / own))
        theirs.shutdown(shutdown_ray=False)
    rates, to_theirs = zip(*figures, strict=True)
    return [f"{statistics.median(rates):,.0f}", spread(to_theirs)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", action="store_true", help="write the table to benchmarks/RESULTS.md")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error("--rounds must be at least 1")
    print(f"{machine()}\n{versions()}\n")
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as folder:
        os.environ |= {
            "RAY_TMPDIR": folder,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_worker_niceness": "0",
        }
        from ray.cluster_utils import Cluster

        raylets = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
        for _ in range(2):
            raylets.add_node(num_cpus=2)
        text = report(muster.RayCluster(raylets.address, nodes=2), arguments.rounds)
        raylets.shutdown()
    print(text)
    if arguments.write:
        write_section("nodes", f"{heading(_QUESTION)}\n{text}")


if __name__ == "__main__":
    main()
