"""Steps, resets and calls of vector envs that exist: arguments, results, and the order of calls."""

from __future__ import annotations

import copy
import functools
import os
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from agent_envs import Script
from gymnasium import spaces

import muster
from sample_envs import Returning
from situations.acting_envs import Counter, Doing, NotRebuilt, Observing, Unasked, fail, give_lock
from situations.failing import ACTIONS, play, two_envs
from situations.recording import raised, situation, situations

OBS = np.zeros(3, np.float32)


def stepping(actions: Any, action_space: spaces.Space[Any] | None = None) -> Callable[[], Any]:
    def step() -> None:
        space = spaces.Discrete(3) if action_space is None else action_space
        with two_envs("serial", env=functools.partial(Observing, spaces.Discrete(2), space)) as envs:
            envs.reset()
            envs.step(actions)

    return step


PAIR = spaces.Dict({"move": spaces.Discrete(4), "push": spaces.Box(-1, 1, (2,), np.float32)})

situations(
    "action",
    {
        "too few": stepping(np.zeros(1, np.int64)),
        "too many": stepping(np.zeros(3, np.int64)),
        "an axis too many": stepping(np.zeros((2, 1), np.int64)),
        "floats": stepping(np.zeros(2)),
        "too high": stepping(np.array([0, 3])),
        "too low": stepping(np.array([-1, 0])),
        "None": stepping(None),
        "words": stepping(["left", "right"]),
        "a box's shape": stepping(np.zeros((2, 3), np.float32), PAIR["push"]),
        "complex numbers": stepping(np.zeros((2, 2), np.complex64), PAIR["push"]),
        "several numbers out of range": stepping([[0, 2], [3, 0]], spaces.MultiDiscrete([2, 3])),
        "no dict": stepping([0, 1], PAIR),
        "a key too few": stepping({"move": [0, 1]}, PAIR),
        "a part of a wrong shape": stepping({"move": [0, 1], "push": np.zeros(2)}, PAIR),
        "too few for a tuple": stepping(([0, 1],), spaces.Tuple(tuple(PAIR.values()))),
    },
)


def of_agents(actions: Any) -> Callable[[], Any]:
    def step() -> None:
        with muster.make_vec(Script, 2, backend="serial") as envs:
            envs.reset()
            envs.step(actions)

    return step


situations(
    "actions of agents",
    {
        "no dict": of_agents(np.ones((2, 3), np.int64)),
        "other groups": of_agents({"a": np.ones((2, 2), np.int64), "c": np.ones((2, 1), np.int64)}),
        "another number of agents": of_agents({"a": np.ones((2, 3), np.int64), "b": np.ones((2, 1), np.int64)}),
        "out of range": of_agents({"a": np.full((2, 2), 9), "b": np.ones((2, 1), np.int64)}),
        "floats": of_agents({"a": np.ones((2, 2)), "b": np.ones((2, 1), np.int64)}),
    },
)


@situation("env_ids: whatever is wrong with them")
def _() -> Iterator[Any]:
    with two_envs("serial") as envs:
        envs.reset()
        for ids in ([2], [-1], [0, 0], [], [0.5], [[0]], "0"):
            yield raised(envs.send, np.zeros(len(ids), np.int64), ids)
        yield raised(envs.send, [0, 0], [1])


# ---- what envs give


def returning(**wrong: Any) -> Callable[[], Any]:
    def step() -> None:
        with muster.make_vec(functools.partial(Returning, **wrong), 1, backend="serial", check_finite=True) as envs:
            play_one(envs)

    return step


def doing(moment: str, result: Any, env: Any = Doing) -> Callable[[], Any]:
    def step() -> None:
        with muster.make_vec(functools.partial(env, **{moment: lambda: result}), 1, backend="serial") as envs:
            play_one(envs)

    return step


def play_one(envs: Any) -> None:
    envs.reset(seed=0)
    envs.step(np.zeros(1, np.int64))
    envs.step(np.zeros(1, np.int64))


situations(
    "result",
    {
        "an observation's shape": returning(obs=np.zeros(4, np.float32)),
        "an observation's dtype": returning(obs=np.zeros(3, np.complex64)),
        "an observation that is text": returning(obs="three numbers"),
        "an observation that is not finite": returning(obs=np.full(3, np.nan, np.float32)),
        "a reward of None": returning(reward=np.array([None])),
        "a reward of two numbers": returning(reward=np.zeros(2)),
        "a reward that is not finite": returning(reward=float("inf")),
        "terminated that is no flag": returning(terminated="no"),
        "a step of four": doing("step", (OBS, 0.0, False, {})),
        "a step that is no tuple": doing("step", "done"),
        "an info that is no dict": doing("step", (np.zeros(3), 0.0, False, False, ["info"])),
        "a reset of an observation alone": doing("reset", OBS),
        "a reset that takes no seed": lambda: play_one(muster.make_vec(Unasked, 1, backend="serial")),
    },
)


