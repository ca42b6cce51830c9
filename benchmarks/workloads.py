"""The workloads of `bench_stepping.py`, and the ratios that Muster has to reach on them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium

from envs import BusyEnv, FrameEnv, cartpole, half_cheetah, pong

LIMIT = "limit"
LIMIT_IN_STEP = "limit, in step"
ONE_LOOP = "one loop"
SERIAL = "muster serial"
PROCESS = "muster process"
ONE_EACH = "muster, one each"
CALLER_STEPS = "muster caller_steps"
GYMNASIUM_SYNC = "gymnasium sync"
GYMNASIUM_ASYNC = "gymnasium async"
SB3_DUMMY = "sb3 dummy"
SB3_SUBPROC = "sb3 subproc"
ENVPOOL = "envpool"


@dataclass(frozen=True)
class Goal:
    """A goal: ``contender`` makes at least ``ratio`` times the env steps/s of ``reference``, in the same round."""

    contender: str
    ratio: float
    reference: str = LIMIT


@dataclass(frozen=True)
class Workload:
    """A number of envs from one factory. ``envpool_id``: the id of the same env in EnvPool, where EnvPool has it.

    copy=False asks the contenders that offer it for views instead of copies of their observations.
    """

    name: str
    factory: Callable[[], gymnasium.Env[Any, Any]]
    num_envs: int
    goals: tuple[Goal, ...]
    envpool_id: str | None = None
    copy: bool = True


def _shares(process: float, caller_steps: float) -> tuple[Goal, ...]:
    return Goal(PROCESS, process), Goal(CALLER_STEPS, caller_steps)


# EnvPool's Pong is another env than ALE/Pong-v5, with 84x84 grey frames of its own making: it is left out there.
_SERIAL_IS_A_LOOP = Goal(SERIAL, 0.95, ONE_LOOP)
_PROCESS_PAYS = Goal(PROCESS, 1.0, SERIAL)
_TIMES_ASYNC = (Goal(PROCESS, 15.0, GYMNASIUM_ASYNC),)

WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("cartpole-2", cartpole, 2, _shares(0.45, 0.75), envpool_id="CartPole-v1"),
        Workload("cartpole-8", cartpole, 8, (*_shares(0.75, 0.88), _SERIAL_IS_A_LOOP), envpool_id="CartPole-v1"),
        Workload("cartpole-32", cartpole, 32, _shares(0.90, 0.94), envpool_id="CartPole-v1"),
        Workload("halfcheetah-8", half_cheetah, 8, _shares(0.86, 0.90), envpool_id="HalfCheetah-v5"),
        Workload("pong-8", pong, 8, _shares(0.92, 0.95)),
        Workload("busy-10us-8", functools.partial(BusyEnv, 10), 8, (*_shares(0.77, 0.92), _PROCESS_PAYS)),
        Workload("busy-100us-8", functools.partial(BusyEnv, 100), 8, (*_shares(0.95, 0.97), _PROCESS_PAYS)),
        Workload("busy-1ms-8", functools.partial(BusyEnv, 1_000), 8, (*_shares(0.97, 0.98), _PROCESS_PAYS)),
        Workload("frames-84x84x4-8", functools.partial(FrameEnv, (84, 84, 4)), 8, _TIMES_ASYNC, copy=False),
        Workload("frames-210x160x3-8", functools.partial(FrameEnv, (210, 160, 3)), 8, _TIMES_ASYNC, copy=False),
    )
}
