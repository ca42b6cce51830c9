"""Speeds of the ways to run many of an env, measured in turns on this machine."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym

from muster.recipes.recipe import Recipe
from muster.vector.make import make_vec
from muster.vector.multi_agent import MultiAgentVectorEnv
from muster.vector.vector_env import VectorEnv

Wrappers = Sequence[Callable[[Any], Any]]

_WARM_UP_S = 0.1
_NUM_ACTIONS = 64


@dataclass
class Measured:
    """One way to run the envs.

    way: its name in the table.  steps_per_s: env steps a second of all envs together, a figure for each round.
    options: those of `make_vec`; None where the way is Gymnasium's.  problem: the exception that has ended it.
    """

    way: str
    options: Mapping[str, Any] | None = None
    steps_per_s: list[float] = field(default_factory=list)
    problem: str | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.steps_per_s)

    @contextlib.contextmanager
    def tried(self) -> Iterator[None]:
        """Encloses code of the envs; what it raises is the problem."""
        try:
            yield
        except (Exception, SystemExit) as error:
            self.problem = f"{type(error).__name__}: {error}"


def measure(
    env: Any,
    num_envs: int,
    *,
    num_workers: int | None = None,
    env_kwargs: Mapping[str, Any] | None = None,
    wrappers: Wrappers = (),
    rounds: int = 5,
    seconds: float = 1.0,
) -> list[Measured]:
    """Steps `num_envs` of `env` by random actions: Muster's ways, then Gymnasium's.

    seconds: duration of each way's turn in each round. The ways take turns, so that changes in the machine's load reach
    all of them.
    An exception becomes the problem of the way that raised it, and does not stop the others.
    """
    measured: list[Measured] = []
    runs: dict[str, Callable[[float], float]] = {}
    with contextlib.ExitStack() as opened, warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"gymnasium\.")  # tracebacks: the problem is reported here
        for way, options, make in _ways(env, num_envs, num_workers, env_kwargs, wrappers):
            measured.append(Measured(way, options))
            with measured[-1].tried():
                envs = make()
                opened.callback(_close, envs)
                runs[way] = warmed_up(envs)
        for _ in range(rounds):
            for one in measured:
                if one.problem is None:
                    with one.tried():
                        one.steps_per_s.append(runs[one.way](seconds))
    return measured


def _ways(
    env: Any, num_envs: int, num_workers: int | None, env_kwargs: Mapping[str, Any] | None, wrappers: Wrappers
) -> list[tuple[str, Mapping[str, Any] | None, Callable[[], Any]]]:
    """Each way as (name, options, function that makes its vector env)."""
    shared: dict[str, Any] = {"env_kwargs": env_kwargs} if env_kwargs else {}
    workers = {} if num_workers is None else {"num_workers": num_workers}
    ours: list[tuple[str, dict[str, Any]]] = [
        ('backend="serial"', {"backend": "serial"}),
        ("processes", workers),
        ("caller_steps=True", {**workers, "caller_steps": True}),
    ]
    make = functools.partial(make_vec, env, num_envs, wrappers=wrappers)
    factory = functools.partial(gym.make, env) if isinstance(env, str) else env
    factories: Sequence[Any] = [functools.partial(_wrapped, factory, env_kwargs or {}, wrappers)] * num_envs
    return [
        *((f"muster {way}", shared | own, functools.partial(make, **shared, **own)) for way, own in ours),
        ("gymnasium SyncVectorEnv", None, functools.partial(gym.vector.SyncVectorEnv, factories)),
        ("gymnasium AsyncVectorEnv", None, functools.partial(gym.vector.AsyncVectorEnv, factories)),
    ]


def _wrapped(factory: Callable[..., Any], env_kwargs: Mapping[str, Any], wrappers: Wrappers) -> Any:
    return functools.reduce(lambda env, wrapper: wrapper(env), wrappers, factory(**env_kwargs))


def warmed_up(envs: Any) -> Callable[[float], float]:
    """A function that steps `envs` by random actions for some seconds and returns env steps a second. Resets `envs`."""
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


def make_envs(recipe: Recipe, num_envs: int, **options: Any) -> VectorEnv | MultiAgentVectorEnv:
    """A vector env of `num_envs` envs of the recipe. options: those of `make_vec`."""
    return make_vec(recipe.factory, num_envs, env_kwargs=dict(recipe.kwargs), wrappers=recipe.wrappers, **options)


def _close(envs: Any) -> None:
    with contextlib.suppress(Exception):  # an env that failed is reported already
        envs.close()


def code_of_options(options: Mapping[str, Any]) -> list[str]:
    """Keyword arguments as they are written in a call."""
    return [f"{key}={json.dumps(value) if isinstance(value, str) else repr(value)}" for key, value in options.items()]