@situation("result: keys of an observation")
def _() -> None:
    env = functools.partial(Doing, reset=lambda: ({"x": 0}, {}))

    def make_env() -> Any:
        made = env()
        made.observation_space = spaces.Dict({"x": spaces.Discrete(2), "y": spaces.Discrete(2)})
        return made

    muster.make_vec(make_env, 1, backend="serial").reset()


@situation("result: an info that cannot be sent")
def _() -> None:
    with two_envs(step=give_lock) as envs:
        play(envs)


class ResetsAsBefore(Script):
    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return super().reset(seed, options)[0]


class StepsAsBefore(Script):
    def step(self, actions: dict[str, Any]) -> Any:
        obs, rewards, dones, _, infos = super().step(actions)
        return obs, rewards, dones, infos


class GivesLists(Script):
    def step(self, actions: dict[str, Any]) -> Any:
        obs, *rest = super().step(actions)
        return list(obs.values()), *rest


class EarnsArrays(Script):
    def step(self, actions: dict[str, Any]) -> Any:
        obs, rewards, *rest = super().step(actions)
        return obs, rewards | {"b_0": np.ones(1)}, *rest


class BringsStrangers(Script):
    def step(self, actions: dict[str, Any]) -> Any:
        result = super().step(actions)
        self.agents = [*self.agents, "z_9"]
        return tuple(one | {"z_9": one["a_0"]} for one in result)


class ObservesMore(Script):
    def _obs(self, agent: str) -> Any:
        return np.zeros(5, np.float32)


class Telling(Script):
    """Gives agent b_0's entry in the dict number `which` of ``step``, or of ``reset``, to `key`; to nobody if None."""

    def __init__(self, call: str, which: int, key: Any) -> None:
        super().__init__()
        self.call, self.which, self.key = call, which, key

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        return self._told("reset", super().reset(seed, options))

    def step(self, actions: dict[str, Any]) -> Any:
        result = super().step(actions)
        if self.which == 2:  # b_0 ends
            self.agents = ["a_0", "a_1"]
        return self._told("step", result)

    def _told(self, call: str, result: Any) -> Any:
        if call == self.call:
            entry = result[self.which].pop("b_0")
            result[self.which].update({} if self.key is None else {self.key: entry})
        return result


def telling(call: str, which: int, key: Any = None) -> Callable[[], Any]:
    return playing_agents(functools.partial(Telling, call, which, key))


class TellsNobody(Script):
    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed, options)
        return {}, {}


class MasksStrangers(Script):
    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        obs, _ = super().reset(seed, options)
        return obs, {"b": {"action_mask": np.ones(3, np.int8)}}


def playing_agents(env: Any) -> Callable[[], Any]:
    def play() -> None:
        with muster.make_vec(env, 1, backend="serial") as envs:
            envs.reset(seed=0)
            envs.step({"a": np.ones((1, 2), np.int64), "b": np.ones((1, 1), np.int64)})

    return play


situations(
    "result of agents",
    {
        "a reset of observations alone": playing_agents(ResetsAsBefore),
        "a step of four": playing_agents(StepsAsBefore),
        "observations in a list": playing_agents(GivesLists),
        "a reward that is an array": playing_agents(EarnsArrays),
        "an agent that nobody has named": playing_agents(BringsStrangers),
        "observations of a reset by index": telling("reset", 0, 2),
        "observations of a reset without an agent": telling("reset", 0),
        "a reset that shows nobody anything": playing_agents(TellsNobody),
        "rewards with a misspelt name": telling("step", 1, "b_O"),
        "rewards without an agent": telling("step", 1),
        "observations without an agent": telling("step", 0),
        "an agent that leaves without an end": telling("step", 2),
        "a mask for nobody": playing_agents(MasksStrangers),
        "an observation's shape": playing_agents(ObservesMore),
    },
)

# ---- envs that raise


@situation("raised: in a step, and the same in a worker")
def _() -> Iterator[Any]:
    for backend in ("serial", "process"):
        with two_envs(backend, step=fail) as envs:
            yield raised(play, envs)


@situation("raised: in a reset")
def _() -> Iterator[Any]:
    with two_envs("serial", reset=fail) as envs:
        yield raised(envs.reset)


@situation("raised: by several envs in the same step")
def _() -> None:
    with muster.make_vec(Doing, 2, backend="serial", env_kwargs=[{"step": fail}, {"at": 1, "step": fail}]) as envs:
        play(envs)


@situation("raised: sys.exit in a step of a worker")
def _() -> None:
    with two_envs(step=functools.partial(sys.exit, 3)) as envs:
        play(envs)


