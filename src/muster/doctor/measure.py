"""How fast an env is stepped in each of the ways to run many of it, measured in turns on this machine."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym

from muster.vector.make import make_vec

_WARM_UP_S = 0.1
_NUM_ACTIONS = 64


@dataclass(frozen=True)
class Measured:
    """One way to run the envs.

    way: as one writes it.  steps_per_s: of all envs together, a figure for each round; none where there is a problem.
    options: what `make_vec` is to be given, None where it is not Muster's.
    """

    way: str
    options: Mapping[str, Any] | None = None
    steps_per_s: list[float] = field(default_factory=list)
    problem: str | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.steps_per_s)


def measure(
    env: Any,
    num_envs: int,
    *,
    num_workers: int | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    rounds: int = 5,
    seconds: float = 1.0,
) -> list[Measured]:
    """Steps `num_envs` of `env` by random actions: Muster's ways, then Gymnasium's.

    seconds: for each way in each of the rounds, so that all of them meet the machine in the same states.
    What a way raises is its problem, and does not stop the others.
    """
    measured: list[Measured] = []
    runs: list[Callable[[float], float] | None] = []
    with contextlib.ExitStack() as opened:
        for way, options, make in _ways(env, num_envs, num_workers, env_kwargs):
            problem = None
            try:
                envs = make()
                opened.callback(_close, envs)
                run = warmed_up(envs)
            except Exception as error:
                problem = f"{type(error).__name__}: {error}"
            measured.append(Measured(way, options, problem=problem))
            runs.append(run if problem is None else None)
        for _ in range(rounds):
            for i, timed in enumerate(runs):
                if timed is None:
                    continue
                try:
                    measured[i].steps_per_s.append(timed(seconds))
                except Exception as error:
                    measured[i] = Measured(measured[i].way, problem=f"{type(error).__name__}: {error}")
                    runs[i] = None
    return measured


def _ways(
    env: Any, num_envs: int, num_workers: int | None, env_kwargs: Mapping[str, Any] | None
) -> list[tuple[str, Mapping[str, Any] | None, Callable[[], Any]]]:
    """Name, options and how it is made, of each way."""
    given: dict[str, Any] = {"env_kwargs": env_kwargs} if env_kwargs else {}
    workers = {} if num_workers is None else {"num_workers": num_workers}
    ours: list[tuple[str, dict[str, Any]]] = [
        ('backend="serial"', {"backend": "serial"}),
        ("processes", workers),
        ("caller_steps=True", {**workers, "caller_steps": True}),
    ]
    factory = functools.partial(gym.make, env) if isinstance(env, str) else env
    factories: Sequence[Any] = [functools.partial(factory, **(env_kwargs or {}))] * num_envs
    return [
        *(
            (f"muster {way}", given | own, functools.partial(make_vec, env, num_envs, **given, **own))
            for way, own in ours
        ),
        ("gymnasium SyncVectorEnv", None, functools.partial(gym.vector.SyncVectorEnv, factories)),
        ("gymnasium AsyncVectorEnv", None, functools.partial(gym.vector.AsyncVectorEnv, factories)),
    ]


def warmed_up(envs: Any) -> Callable[[float], float]:
    """Steps `envs`, which this resets, by random actions for the seconds that it is given: env steps a second."""
    envs.action_space.seed(0)
    run = functools.partial(_steps_per_s, envs, [envs.action_space.sample() for _ in range(_NUM_ACTIONS)])
    envs.reset(seed=0)
    run(_WARM_UP_S)
    return run


def _steps_per_s(envs: Any, actions: Sequence[Any], seconds: float) -> float:
    to_take = itertools.cycle(actions)
    steps, start = 0, time.perf_counter()
    now = start
    while now < start + seconds:
        envs.step(next(to_take))
        steps += 1
        now = time.perf_counter()
    return steps * int(envs.num_envs) / (now - start)


def _close(envs: Any) -> None:
    with contextlib.suppress(Exception):  # it may have failed, and have been told of
        envs.close()


def code_of_options(options: Mapping[str, Any]) -> list[str]:
    """Keyword arguments as one writes them."""
    return [f"{key}={json.dumps(value) if isinstance(value, str) else repr(value)}" for key, value in options.items()]
