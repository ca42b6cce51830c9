"""Ctrl-C, or a handler that raises, at every moment of a call: the vector env and the collector go on.

What begins or ends leaves nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import muster
from envs import Scripted
from interrupting import Interruption
from muster import MultiCollector
from muster.interop.gymnasium import AsyncVectorEnv
from muster.pickling.probe import attempt
from slow import slow

ACTIONS = np.zeros(4, np.int64)


class Echoing(Scripted):
    """Counts episodes and steps; tells of the latter in an info, and answers what it is asked."""

    def step(self, action: Any) -> Any:
        obs, reward, terminated, truncated, _ = super().step(action)
        return obs, reward, terminated, truncated, {"step": f"step {obs[2]:.0f}"}

    def echo(self, value: float) -> tuple[int, float]:
        return self.index, value


BACKENDS: dict[str, dict[str, Any]] = {
    "serial": {"backend": "serial"},
    "thread": {"backend": "thread", "num_workers": 2},
    "process": {"num_workers": 2},
    "restart": {"num_workers": 2, "on_failure": "restart"},
    "caller steps": {"num_workers": 2, "caller_steps": True},
}
SOME = {"reset_mask": np.array([True, False, True, False])}
# What is done before, and the call that is interrupted.
VERBS: dict[str, tuple[Callable[[Any], object], Callable[[Any], object]]] = {
    "step": (lambda envs: None, lambda envs: envs.step(ACTIONS)),
    "step_wait": (lambda envs: envs.step_async(ACTIONS), lambda envs: envs.step_wait()),
    "recv": (lambda envs: envs.send(ACTIONS), lambda envs: envs.recv()),
    "reset": (lambda envs: None, lambda envs: envs.reset()),
    "reset some": (lambda envs: None, lambda envs: envs.reset(options=SOME)),
    "call": (lambda envs: None, lambda envs: envs.call("echo", 1.0)),
    "call_wait": (lambda envs: envs.call_async("echo", 1.0), lambda envs: envs.call_wait()),
    "set_attr": (lambda envs: None, lambda envs: envs.set_attr("value", 1)),
    "step_async": (lambda envs: None, lambda envs: envs.step_async(ACTIONS)),
    "send": (lambda envs: None, lambda envs: envs.send(ACTIONS)),
    "reset_async": (lambda envs: None, lambda envs: envs.reset_async()),
    "call_async": (lambda envs: None, lambda envs: envs.call_async("echo", 1.0)),
}
CHOSEN, CHOSEN_FOR_EXCEPTIONS = ("step", "recv", "reset", "call", "step_async"), ("recv", "call_wait")


# An env that the caller steps reports an Exception as its own.
KINDS = {"serial": [KeyboardInterrupt], "caller steps": [KeyboardInterrupt]}


def is_slow(backend: str, verb: str, kind: type[BaseException]) -> bool:
    chosen = CHOSEN if kind is KeyboardInterrupt else CHOSEN_FOR_EXCEPTIONS
    return verb not in chosen or backend not in ("serial", "process", "drop-in")


@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize(
    ("backend", "verb", "kind"),
    [
        pytest.param(backend, verb, kind, marks=[pytest.mark.slow] * is_slow(backend, verb, kind))
        for backend, verb in itertools.product((*BACKENDS, "drop-in"), VERBS)
        for kind in KINDS.get(backend, [KeyboardInterrupt, TimeoutError])
    ],
)
def test_after_a_ctrl_c_at_any_moment_of_a_call_the_vector_env_goes_on(
    backend: str, verb: str, kind: type[BaseException]
) -> None:
    begin, call = VERBS[verb]
    made = AsyncVectorEnv([Echoing] * 4) if backend == "drop-in" else muster.make_vec(Echoing, 4, **BACKENDS[backend])
    with made as envs:
        envs.reset()
        begin(envs)
        call(envs)  # with all that is imported at the first call
        envs.drop_pending()
        for moment in itertools.count():
            envs.reset()
            begin(envs)
            interruption = Interruption(moment, kind)
            if not interruption.run(call, envs):
                break
            where = interruption.where
            if not interruption.ended:  # an env of the caller's reports it, or it was dropped
                with contextlib.suppress(kind):
                    envs.drop_pending()
            assert not envs.closed, where
            assert envs.reset()[0][:, 2].tolist() == [0, 0, 0, 0], where
            obs, *_, infos = envs.step(ACTIONS)
            assert obs[:, 2].tolist() == [1, 1, 1, 1], where
            assert infos["step"].tolist() == ["step 1"] * 4, where
            assert envs.call("echo", moment) == tuple((env, moment) for env in range(4)), where
        envs.drop_pending()
        assert moment > 3


def made_and_closed(options: dict[str, Any]) -> None:
    muster.make_vec(Echoing, 3, **options).close()


def closing(options: dict[str, Any]) -> Callable[[], object]:
    envs = muster.make_vec(Echoing, 3, **options)
    return lambda: envs.close()


LIVES: dict[str, Callable[[dict[str, Any]], Callable[[], object]]] = {
    "begins and ends": lambda options: lambda: made_and_closed(options),
    "ends": closing,
}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a file that is closed by its end
@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize("life", LIVES)
@pytest.mark.parametrize("how", ["fork", "serial", "thread", *slow("forkserver", "spawn", "caller steps")])
def test_after_a_ctrl_c_as_a_vector_env_begins_or_ends_nothing_is_left(how: str, life: str) -> None:
    options = BACKENDS.get(how, {"num_workers": 2, "context": how})
    made_and_closed(options)
    counting = Interruption(sys.maxsize)
    counting.run(LIVES[life](options))
    for moment in random.Random(0).sample(range(counting.num_moments), 4 if how == "spawn" else 8):
        Interruption(moment).run(LIVES[life](options))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # callbacks of weakrefs lose it
def test_after_a_ctrl_c_at_any_moment_of_a_pickling_its_thread_ends() -> None:
    before = set(threading.enumerate())
    attempt([], silence_s=5.0)  # with all that is imported at the first call
    for moment in itertools.count():
        interruption = Interruption(moment)
        if not interruption.run(lambda: attempt([], silence_s=5.0)):
            break
        late = time.monotonic() + 5.0
        while set(threading.enumerate()) - before:
            assert time.monotonic() < late, interruption.where
            time.sleep(0.0001)
    assert moment > 100


class Constant(torch.nn.Module):
    """Acts its one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.action = torch.nn.Parameter(torch.zeros(1))

    def forward(self, obs: torch.Tensor) -> torch.Tensor:
        return (obs[:, 0] * 0 + self.action).long()


