"""`Collector` and `MultiCollector`: arguments, policies, and events while they collect."""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from agent_envs import Script
from gymnasium import spaces
from tensordict import TensorDict
from torch import nn

import muster
from muster.rollout import next_observations
from processes import wait_for_end
from situations.acting_envs import Counter, Doing, Observing, fail, hang, leave, leave_with_words
from situations.building import BOX
from situations.failing import STEP_TIMEOUT_S, oom_kills
from situations.recording import raised, situation, situations, warned

SERIAL = {"backend": "serial"}


def zeros(obs: Any) -> Any:
    return torch.zeros(len(obs), dtype=torch.int64)


class Net(nn.Module):
    def __init__(self, size: int = 1) -> None:
        super().__init__()
        self.last = nn.Linear(3, size)

    def forward(self, obs: Any) -> Any:
        return self.last(obs.float())[:, 0].long() * 0


def collector(env: Any = Counter, policy: Any = zeros, **options: Any) -> Any:
    """A collector of two envs in this process."""
    given = {"num_envs": 2, "frames_per_batch": 8, "make_vec_options": SERIAL, **options}
    return muster.Collector(env, policy, **{name: one for name, one in given.items() if one is not None})


def collectors(env: Any = Doing, policy: Any = zeros, *, deeds: Any = None, **options: Any) -> Any:
    """Two collectors of two envs each; the last env does the deeds. Forked: else torch's import takes seconds."""
    own = {"env_kwargs": {"at": 3, **(deeds or {})}} if env is Doing else {}
    given = {"num_collectors": 2, "num_envs": 4, "frames_per_batch": 16, "context": "fork", "make_vec_options": own}
    return muster.MultiCollector(env, policy, **{**given, **options})


def rollout_of(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[[], Any]:
    def collect() -> None:
        with make(*args, **kwargs) as one:
            one.rollout()

    return collect


# ---- what they are given


def of_vector_env(**options: Any) -> Callable[[], Any]:
    def make() -> None:
        given = {"autoreset_mode": "same_step", **options.pop("vector_env", {})}
        with muster.make_vec(Counter, 2, **SERIAL, **given) as envs:
            collector(envs, **{"num_envs": None, "make_vec_options": None, **options})

    return make


def observing(space: spaces.Space[Any]) -> Any:
    return functools.partial(Observing, space)


situations(
    "collector",
    {
        "frames_per_batch of 0": lambda: collector(frames_per_batch=0),
        "frames_per_batch of no int": lambda: collector(frames_per_batch=2.5),
        "a negative seed": lambda: collector(seed=-1),
        "max_frames_per_traj of 0": lambda: collector(max_frames_per_traj=0),
        "a policy and a factory": lambda: collector(policy_factory=Net),
        "a policy that raises while it is built": lambda: collector(policy=None, policy_factory=fail),
        "compact and split_trajs": lambda: collector(compact=True, split_trajs=True),
        "compact and a replay buffer": lambda: collector(compact=True, replay_buffer=[]),
        "num_envs of a vector env": of_vector_env(num_envs=3),
        "a vector env that resets nothing": of_vector_env(vector_env={"autoreset_mode": "disabled"}),
        "overlap of a single env": lambda: collector(num_envs=1, overlap=True),
        "observations of no fixed shape": lambda: collector(observing(spaces.Sequence(spaces.Discrete(3)))),
        "observations with a key of the batch": lambda: collector(observing(spaces.Dict({"action": BOX}))),
        "an env that cannot be built": lambda: collector(functools.partial(Doing, build=fail)),
        "what make_vec refuses": lambda: collector(7),
    },
)


@situation("collector: Gymnasium's vector env that does not say how it resets")
def _() -> Iterator[Any]:
    envs = gym.vector.SyncVectorEnv([Counter])
    envs.metadata = {}
    yield raised(collector, envs, num_envs=None, make_vec_options=None)
    envs.close()


situations(
    "collectors",
    {
        "num_collectors of 0": lambda: collectors(num_collectors=0),
        "more collectors than envs": lambda: collectors(num_collectors=10**12),
        "a threshold beyond 1": lambda: collectors(preemptive_threshold=2.0),
        "a threshold without sync": lambda: collectors(preemptive_threshold=0.5, sync=False),
        "an option of make_vec that is not theirs": lambda: collectors(make_vec_options={"copy": False, **SERIAL}),
        "on_failure": lambda: collectors(on_failure="ignore"),
        "collect_timeout of 0": lambda: collectors(collect_timeout=0),
        "a lazy module": lambda: collectors(policy=nn.LazyLinear(3)),
    },
)


# ---- policies


def giving(outputs: Any) -> Callable[[Any], Any]:
    return lambda obs: outputs


class Reading:
    """A policy that reads one key of a TensorDict, and raises."""

    def __init__(self, key: str, *out_keys: Any) -> None:
        self.in_keys, self.out_keys = [key], ["action", *out_keys]

    def __call__(self, batch: Any) -> Any:
        raise LookupError("nothing there")


class ChangesItsMind:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, obs: Any) -> Any:
        self.calls += 1
        return {"action": zeros(obs), "value": torch.zeros(2, self.calls)}


