"""Random programs on the `ParallelEnv` of muster.interop.torchrl and on TorchRL's `SerialEnv`, side by side."""

from __future__ import annotations

import functools
import warnings
from random import Random
from typing import Any

import numpy as np
import torch
from drawn_envs import EnvPlan, draw_plans
from drawn_spaces import draw_box
from gymnasium import spaces
from tensordict import TensorDictBase
from vector_programs import Difference, Tally

with warnings.catch_warnings(action="ignore"):  # TorchRL's own, of itself
    from torchrl.envs import SerialEnv
    from torchrl.envs.libs.gym import GymWrapper

from muster.interop.torchrl import ParallelEnv


def wrapped(plan: EnvPlan, one_hot: bool) -> Any:
    with warnings.catch_warnings(action="ignore"):
        return GymWrapper(plan.env(), categorical_action_encoding=not one_hot)


def draw_known_space(draw: Random, *, depth: int) -> Any:
    """A space of those that TorchRL's wrapper of Gymnasium's envs knows."""
    if depth and draw.random() < 0.3:
        return spaces.Dict({key: draw_known_space(draw, depth=depth - 1) for key in draw.sample("abc", 2)})
    count = spaces.Discrete(draw.randint(2, 9))
    box = draw_box(draw, 5)
    while not box.shape or box.dtype in (np.uint16, np.uint32, np.uint64):
        box = draw_box(draw, 5)
    return draw.choice([count, spaces.MultiDiscrete([3, 4]), spaces.MultiBinary(4), box])


def run_torchrl(draw: Random, tally: Tally, backends: list[str]) -> None:
    n, one_hot = draw.choice([1, 2, 3]), draw.random() < 0.3
    plans = draw_plans(
        draw,
        n,
        dresses=["plain", "strided", "frozen"],
        observation_space=draw_known_space(draw, depth=1),
        action_space=draw_known_space(draw, depth=0),
        infos={},
        wild=False,
        writes=False,
    )
    fns = [functools.partial(wrapped, plan, one_hot) for plan in plans]
    options = {"mp_start_method": "fork", "num_processes": draw.choice([None, 1])}
    with warnings.catch_warnings(action="ignore"):
        ours, theirs = ParallelEnv(n, fns, **options), SerialEnv(n, fns)
        try:
            _play(draw, ours, theirs, tally)
        finally:
            ours.close()
            theirs.close(raise_if_closed=False)
    tally.programs += 1


def _play(draw: Random, ours: Any, theirs: Any, tally: Tally) -> None:
    both = ours, theirs
    _same([envs.set_seed(7) for envs in both], "set_seed")
    states = [envs.reset() for envs in both]
    _same(states, "reset")
    for _ in range(draw.choice([5, 20])):
        act = draw.choice(["step"] * 4 + ["step_and_maybe_reset"] * 4 + ["reset", "mask", "rollout"])
        if act in ("step", "step_and_maybe_reset"):
            with torch.random.fork_rng():
                torch.manual_seed(draw.getrandbits(30))
                action = theirs.rand_action()["action"]
            for state in states:
                state["action"] = action.clone()
            results = [getattr(envs, act)(state) for envs, state in zip(both, states, strict=True)]
            if act == "step":
                _same(results, act)
                states = [envs.step_mdp(result) for envs, result in zip(both, results, strict=True)]
                if states[1]["done"].any():
                    states = [envs.maybe_reset(state) for envs, state in zip(both, states, strict=True)]
            else:
                _same([result for result, _ in results], act)
                states = [state for _, state in results]
        elif act == "reset":
            states = [envs.reset() for envs in both]
        elif act == "mask":
            mask = torch.tensor([[draw.random() < 0.5] for _ in range(theirs.num_workers)])
            mask[draw.randrange(len(mask))] = True
            for state in states:
                state["_reset"] = mask.clone()
            states = [envs.reset(state) for envs, state in zip(both, states, strict=True)]
        else:
            states = []
            for envs in both:
                with torch.random.fork_rng():
                    torch.manual_seed(3)
                    results = envs.rollout(7, break_when_any_done=False)
                states.append(results)
            _same(states, act)
            states = [envs.reset() for envs in both]
        # The last actions of envs that were reset are left in ours, and zeros in theirs: both are about to be replaced.
        _same([state.exclude("action") for state in states], act)
        tally.rows += theirs.num_workers


def _same(results: list[Any], what: str) -> None:
    ours, theirs = results
    if not isinstance(theirs, TensorDictBase):
        if ours != theirs:
            raise Difference(f"{what}: {ours}, expected {theirs}")
        return
    if (found := {*ours.keys(True, True)}) != (expected := {*theirs.keys(True, True)}):
        raise Difference(f"{what}: keys {found}, expected {expected}")
    for key in theirs.keys(True, True):
        of_ours, of_theirs = ours[key].numpy(), theirs[key].numpy()
        if of_ours.dtype != of_theirs.dtype or not np.array_equal(of_ours, of_theirs, equal_nan=True):
            raise Difference(f"{what}, {key}: {ours[key]!r:.300}, expected {theirs[key]!r:.300}")
