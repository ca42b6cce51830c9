"""A question to envs that a test defines travels every road, and is asked again of envs that are built again."""

from __future__ import annotations

import gc
import random
import warnings
import weakref
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from asked import Colour, Paint, Painted

import muster
from local_nodes import LocalNodes
from muster.errors import EnvError, WorkerDied
from processes import kill_worker

VECTOR_ENVS: dict[str, dict[str, Any]] = {
    "serial": {"backend": "serial"},
    "thread": {"backend": "thread", "num_workers": 2},
    "process": {"num_workers": 2},
    "process of this one": {"num_workers": 2, "caller_steps": True},
    "fork": {"num_workers": 2, "context": "fork"},
}
pytestmark = pytest.mark.usefixtures("leaves_nothing")


def collector(**options: Any) -> muster.MultiCollector:
    actions = options.pop("actions", torch.zeros(4, dtype=torch.long))
    return muster.MultiCollector(
        Painted, Acting(actions), num_envs=4, num_collectors=2, frames_per_batch=8, on_failure="restart", **options
    )


class Acting:
    """Acts by the actions that it is given, one an env, once."""

    def __init__(self, actions: torch.Tensor) -> None:
        self.actions = actions

    def __call__(self, obs: torch.Tensor) -> torch.Tensor:
        info = muster.get_worker_info()
        first = 0 if info is None else 2 * info.worker_index
        acts, self.actions = self.actions[first : first + len(obs)], torch.zeros_like(self.actions)
        return acts


@pytest.mark.parametrize("name", VECTOR_ENVS)
def test_a_vector_env_asks_it(name: str) -> None:
    with muster.make_vec(Painted, 4, **VECTOR_ENVS[name]) as envs:
        assert envs.ask(Colour()) == "0:white 1:white 2:white 3:white"
        assert envs.ask(Paint({1: "red", 3: "blue"})) == (None,) * 4
        assert envs.ask(Colour()) == "0:white 1:red 2:white 3:blue"
        with pytest.raises(EnvError, match="env 2 .*no such paint"):
            envs.ask(Paint({0: "green", 2: "invisible"}))
        assert envs.ask(Colour()) == "0:green 1:red 2:white 3:blue"


@pytest.mark.parametrize(("name", "act"), [("serial", 2), ("process", 1), ("process", 2)])
def test_an_env_that_is_built_again_is_asked_again(name: str, act: int) -> None:
    with muster.make_vec(Painted, 4, on_failure="restart", **VECTOR_ENVS[name]) as envs:
        envs.reset(seed=0)
        envs.ask(Paint({1: "red", 3: "blue"}))
        envs.step(np.array([0, act, 0, act]))
        assert envs.ask(Colour()) == "0:white 1:red 2:white 3:blue"
        with pytest.raises(EnvError, match="no such paint"):
            envs.ask(Paint({1: "invisible", 3: "green"}))
        envs.step(np.array([0, act, 0, act]))
        assert envs.ask(Colour()) == "0:white 1:red 2:white 3:green"


@pytest.mark.parametrize("nodes", [0, 2])
@pytest.mark.parametrize("act", [0, 1, 2])
def test_a_multi_collector_asks_it(nodes: int, act: int) -> None:
    cluster: Any = LocalNodes(nodes) if nodes else None
    with warnings.catch_warnings(), collector(actions=torch.tensor([0, 0, 0, act]), cluster=cluster) as collected:
        warnings.simplefilter("ignore")
        assert collected.ask(Colour()) == "0:white 1:white 2:white 3:white"
        collected.ask(Paint({1: "red", 3: "blue"}))
        with pytest.raises(EnvError, match="no such paint"):
            collected.ask(Paint({2: "green", 3: "invisible"}))
        collected.rollout()
        assert collected.ask(Colour()) == "0:white 1:red 2:green 3:blue"


def test_a_policy_that_stays_asks_it() -> None:
    policy = Acting(torch.zeros(4, dtype=torch.long))
    policy.uncopyable = True  # type: ignore[attr-defined]
    with pytest.warns(UserWarning, match="stays"):
        collected = muster.MultiCollector(Painted, policy, num_envs=4, num_collectors=2, frames_per_batch=8)
    with collected:
        collected.ask(Paint({0: "red"}))
        assert collected.ask(Colour()) == "0:red 1:white 2:white 3:white"


class Held:
    """Holds what must not be held in another process."""

    def __init__(self, held: object) -> None:
        self.held = held

    def __reduce__(self) -> tuple[Any, ...]:
        return Held, (None,)


@pytest.mark.parametrize("verb", ["call", "set_attr"])
def test_a_question_keeps_no_vector_env_alive(verb: str) -> None:
    envs = muster.make_vec(Painted, 2, num_workers=2)
    if verb == "call":
        envs.call(lambda env, index, held: index, Held(envs))
    else:
        envs.set_attr("colour", Held(envs))
    left = weakref.ref(envs)
    del envs
    gc.collect()
    assert left() is None


class Drawing(Painted):
    """Observes a number of the global generator; a `lock` that cannot be set again."""

    observation_space = gym.spaces.Box(0, 1, (1,), np.float64)

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "lock":
            with open(f"{self.folder}/{value}", "x"):
                pass
        super().__setattr__(name, value)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.array([random.random()]), {}


def test_envs_of_a_worker_are_seeded_though_the_first_refuses_its_reset(tmp_path: Path) -> None:
    drawn = []
    for run in range(2):
        with (
            warnings.catch_warnings(),
            muster.make_vec(
                Drawing, 2, num_workers=1, on_failure="restart", env_kwargs={"folder": str(tmp_path)}
            ) as envs,
        ):
            warnings.simplefilter("ignore")
            envs.reset(seed=0)
            envs.set_attr("lock", [f"first-{run}", f"second-{run}"])
            Path(tmp_path, f"second-{run}").unlink()  # the second env may take its lock again
            kill_worker(envs, 0)
            with pytest.raises(WorkerDied):
                envs.get_attr("colour")
            drawn.append(envs.reset(seed=5)[0].ravel().tolist())
    assert drawn[0][1] == drawn[1][1]
