"""Random programs on drop-ins and on their originals, side by side: what they return, or raise, has to be the same."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from random import Random
from typing import Any

import gymnasium
import numpy as np
from drawn_envs import EnvPlan, draw_plans
from drawn_spaces import OWN_DRESSES, batch_of, draw_info_plan, draw_space, value_of
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from vector_programs import Difference, Tally, require_same

from muster.interop.gymnasium import AsyncVectorEnv, SyncVectorEnv

STEADY_KINDS = ["int", "float", "bool", "f4", "i1", "text", "none", "list", "array", "bytes array", "nested", "empty"]


class SideBySide:
    """A drop-in and its original. Where both raise, ours is an instance of the original's exception's class, too.

    loose: see `difference`.
    """

    def __init__(self, ours: Any, theirs: Any, tally: Tally, *, loose: bool = False) -> None:
        self.ours, self.theirs, self.tally, self.loose = ours, theirs, tally, loose

    def __enter__(self) -> SideBySide:
        return self

    def __exit__(self, *raised: object) -> None:
        self.ours.close()
        self.theirs.close()

    def both(self, what: str, act: Callable[[Any], Any]) -> None:
        ours, theirs = _outcome(act, self.ours), _outcome(act, self.theirs)
        self.tally.faults += isinstance(theirs, Exception)
        if isinstance(ours, Exception) or isinstance(theirs, Exception):
            if not (isinstance(theirs, Exception) and isinstance(ours, type(theirs))):
                raise Difference(f"{what}: {ours!r:.300}, expected {theirs!r:.300}") from (
                    ours if isinstance(ours, Exception) else None
                )
        else:
            require_same(ours, theirs, what, loose=self.loose)


def _outcome(act: Callable[[Any], Any], envs: Any) -> Any:
    try:
        with warnings.catch_warnings(action="ignore"):  # the originals' own
            return copy.deepcopy(act(envs))
    except Exception as error:
        return error


def run_gymnasium(draw: Random, tally: Tally, backends: list[str]) -> None:
    """A program on Gymnasium's `SyncVectorEnv` or `AsyncVectorEnv`."""
    n, mode = draw.choice([1, 2, 4]), draw.choice(list(AutoresetMode))
    # What the originals do wrong is left out: buffers that envs use again, kinds of infos that change.
    in_processes = "process" in backends and draw.random() < 0.5
    rewards = draw.choice([1, 1, 2]) if in_processes and mode is not AutoresetMode.DISABLED else 1
    kinds = "bdmBDT" if rewards > 1 else "bdmBDTo"  # those of the original's shared memory
    plans = draw_plans(
        draw, n, dresses=OWN_DRESSES, kinds=kinds, infos=draw_info_plan(draw, STEADY_KINDS), rewards=rewards
    )
    fns = [one.env for one in plans]
    options: dict[str, Any] = {"copy": draw.random() < 0.7, "autoreset_mode": mode}
    ours: Any
    if in_processes:
        ours = AsyncVectorEnv(fns, num_workers=draw.choice([None, 1]), context=draw.choice(["fork", None]), **options)
    else:
        ours = SyncVectorEnv(fns, **options)
    theirs: Any
    if rewards > 1:  # the original in one process takes none of these
        theirs = gymnasium.vector.AsyncVectorEnv(fns, context="fork", **options)
    else:
        theirs = gymnasium.vector.SyncVectorEnv(fns, **options)
    with SideBySide(ours, theirs, tally) as pair:
        require_same(ours.metadata, pair.theirs.metadata, "metadata")
        for name in ("observation_space", "action_space", "single_observation_space", "single_action_space"):
            if getattr(ours, name) != getattr(pair.theirs, name):
                raise Difference(f"{name}: {getattr(ours, name)}")
        _play_gymnasium(draw, pair, n, mode, plans[0].action_space)
    tally.programs += 1