ASKED: dict[str, Callable[[MultiCollector, dict[str, Any]], object]] = {
    "reset": lambda collector, _: collector.reset(),
    "load_state_dict": lambda collector, state: collector.load_state_dict(state),
    "rollout": lambda collector, _: collector.rollout(),
    "call": lambda collector, _: collector.call("echo", 1.0),
    "set_attr": lambda collector, _: collector.set_attr("value", 1),
}
BEGINS_ANEW = ("reset", "load_state_dict", "rollout")


def moments_before(asked: str, collector: MultiCollector, state: dict[str, Any]) -> int:
    """The moments before a call of the collector has reached its replicas: their number is the interpreter's."""
    reached: list[int] = []
    verbs = {"rollout": "collect", "call": "ask", "set_attr": "ask"}
    counting, verb = Interruption(sys.maxsize), verbs.get(asked, asked)
    with pytest.MonkeyPatch.context() as patch:
        original = getattr(collector._collectors, verb)

        def noted(*arguments: Any) -> object:
            reached.append(counting.num_moments - 1)
            return original(*arguments)

        patch.setattr(collector._collectors, verb, noted)
        counting.run(ASKED[asked], collector, state)
    return reached[0]


# In a finalizer, which gives back the memory of a batch, Python drops what is raised.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize("every", [43, *slow(5)])
@pytest.mark.parametrize("sync", [True, False])
@pytest.mark.parametrize("asked", ASKED)
def test_after_a_ctrl_c_in_a_multi_collector_the_next_rollout_is_right(asked: str, sync: bool, every: int) -> None:
    options: Any = {"num_collectors": 2, "frames_per_batch": 24, "sync": sync, "context": "fork"}
    with MultiCollector(Echoing, Constant(), num_envs=4, **options) as collector:
        collector.rollout()
        state = collector.state_dict()
        ASKED[asked](collector, state)
        for moment in itertools.count(moments_before(asked, collector, state), every):
            collector.call("echo", 1.0)  # batches that were begun are ready
            batches, interruption = collector.batches, Interruption(moment)
            if not interruption.run(ASKED[asked], collector, state):
                break
            is_whole = asked == "rollout" and collector.batches > batches  # only its return was interrupted
            steps = collector.rollout()["observation"][..., 2]
            assert asked not in BEGINS_ANEW or is_whole or not steps[:, 0].any(), interruption.where
            follows = (steps[:, 1:] == steps[:, :-1] + 1) | (steps[:, 1:] == 0)
            assert follows.all(), interruption.where
            assert collector.call("echo", moment) == tuple((env, moment) for env in range(4)), interruption.where
        assert moment > 5
