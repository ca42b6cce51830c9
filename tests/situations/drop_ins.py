"""The drop-ins for Gymnasium, Stable-Baselines3 and TorchRL, in the words of the originals where these have any."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
from agent_envs import Script
from gymnasium import spaces

import muster
from muster.interop import sb3, torchrl
from muster.interop.gymnasium import AsyncVectorEnv, SyncVectorEnv
from situations.acting_envs import Counter, Doing, FullHouse, Observing, fail, kill, leave, leave_with_words, nap
from situations.building import BOX
from situations.failing import ACTIONS, oom_kills
from situations.recording import raised, situation, situations, warned

SERIAL = {"backend": "serial"}


def fns(*envs: Any, **deeds: Any) -> list[Any]:
    """The env functions of `envs`, or of two envs, of which the second one does the deeds."""
    return list(envs) or [functools.partial(Doing, at=1, **deeds)] * 2


def asynchronous(*envs: Any, **options: Any) -> Any:
    deeds = {name: options.pop(name) for name in ("build", "reset", "step", "close") if name in options}
    return AsyncVectorEnv(fns(*envs, **deeds), **{"num_workers": 1, **options})


def subprocesses(*envs: Any, **deeds: Any) -> Any:
    return sb3.SubprocVecEnv(fns(*envs, **deeds), num_workers=1)


def playing(make: Callable[..., Any], *envs: Any, **deeds: Any) -> Callable[[], Any]:
    def run() -> Iterator[Any]:
        made = make(*envs, **deeds)
        try:
            with oom_kills(0):
                yield from warned(play_with, made)
        finally:
            made.close()

    return run


def play_with(envs: Any) -> None:
    envs.reset()
    envs.step(ACTIONS)
    envs.step(ACTIONS)


def of_class(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[[], Any]:
    return lambda: iter(warned(make, *args, **kwargs))


def observing(*observed: spaces.Space[Any]) -> list[Any]:
    return [functools.partial(Observing, space) for space in observed]


WIDER = spaces.Box(-2, 2, (3,), np.float32)
LONGER = spaces.Box(-1, 1, (4,), np.float32)
CHOSEN = (BOX, spaces.Box(-1, 1, (2, 3), np.float32))
ACTING = [functools.partial(Observing, BOX, spaces.Discrete(n)) for n in (3, 4)]


situations(
    "AsyncVectorEnv",
    {
        "an env that cannot be built": of_class(asynchronous, build=fail),
        "an env that ends its process while it is built": of_class(AsyncVectorEnv, fns(build=leave), num_workers=2),
        "an env that raises in a reset": playing(asynchronous, reset=fail),
        "an env that raises in a step": playing(asynchronous, step=fail),
        "an env that ends its process": playing(asynchronous, step=leave_with_words),
        "an env that is killed": playing(asynchronous, step=kill),
        "observations that are not equal": of_class(asynchronous, *observing(BOX, WIDER)),
        "observations of other shapes": of_class(asynchronous, *observing(BOX, LONGER), observation_mode=CHOSEN),
        "actions that are not equal": of_class(asynchronous, *ACTING),
        "an observation_mode": of_class(asynchronous, observation_mode="any"),
        "max_concurrency of 0": of_class(asynchronous, max_concurrency=0),
        "max_concurrency of no int": of_class(asynchronous, max_concurrency="many"),
        "a custom worker and num_workers": of_class(asynchronous, worker=print),
        "num_workers of 0": of_class(asynchronous, num_workers=0),
        "no env": of_class(AsyncVectorEnv, []),
        "an env in place of a function": of_class(AsyncVectorEnv, [Counter()]),
        "a lock in a function": of_class(asynchronous, functools.partial(Counter, length=threading.Lock())),
        "a function that returns nothing": of_class(asynchronous, lambda: None),
    },
)


@situation("AsyncVectorEnv: envs that cannot share a process")
def _() -> Iterator[Any]:
    yield from warned(lambda: asynchronous(FullHouse, FullHouse).close())


@situation("AsyncVectorEnv: calls out of order, and timeouts")
def _() -> Iterator[Any]:
    envs = asynchronous(step=nap, reset=nap, close=nap)
    yield raised(envs.step_wait)
    yield raised(envs.reset_wait)
    envs.reset_async()
    yield raised(envs.reset_wait, timeout=0.01)
    yield raised(envs.step_async, ACTIONS)
    yield raised(envs.step, ACTIONS)
    envs.reset_wait()
    envs.step(ACTIONS)
    envs.step_async(ACTIONS)
    yield raised(envs.step_wait, timeout=0.01)
    yield raised(envs.call_async, "count")
    yield raised(envs.set_attr, "count", 1)
    envs.step_wait()
    envs.call_async("do", "close")
    yield raised(envs.call_wait, timeout=0.01)
    yield raised(envs.reset)
    envs.call_wait()
    envs.step_async(ACTIONS)
    yield from warned(envs.close)


def misuse(envs: Any) -> Iterator[Any]:
    yield raised(envs.reset, seed=[1, 2, 3])
    for mask in ([True, False], np.ones(3, bool), np.ones(2), np.zeros(2, bool)):
        yield raised(envs.reset, options={"reset_mask": mask})
    envs.reset()
    yield raised(envs.set_attr, "count", [1, 2, 3])
    yield raised(envs.step, [0])
    yield raised(envs.step, 0)
    envs.close()
    yield raised(envs.step, ACTIONS)
    yield raised(envs.reset)


situations(
    "SyncVectorEnv",
    {
        "an env that cannot be built": of_class(SyncVectorEnv, fns(build=fail)),
        "an env that raises in a step": playing(lambda **deeds: SyncVectorEnv(fns(**deeds)), step=fail),
        "observations that are not equal": of_class(SyncVectorEnv, observing(BOX, WIDER)),
        "observations of other shapes": of_class(SyncVectorEnv, observing(BOX, LONGER), observation_mode=CHOSEN),
        "actions that are not equal": of_class(SyncVectorEnv, ACTING),
        "arguments that are wrong, and after close": lambda: misuse(SyncVectorEnv([Counter, Counter])),
        "episodes that ended, with autoreset disabled": playing(
            lambda *envs: SyncVectorEnv(envs, autoreset_mode=gym.vector.AutoresetMode.DISABLED),
            *[functools.partial(Counter, length=1)] * 2,
        ),
    },
)
situation("AsyncVectorEnv: arguments that are wrong, and after close")(lambda: misuse(asynchronous(Counter, Counter)))


# ---- Stable-Baselines3

situations(
    "SubprocVecEnv",
    {
        "an env that cannot be built": of_class(subprocesses, build=fail),
        "an env that raises in a reset": playing(subprocesses, reset=fail),
        "an env that raises in a step": playing(subprocesses, step=fail),
        "an env that ends its process": playing(subprocesses, step=leave_with_words),
        "observations of other shapes": of_class(subprocesses, *observing(BOX, LONGER)),
        "a lock in a function": of_class(subprocesses, functools.partial(Counter, length=threading.Lock())),
        "a start_method": of_class(sb3.SubprocVecEnv, fns(), start_method="thread"),
        "no env": of_class(sb3.SubprocVecEnv, []),
    },
)

situations(
    "DummyVecEnv",
    {
        "an env that cannot be built": of_class(sb3.DummyVecEnv, fns(build=fail)),
        "an env that raises in a step": playing(lambda **deeds: sb3.DummyVecEnv(fns(**deeds)), step=fail),
        "an env twice": of_class(sb3.DummyVecEnv, [functools.lru_cache(lambda: Counter())] * 2),
    },
)


@situation("SubprocVecEnv: calls and actions that are wrong, and after close")
def _() -> Iterator[Any]:
    envs = subprocesses(Counter, Counter)
    envs.reset()
    yield raised(envs.step_wait)
    yield raised(envs.step, [0])
    yield raised(envs.get_attr, "no_such_thing")
    yield raised(envs.env_method, "no_such_thing")
    yield raised(envs.set_attr, "length", threading.Lock())
    envs.step_async(ACTIONS)
    yield raised(envs.step_async, ACTIONS)
    envs.step_wait()
    envs.close()
    yield raised(envs.step, ACTIONS)


@situation("as_sb3, make_vec_env: what they do not take")
def _() -> Iterator[Any]:
    yield raised(sb3.make_vec_env, 3)
    for env, options in ((Script, {}), (Counter, {}), (Counter, {"autoreset_mode": "same_step", "copy": False})):
        with muster.make_vec(env, 2, **SERIAL, **options) as envs:
            yield raised(sb3.as_sb3, envs)


# ---- TorchRL


def parallel(*envs: Any, **deeds: Any) -> Any:
    """Forked: else the import of TorchRL takes seconds."""
    return torchrl.ParallelEnv(2, fns(*envs, **deeds), num_processes=1, mp_start_method="fork")


@situation("as_torchrl: what it does not take")
def _() -> Iterator[Any]:
    yield raised(torchrl.as_torchrl, gym.make("CartPole-v1"))
    pair = functools.partial(Observing, spaces.Tuple((BOX, BOX)))
    same_step = {"autoreset_mode": "same_step"}
    for env, options in ((Counter, {}), (Counter, {**same_step, "copy": False}), (pair, same_step)):
        with muster.make_vec(env, 2, **SERIAL, **options) as envs:
            yield raised(torchrl.as_torchrl, envs)


def rolling(**deeds: Any) -> Callable[[], Any]:
    def run() -> Iterator[Any]:
        env = parallel(**deeds)
        yield raised(env.rollout, 3)
        env.close(raise_if_closed=False)

    return run


situations(
    "ParallelEnv",
    {
        "functions of the wrong number": of_class(torchrl.ParallelEnv, 3, fns()),
        "an env that cannot be built": of_class(parallel, build=fail),
        "an env that raises in a step": rolling(step=fail),
        "an env that ends its process": rolling(step=leave),
        "a function that returns no env": of_class(parallel, dict, dict),
    },
)


@situation("ParallelEnv: attributes that envs do not have, and TorchRL's own env for make_vec")
def _() -> Iterator[Any]:
    from torchrl.envs.libs.gym import GymEnv

    env = parallel(Counter, Counter)
    env.reset()
    yield raised(lambda: env.no_such_thing())
    env.close()
    yield raised(muster.make_vec, lambda: GymEnv("CartPole-v1"), 1, **SERIAL)