def _play_gymnasium(draw: Random, pair: SideBySide, n: int, mode: AutoresetMode, action_space: Any) -> None:
    rng = np.random.default_rng(draw.getrandbits(32))
    pair.both("reset", lambda envs: envs.reset(seed=5))
    for _ in range(draw.choice([5, 20])):
        seed = draw.choice([None, draw.getrandbits(20), [draw.getrandbits(20) for _ in range(n)]])
        mask = np.array([draw.random() < 0.5 for _ in range(n)])
        act = draw.choice(["step"] * 7 + ["reset", "mask", "call", "attributes"])
        over = pair.theirs._autoreset_envs if mode is AutoresetMode.DISABLED else np.zeros(n, bool)
        if act == "step" and over.any():  # the original steps some of the others, and then raises
            act, mask = "mask", over.copy()
        if act == "reset":
            pair.both("reset", lambda envs: envs.reset(seed=seed, options={"level": 2}))  # noqa: B023
        elif act == "mask":
            pair.both("reset", lambda envs: envs.reset(seed=seed, options={"reset_mask": mask}))  # noqa: B023
        elif act == "call":
            pair.both("call", lambda envs: (envs.call("said", 1, more="x"), envs.get_attr("crc")))
        elif act == "attributes":
            pair.both("attributes", lambda envs: (envs.set_attr("bonus", [2.0] * n), envs.get_attr("bonus")))
        else:
            actions = batch_of(action_space, [value_of(action_space, rng) for _ in range(n)])
            pair.both("step", lambda envs: envs.step(copy.deepcopy(actions)))  # noqa: B023
        pair.tally.rows += n


def run_sb3(draw: Random, tally: Tally, backends: list[str]) -> None:
    """A program on Stable-Baselines3's `DummyVecEnv` or `SubprocVecEnv`."""
    from stable_baselines3.common import vec_env

    from muster.interop import sb3

    n = draw.choice([1, 2, 4])
    kinds, depth = draw.choice([("bdm", 0), ("bdmD", 1)])  # what the original knows
    plans = draw_plans(
        draw, n, dresses=OWN_DRESSES, kinds=kinds, depth=depth, action_space=draw_space(draw, kinds="bdmB", size=5)
    )
    fns = [one.env for one in plans]
    ours: Any
    if "process" in backends and draw.random() < 0.5:
        ours = sb3.SubprocVecEnv(fns, draw.choice(["fork", "forkserver"]), num_workers=draw.choice([None, 1]))
    else:
        ours = sb3.DummyVecEnv(fns)
    with SideBySide(ours, vec_env.DummyVecEnv(fns), tally) as pair:
        _play_sb3(draw, pair, n, plans[0])
    tally.programs += 1


def _play_sb3(draw: Random, pair: SideBySide, n: int, plan: EnvPlan) -> None:
    rng = np.random.default_rng(draw.getrandbits(32))
    pair.both("reset", lambda envs: (envs.seed(3), envs.reset(), envs.reset_infos))
    for _ in range(draw.choice([5, 20])):
        some = draw.choice([None, 0, draw.sample(range(n), draw.randint(1, n))])
        match draw.choice(["step"] * 7 + ["reset", "options", "call", "attributes"]):
            case "reset":
                seed = draw.getrandbits(20)
                pair.both("reset", lambda envs: (envs.seed(seed), envs.reset(), envs.reset_infos))  # noqa: B023
            case "options":
                pair.both("reset", lambda envs: (envs.set_options({"level": 3}), envs.reset(), envs.reset_infos))
            case "call":
                pair.both("call", lambda envs: envs.env_method("said", 1, more="x", indices=some))  # noqa: B023
            case "attributes":
                pair.both("attributes", lambda envs: envs.set_attr("bonus", 2.0, indices=some))  # noqa: B023
                pair.both("attributes", lambda envs: (envs.get_attr("bonus"), envs.has_attr("nothing")))
            case _:
                actions = np.stack([value_of(plan.action_space, rng) for _ in range(n)])
                pair.both("step", lambda envs: (_told(plan, *envs.step(actions.copy())), envs.reset_infos))  # noqa: B023
        pair.tally.rows += n


def _told(plan: EnvPlan, obs: Any, rewards: Any, dones: Any, infos: Any) -> tuple[Any, ...]:
    """The result of a step with the rewards of `DummyVecEnv`, as `SubprocVecEnv` has float64.

    A terminal observation of a Box without axes is an array, which the env may have returned as a number.
    """
    key = "terminal_observation"
    infos = [{**info, key: _boxed(plan.observation_space, info[key])} if key in info else info for info in infos]
    return obs, np.float32(rewards), dones, infos


def _boxed(space: Any, obs: Any) -> Any:
    if isinstance(space, spaces.Dict):
        return {key: _boxed(space[key], one) for key, one in obs.items()}
    return np.asarray(obs) if isinstance(space, spaces.Box) else obs
