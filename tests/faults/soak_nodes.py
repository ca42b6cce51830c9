"""Collects on nodes, one of which is killed again and again, and checks every row: ``soak_nodes.py --seconds 300``.

A row has the env's index, how many steps its episode has, and a checksum of both and the action before; the policy acts
by its weight, which is another one for each batch. So a row that is wrong, stale or doubled shows. With ``--ray`` nodes
are raylets of this machine, which are killed and started again; else node hosts are processes over socket pairs.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
import warnings
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
sys.path += map(str, (TESTS, TESTS / "rollout", TESTS / "rollout" / "cluster"))

import gymnasium  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from collecting import Constant  # noqa: E402
from ray_clusters import RunningCluster, run_cluster  # noqa: E402

import muster  # noqa: E402
from local_nodes import LocalNodes  # noqa: E402

COLLECTORS, ENVS, T, EPISODE, ACTIONS = 4, 8, 64, 50, 1_000_003


def checksum(env: Any, t: Any, action: Any) -> Any:
    return (env * 1_000_003 + t * 7_919 + action * 104_729) % 16_777_213


class Summed(gymnasium.Env[Any, Any]):
    observation_space = gymnasium.spaces.Box(0, 1e9, (4,), np.float64)
    action_space = gymnasium.spaces.Discrete(ACTIONS)

    def _observed(self, action: int) -> Any:
        index = muster.get_worker_info().env_index
        return np.array([index, self._t, action, checksum(index, self._t, action)], np.float64)

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        self._t = 0
        return self._observed(0), {}

    def step(self, action: Any) -> Any:
        self._t += 1
        return self._observed(int(action)), float(action), False, self._t == EPISODE, {}


class Checks:
    """Checks batches. counts: of all rows, of those that were masked, and of the nodes that came back."""

    def __init__(self) -> None:
        self._next_t: dict[int, int | None] = {}
        self.rows = self.masked = self.returns = 0
        self._away: set[int] = set()

    def take(self, batch: Any, weight: int, version: int) -> None:
        seen, after = batch["observation"].numpy(), batch["next", "observation"].numpy()
        action, mask = batch["action"].numpy(), batch["collector", "mask"].numpy()
        ended = batch["next", "done"].squeeze(-1).numpy()
        self.rows += mask.size
        self.masked += int((~mask).sum())
        for env in range(ENVS):
            if not mask[env].all():
                assert not mask[env].any(), f"env {env} has {mask[env].sum()} of {T} rows"
                self._next_t[env] = None
                self._away.add(env)
                continue
            self.returns += env in self._away
            self._away.discard(env)
            assert (seen[env, :, 0] == env).all(), f"rows of env {seen[env, :, 0]} in the place of env {env}"
            for rows in (seen[env], after[env]):
                assert (rows[:, 3] == checksum(*rows[:, :3].T)).all(), f"wrong rows of env {env}"
            assert (action[env] == weight).all(), f"stale: actions {np.unique(action[env])}, weight {weight}"
            assert (batch["collector", "policy_version"][env] == version).all()
            assert (after[env, :, 2] == weight).all()
            assert (after[env, :, 1] == seen[env, :, 1] + 1).all()
            expected = np.where(ended[env, :-1], 0, seen[env, :-1, 1] + 1)
            assert (seen[env, 1:, 1] == expected).all(), f"env {env} has steps {seen[env, :, 1]}"
            first = self._next_t.get(env)
            assert first is None or seen[env, 0, 1] == first, f"env {env} goes on at {seen[env, 0, 1]}, not {first}"
            self._next_t[env] = 0 if ended[env, -1] else int(seen[env, -1, 1]) + 1


def soak(collector: Any, kill: Any, seconds: float, every_s: float) -> str:
    policy, checks, slowest_s, kills = collector.policy, Checks(), 0.0, 0
    draw = random.Random(0)
    began = killed_at = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        while time.monotonic() - began < seconds:
            policy.best.data.fill_(weight := draw.randrange(ACTIONS))
            collector.update_policy_weights_()
            start = time.monotonic()
            batch = collector.rollout()
            slowest_s = max(slowest_s, time.monotonic() - start)
            checks.take(batch, weight, collector.policy_version)
            is_whole = all(node["state"] == "up" for node in collector.nodes())
            if is_whole and time.monotonic() - killed_at > every_s:
                killed_at = time.monotonic()
                kill(draw)
                kills += 1
            time.sleep(0.01)
    return (
        f"{checks.rows:,} rows, {checks.masked:,} masked, {kills} kills, {checks.returns} columns came back, slowest "
        f"batch {slowest_s:.2f} s, {torch.get_num_threads()} threads"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--every", type=float, default=30.0, help="seconds between two kills, at least")
    parser.add_argument("--ray", action="store_true", help="on raylets")
    given = parser.parse_args()
    options = {"num_collectors": COLLECTORS, "num_envs": ENVS, "frames_per_batch": ENVS * T, "seed": 1}
    options |= {"policy": Constant(), "on_failure": "restart", "max_restarts": 1_000}
    if not given.ray:
        local = LocalNodes(2)

        def kill_host(draw: random.Random) -> None:
            draw.choice([host for host in local.hosts if host.process.poll() is None]).process.kill()

        with muster.MultiCollector(Summed, cluster=local, **options) as collector:
            print(soak(collector, kill_host, given.seconds, given.every))
        return
    for running in run_cluster(4):
        on_raylets(running, given, options)


def on_raylets(running: RunningCluster, given: argparse.Namespace, options: dict[str, Any]) -> None:
    os.environ |= running.environ
    cluster = muster.RayCluster(running.address, nodes=3)
    with muster.MultiCollector(Summed, cluster=cluster, **options) as collector:

        def kill_raylet(draw: random.Random) -> None:
            running.ask(f"remove {draw.choice(collector.nodes())['node_id']}")
            running.ask("add")

        print(soak(collector, kill_raylet, given.seconds, given.every))


if __name__ == "__main__":
    main()