STATE = {"h": torch.zeros(4)}

situations(
    "policy",
    {
        "no action": rollout_of(collector, policy=giving({"value": torch.zeros(2)})),
        "rows of the wrong number": rollout_of(collector, policy=giving(torch.zeros(3, dtype=torch.int64))),
        "an array": rollout_of(collector, policy=giving(np.zeros(2, np.int64))),
        "another shape than before": rollout_of(collector, policy=ChangesItsMind()),
        "a dtype that NumPy does not know": rollout_of(collector, policy=giving(torch.zeros(2, dtype=torch.bfloat16))),
        "an action out of range": rollout_of(collector, policy=giving(torch.full((2,), 9))),
        "a key that no env gives": rollout_of(collector, policy=Reading("pixels")),
        "a state without a first value": rollout_of(collector, policy=Reading("h", ("next", "h"))),
        "no state": rollout_of(collector, policy=lambda obs, state: zeros(obs), initial_state=STATE),
        "another state": rollout_of(collector, policy=lambda obs, state: (zeros(obs), {}), initial_state=STATE),
        "no dict of groups": rollout_of(collector, Script, zeros),
        "a group too few": rollout_of(collector, Script, giving({"a": torch.ones(2, 2, dtype=torch.int64)})),
        "that raises": rollout_of(collector, policy=lambda obs: fail()),
    },
)


@situation("weights: of another layout, name or kind")
def _() -> Iterator[Any]:
    with collector(policy=Net()) as one:
        good = Net().state_dict()
        for wrong in (
            {"last.weight": good["last.weight"]},
            {**good, "last.scale": torch.zeros(1)},
            {**good, "last.bias": torch.zeros(2)},
            {**good, "last.bias": 0.0},
            {**good, "last.bias": torch.zeros(1, dtype=torch.complex64)},
            {**good, "last.bias": torch.zeros(1, device="meta")},
            [torch.zeros(1)],
        ):
            yield raised(one.update_policy_weights_, wrong)
    with collector() as one:
        yield raised(one.update_policy_weights_, good)


# ---- while they collect


@situation("collecting: an env that raises")
def _() -> None:
    rollout_of(collector, Doing, make_vec_options={**SERIAL, "env_kwargs": {"step": fail}})()


@situation("collecting: an env that is restarted")
def _() -> Iterator[Any]:
    options = {**SERIAL, "env_kwargs": {"at": 1, "step": fail}, "on_failure": "restart"}
    with collector(Doing, frames_per_batch=4, make_vec_options=options) as one:
        yield from warned(one.rollout)


@situation("collecting: after shutdown, and a batch that is not compact")
def _() -> Iterator[Any]:
    with collector() as one:
        batch = one.rollout()
    yield raised(one.rollout)
    yield raised(next_observations, batch)


@situation("collecting: in another thread")
def _() -> Iterator[Any]:
    entered, leaves = threading.Event(), threading.Event()

    def wait(obs: Any) -> Any:
        entered.set()
        leaves.wait(30.0)
        return zeros(obs)

    with collector(policy=wait) as one:
        other = threading.Thread(target=one.rollout)
        other.start()
        entered.wait(30.0)
        yield raised(one.rollout)
        leaves.set()
        other.join(30.0)


@situation("collectors: an env that raises in a step")
def _() -> None:
    rollout_of(collectors, deeds={"step": fail})()


@situation("collectors: an env that raises in its reset")
def _() -> None:
    collectors(deeds={"reset": fail})


@situation("collectors: an env that cannot be built")
def _() -> None:
    collectors(deeds={"build": fail})