@situation("raised: in a call, an attribute, a function and close")
def _() -> Iterator[Any]:
    with two_envs("serial", close=fail) as envs:
        envs.reset()
        yield raised(envs.call, "do", "close")
        yield raised(envs.get_attr, "no_such_thing")
        yield raised(envs.call, lambda env, index: 1 // index)
        yield raised(envs.close)


# ---- order of calls


@situation("order: before the first reset")
def _() -> Iterator[Any]:
    with two_envs("serial") as envs:
        for call in (lambda: envs.step(ACTIONS), lambda: envs.send([0], [1]), lambda: envs.step_async(ACTIONS)):
            yield raised(call)


@situation("order: nothing to wait for")
def _() -> Iterator[Any]:
    with two_envs("serial") as envs:
        envs.reset()
        for call in (envs.recv, envs.step_wait, envs.reset_wait, envs.call_wait):
            yield raised(call)


@situation("order: a step is pending, or a part of one, or a call")
def _() -> Iterator[Any]:
    with two_envs("serial") as envs:
        envs.reset()
        calls = (
            lambda: envs.step(ACTIONS),
            lambda: envs.step_async(ACTIONS),
            lambda: envs.send(ACTIONS),
            lambda: envs.send([0], [1]),
            envs.reset,
            lambda: envs.call("count"),
            lambda: envs.set_attr("x", 1),
        )
        envs.send(ACTIONS)
        for call in calls:
            yield raised(call)
        yield raised(envs.recv, min_envs=3)
        yield raised(envs.recv, min_envs=0)
        envs.recv()
        envs.call_async("count")
        for call in calls:
            yield raised(call)
        envs.call_wait()


@situation("order: after close")
def _() -> Iterator[Any]:
    with two_envs("serial") as envs:
        envs.reset()
        envs.close()
        for call in (lambda: envs.step(ACTIONS), envs.reset, envs.recv, lambda: envs.call("count"), envs.stats):
            yield raised(call)


@situation("order: in a process that was forked from the caller")
def _() -> Iterator[Any]:
    with two_envs("serial") as envs:
        envs.reset()
        reading, writing = os.pipe()
        if (pid := os.fork()) == 0:
            try:
                os.write(writing, f"ClosedError: {raised(envs.step, ACTIONS)}".encode())
            finally:
                os._exit(0)
        os.close(writing)
        with open(reading) as pipe:
            yield pipe.read()
        os.waitpid(pid, 0)


@situation("order: another thread is stepping")
def _() -> Iterator[Any]:
    entered, leaves = threading.Event(), threading.Event()

    def wait() -> None:
        entered.set()
        leaves.wait(30.0)

    with two_envs("thread", step=wait) as envs:
        other = threading.Thread(target=play, args=(envs,))
        other.start()
        entered.wait(30.0)
        yield raised(envs.step, ACTIONS)
        leaves.set()
        other.join(30.0)


@situation("order: episodes that ended, with autoreset disabled")
def _() -> Iterator[Any]:
    with two_envs("serial", env=Counter, env_kwargs={"length": 2}, autoreset_mode="disabled") as envs:
        play(envs)
        yield raised(envs.step, ACTIONS)


# ---- arguments


@situation("argument: seeds")
def _() -> Iterator[Any]:
    with two_envs("serial") as envs:
        for seed in (-1, [1], [1, 2, 3], "one", 1.5, [1, "two"], [1, -2], True):
            yield raised(envs.reset, seed=seed)


@situation("argument: options, and their mask")
def _() -> Iterator[Any]:
    with two_envs("serial") as envs:
        yield raised(envs.reset, options=3)
        for mask in ([True, False], np.ones(3, bool), np.ones(2), np.zeros(2, bool)):
            yield raised(envs.reset, options={"reset_mask": mask})


@situation("argument: min_envs and timeouts")
def _() -> Iterator[Any]:
    with two_envs("serial") as envs:
        envs.reset()
        envs.send(ACTIONS)
        for wrong in ("a", 1.5, True):
            yield raised(envs.recv, min_envs=wrong)
        for wrong in ("soon", float("nan"), True, [1]):
            yield raised(envs.recv, timeout=wrong)
        yield raised(envs.step_wait, timeout="soon")
        yield raised(envs.close, timeout="soon")


@situation("argument: what is called, and values to set")
def _() -> Iterator[Any]:
    with two_envs("serial") as envs:
        envs.reset()
        yield raised(envs.call, 3)
        yield raised(envs.set_attr, "thing", [1, 2, 3])


@situation("argument: objects that cannot be sent to envs that run")
def _() -> Iterator[Any]:
    with two_envs(close=NotRebuilt) as envs:
        envs.reset()
        lock = threading.Lock()
        yield raised(envs.call, "do", "step", lock)
        yield raised(envs.call, "do", moment="step", otherwise=lock)
        yield raised(envs.call, lambda env, index: lock)
        yield raised(envs.set_attr, "thing", {"deep": lock})
        yield raised(envs.reset, options={"lock": lock})
        yield raised(envs.call, lambda env, index: threading.Lock())
        yield raised(envs.call, "do", "close")


@situation("argument: a vector env that is pickled or copied")
def _() -> Iterator[Any]:
    with two_envs("serial") as envs, muster.make_vec(Script, 1, backend="serial") as agents:
        yield raised(pickle.dumps, envs)
        yield raised(copy.deepcopy, envs)
        yield raised(pickle.dumps, agents)
