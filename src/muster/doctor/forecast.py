"""What many envs will do, from what one has done alone and from the machine's cores."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import numpy.typing as npt

from muster.make import make_vec
from muster.vector import VectorEnv

# What it costs to wake the workers and to be woken by them, and how much work should lie between two such rounds.
_ROUND_S = 60e-6
_ROUND_WORK_S = 500e-6
_MOST_ENVS_PER_WORKER = 32
_LEAST_S = 1e-7
_STAND_IN_S = 0.6
_DRAWS = 400
SPIN = 2_000
_CALLS = 500

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Trace:
    """The rows of one env alone, in seconds: steps and resets after an episode's end, without the caller's work.

    spin_s: of one round of `spin`, meanwhile.
    """

    steps_s: Floats
    resets_s: Floats
    num_steps: int
    num_resets: int
    spin_s: float

    @property
    def row_s(self) -> float:
        """Seconds of a row, mean."""
        resets_s = self.resets_s.mean() * self.num_resets
        return float((self.steps_s.mean() * self.num_steps + resets_s) / (self.num_steps + self.num_resets))

    @property
    def share_of_steps(self) -> float:
        """Env steps per row."""
        return self.num_steps / (self.num_steps + self.num_resets)


def make_trace(trials: Sequence[dict[str, Any]]) -> Trace:
    """The trace of what the trials `speed` told that ran at the same time, each with an env of its own."""
    outside_s = _outside_s()

    def all_of(name: str) -> Floats:
        return np.maximum(np.concatenate([trial[name] for trial in trials]) - outside_s, _LEAST_S)

    return Trace(
        all_of("steps_s"),
        all_of("resets_s"),
        sum(trial["num_steps"] for trial in trials),
        sum(trial["num_resets"] for trial in trials),
        float(np.mean([trial["spin_s"] for trial in trials])),
    )


def envs_per_worker(row_s: float) -> int:
    """A power of two that makes the work between two rounds outweigh what a round costs."""
    count = 1
    while count * row_s < _ROUND_WORK_S and count < _MOST_ENVS_PER_WORKER:
        count *= 2
    return count


def workers_pay(row_s: float, num_envs: int, num_workers: int) -> bool:
    """Whether worker processes are faster than the caller alone."""
    each = -(-num_envs // num_workers)
    return each * row_s + _ROUND_S < num_envs * row_s


def predict_steps_per_s(trace: Trace, num_envs: int, num_workers: int, obs_bytes: int) -> float:
    """Env steps a second of a vector env, from a stand-in that keeps this machine's cores as busy as the env would."""
    batch_s = _stand_in_batch_s(trace, num_envs, num_workers, obs_bytes) * _straggling(trace, num_envs, num_workers)
    return num_envs * trace.share_of_steps / batch_s


def predict_serial(trace: Trace, obs_bytes: int) -> float:
    """Env steps a second of a vector env without workers."""
    return trace.share_of_steps / (trace.row_s + _copy_s(obs_bytes))


class StandIn(gym.Env[Any, Any]):
    """Computes for a given amount of work, and observes a given number of bytes."""

    action_space = gym.spaces.Discrete(2)

    def __init__(self, rounds: int, obs_bytes: int) -> None:
        self.observation_space = gym.spaces.Box(0, 255, (obs_bytes,), np.uint8)
        self._rounds = rounds
        self._obs = np.zeros(obs_bytes, np.uint8)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return self._obs, {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        spin(self._rounds)
        return self._obs, 0.0, False, False, {}


def spin(rounds: int) -> None:
    """Work of an amount that is the same everywhere; the time it takes is the core's."""
    for _ in range(rounds):
        pass


def _stand_in_batch_s(trace: Trace, num_envs: int, num_workers: int, obs_bytes: int) -> float:
    """Seconds of one step of a vector env whose envs each compute for as long as a row takes on a busy core."""
    work = {"rounds": max(1, round(trace.row_s / trace.spin_s)), "obs_bytes": max(1, obs_bytes)}
    envs = make_vec(StandIn, num_envs, num_workers=num_workers, env_kwargs=work, memory_check="off")
    assert isinstance(envs, VectorEnv)
    with envs:
        envs.reset()
        actions = np.zeros(num_envs, np.int64)
        for _ in range(3):
            envs.step(actions)
        count, start = 0, time.perf_counter()
        while count < 3 or time.perf_counter() - start < _STAND_IN_S:
            envs.step(actions)
            count += 1
        return (time.perf_counter() - start) / count


def _straggling(trace: Trace, num_envs: int, num_workers: int) -> float:
    """How much longer the slowest worker takes than the mean one, because rows differ and resets are long."""
    each = -(-num_envs // num_workers)
    generator = np.random.default_rng(0)
    is_reset = generator.random((_DRAWS, num_workers, each)) > trace.share_of_steps
    steps = generator.choice(trace.steps_s, is_reset.shape)
    rows = np.where(is_reset, generator.choice(trace.resets_s, is_reset.shape), steps).sum(axis=2)
    return max(1.0, float(rows.max(axis=1).mean() / rows.mean()))


def _outside_s() -> float:
    """Seconds that a call of `step` takes beside what it does for each env."""
    medians = []
    for num_envs in (1, 32):
        envs = make_vec(StandIn, num_envs, backend="serial", env_kwargs={"rounds": 0, "obs_bytes": 1})
        assert isinstance(envs, VectorEnv)
        with envs:
            envs.reset()
            actions = np.zeros(num_envs, np.int64)
            times = []
            for _ in range(_CALLS):
                start = time.perf_counter()
                envs.step(actions)
                times.append(time.perf_counter() - start)
            medians.append(float(np.median(times)))
    return max(0.0, (32 * medians[0] - medians[1]) / 31)


def _copy_s(size: int) -> float:
    """Seconds that the caller takes to copy a batch of observations of `size` bytes."""
    source = np.zeros(max(1, size), np.uint8)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        source.copy()
        times.append(time.perf_counter() - start)
    return float(np.median(times))