@situation("collectors: an env that ends its process, and what the next batch says")
def _() -> Iterator[Any]:
    with collectors(deeds={"step": leave_with_words}) as several:
        yield raised(several.rollout)
        yield raised(several.rollout)


@situation("collectors: an env that ends its process while it is built")
def _() -> None:
    collectors(deeds={"build": leave})


@situation("collectors: one that is killed between two batches")
def _() -> Iterator[Any]:
    with collectors() as several, oom_kills(0):
        several.rollout()
        pid = several.stats()["collectors"]["workers"][1]["pid"]
        os.kill(pid, signal.SIGKILL)
        wait_for_end(pid)
        yield raised(several.rollout)


@situation("collectors: collect_timeout")
def _() -> None:
    rollout_of(collectors, deeds={"step": hang}, collect_timeout=STEP_TIMEOUT_S)()


@situation("collectors: start_timeout")
def _() -> None:
    collectors(deeds={"build": hang}, start_timeout=1.0)


def fails_later(obs: Any) -> Any:
    if (obs[:, 2] == 2).any() and muster.get_worker_info().worker_index == 0:
        raise ZeroDivisionError("no action is good enough")
    return zeros(obs)


situations(
    "policy in collectors",
    {
        "that raises": rollout_of(collectors, policy=fails_later),
        "that raises at once": rollout_of(collectors, policy=lambda obs: fail()),
        "no action": rollout_of(collectors, policy=giving({"value": torch.zeros(2)})),
        "an action out of range": rollout_of(collectors, policy=giving(torch.full((2,), 9))),
        "of a factory that raises": lambda: collectors(policy=None, policy_factory=fail),
        "of a factory that cannot travel": lambda: collectors(
            policy=None, policy_factory=functools.partial(Net, threading.Lock()), context="forkserver"
        ),
        "of factories that build different ones": lambda: collectors(
            policy=None, policy_factory=lambda: Net(1 + muster.get_worker_info().worker_index)
        ),
    },
)


class HoldsLock(Net):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class AsksToStay(Net):
    uncopyable = "drives the arm over USB"


@situation("policy in collectors: that cannot be copied, or asks to stay")
def _() -> Iterator[Any]:
    for policy in (HoldsLock(), AsksToStay()):
        yield from warned(lambda policy=policy: collectors(policy=policy, preemptive_threshold=0.5).shutdown())
    yield raised(muster.rebuild_with, HoldsLock, 3)
    yield raised(muster.rebuild_with, 3, HoldsLock)


@situation("weights: for collectors whose policy has none, or others")
def _() -> Iterator[Any]:
    with collectors() as several:
        yield raised(several.update_policy_weights_)
        yield raised(several.update_policy_weights_, Net())
    with collectors(policy=None, policy_factory=Net) as several:
        yield raised(several.update_policy_weights_)
        yield raised(several.update_policy_weights_, {"last.weight": torch.zeros(1, 3)})
        yield raised(several.update_policy_weights_, TensorDict({"last": {"bias": torch.zeros(1)}}))


# ---- restarts


@situation("restart in collectors: after a raise in a step")
def _() -> Iterator[Any]:
    with collectors(deeds={"step": fail}, on_failure="restart", frames_per_batch=8) as several:
        yield from warned(several.rollout)


@situation("restart in collectors: after a death")
def _() -> Iterator[Any]:
    with collectors(deeds={"step": leave}, on_failure="restart") as several:
        yield from warned(several.rollout)


@situation("restart in collectors: after a timeout")
def _() -> Iterator[Any]:
    options = {"on_failure": "restart", "collect_timeout": STEP_TIMEOUT_S}
    with collectors(deeds={"step": hang}, **options) as several:
        yield from warned(several.rollout)


@situation("restart in collectors: after a policy that raised")
def _() -> Iterator[Any]:
    with collectors(policy=fails_later, on_failure="restart", num_collectors=1, num_envs=1) as several:
        yield from warned(several.rollout)


situations(
    "restart in collectors: too often",
    {
        name: rollout_of(collectors, on_failure="restart", max_restarts=0, **options)
        for name, options in {
            "by raising": {"deeds": {"step": fail}},
            "by raising in a reset": {"deeds": {"reset": fail}},
            "by dying": {"deeds": {"step": leave}},
            "by policies that raise": {"policy": fails_later, "num_collectors": 1, "num_envs": 1},
        }.items()
    },
)
