"""The ways in which a rollout steps an `EnvBase`, from leaves to leaves, each with the rows of `step_and_maybe_reset`.

The shorter a road, the fewer envs it is for: a plain `GymEnv` without any tensordict, then envs with TorchRL's own
verbs by their ``_step`` alone, then all others by their own verbs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchrl.envs import EnvBase
from torchrl.envs.transforms import InitTracker, RewardSum, StepCounter, Transform

from muster.interop.torchrl.leaves import Leaves, Nesting, Path
from muster.interop.torchrl.short_steps import BareGym, bare_gym, has_own_verbs, is_plainly_wrapped, parts_of
from muster.rollout.plain_modules import as_key, leaves_of

_ACTION = ("action",)
_REWARD = ("reward",)
_FLAGS = (("terminated",), ("truncated",), ("done",))


class Stepped(NamedTuple):
    """A step: the leaves of the root, those of ``next``, the root of the step that follows, whether a flag is set."""

    root: Leaves
    arrived: Leaves
    following: Leaves
    ended: bool


class WholeRoad:
    """For every env: its own `step_and_maybe_reset`."""

    def __init__(self, env: EnvBase, nesting: Nesting) -> None:
        self._env, self._nesting = env, nesting
        self._shares = nesting.device == env.device  # else the collector hands a copy to the env
        self._done_keys = [as_key(key) for key in env.done_keys]

    def step(self, root: Leaves) -> Stepped:
        """Steps the env, and resets it where it is done. root: what a policy acted on, and its outputs.

        Raises SpecMismatch, and what the env raises.
        """
        given = self._nesting.tensordict(root, self._env.device)
        stepped, following = self._env.step_and_maybe_reset(given)
        arrived = leaves_of(stepped.get("next"))
        if self._shares and stepped is given:
            root = _without_next(leaves_of(given))
        return Stepped(root, arrived, leaves_of(following), _any_set(arrived, self._done_keys))


class StepRoad(WholeRoad):
    """For envs with TorchRL's own verbs: their `_step`, and what TorchRL does around it."""

    def __init__(self, env: EnvBase, nesting: Nesting) -> None:
        super().__init__(env, nesting)
        shapes = {as_key(key): spec.shape for key, spec in env.full_done_spec.items(True, True)}
        shapes |= {as_key(key): env.full_reward_spec[key].shape for key in env.reward_keys}
        self._shapes = list(shapes.items())
        self._left = set(_paths(env._step_mdp.exclude_from_root))
        self._moved = list(_paths(env._step_mdp.keys_from_next))
        self._keeps: dict[Path, bool] = {}

    def step(self, root: Leaves) -> Stepped:
        given = self._nesting.tensordict(root, self._env.device)
        outcome = self._env._step(given)
        arrived = leaves_of(outcome)
        if self._env.run_type_checks or not self._is_complete(arrived):
            arrived = leaves_of(self._env._step_proc_data(outcome))
        for path, leaf in root.items():
            if path[0] == "next":
                arrived.setdefault(path[1:], leaf)
        seen = leaves_of(given)  # the env may have written into it
        following = {path: leaf for path, leaf in seen.items() if self._is_kept(path)}
        for path in self._moved:
            if path in arrived:
                following[path] = arrived[path]
        ended = _any_set(arrived, self._done_keys)
        if ended:
            following = leaves_of(self._env.maybe_reset(self._nesting.tensordict(following, self._env.device)))
        return Stepped(_without_next(seen if self._shares else root), arrived, following, ended)

    def _is_complete(self, arrived: Leaves) -> bool:
        return all((leaf := arrived.get(path)) is not None and leaf.shape == shape for path, shape in self._shapes)

    def _is_kept(self, path: Path) -> bool:
        if path not in self._keeps:
            self._keeps[path] = not any(path[:length] in self._left for length in range(1, len(path) + 1))
        return self._keeps[path]


class GymRoad:
    """For a plain `GymEnv`, with transforms that count steps and rewards, or mark first steps, or without any."""

    def __init__(self, bare: BareGym, transforms: list[Transform], reward_dtype: torch.dtype) -> None:
        self._bare = bare
        self._obs: Path = (bare.name,)
        self._reward_dtype = reward_dtype
        self._no, self._yes = torch.zeros(1, dtype=torch.bool), torch.ones(1, dtype=torch.bool)
        self._counter = next((one for one in transforms if type(one) is StepCounter), None)
        self._count: Path | None = None if self._counter is None else (self._counter.step_count_key,)
        self._sum: Path | None = next(((one.out_keys[0],) for one in transforms if type(one) is RewardSum), None)
        self._init: Path | None = next(((one.init_key,) for one in transforms if type(one) is InitTracker), None)

    def step(self, root: Leaves) -> Stepped:
        obs, reward, terminated, truncated = self._bare.take(root[_ACTION])
        flags = (self._no, self._yes)
        reward_leaf = torch.tensor((reward,), dtype=self._reward_dtype)
        arrived: Leaves = {self._obs: self._tensor(obs), _REWARD: reward_leaf}
        if self._counter is not None and self._count is not None:
            arrived[self._count] = count = root[self._count] + 1
            if self._counter.max_steps is not None:
                truncated = truncated or int(count) >= self._counter.max_steps
        if self._sum is not None:
            arrived[self._sum] = root.get(self._sum, 0.0) + reward_leaf
        if self._init is not None:
            arrived[self._init] = self._no
        ended = bool(terminated or truncated)
        for path, flag in zip(_FLAGS, (terminated, truncated, ended), strict=True):
            arrived[path] = flags[bool(flag)]
        preset = {path[1:]: leaf for path, leaf in root.items() if path[0] == "next"}
        if preset:
            root = _without_next(root)
        following = root | arrived
        del following[_REWARD]
        if ended:
            self._reset(following)
        return Stepped(root, preset | arrived, following, ended)

    def _reset(self, following: Leaves) -> None:
        following[self._obs] = self._tensor(self._bare.reset())
        following |= dict.fromkeys(_FLAGS, self._no)
        for path in (self._count, self._sum):
            if path is not None:
                following[path] = torch.zeros_like(following[path])
        if self._init is not None:
            following[self._init] = self._yes

    def _tensor(self, obs: Any) -> Tensor:
        return torch.from_numpy(np.array(obs, dtype=self._bare.dtype))


Road = WholeRoad | GymRoad


def road_of(env: EnvBase, nesting: Nesting) -> Road:
    """The shortest road for `env`, with tensordicts that are nested as `nesting`."""
    transforms, base = parts_of(env)
    if not has_own_verbs(env):
        return WholeRoad(env, nesting)
    small = all(_is_small(one) for one in transforms) and len({type(one) for one in transforms}) == len(transforms)
    if small and is_plainly_wrapped(env):
        fake = base.fake_tensordict()
        bare = bare_gym(base, fake.exclude("next"), fake.get("next"))
        if bare is not None:
            return GymRoad(bare, transforms, fake.get(("next", "reward")).dtype)
    return StepRoad(env, nesting)


def env_state(env: EnvBase) -> list[Any]:
    """The objects that the choice of a road depends on: it holds while these are the same ones."""
    transforms, base = parts_of(env)
    own = [vars(env).get(name) for name in ("_compiled_step_and_maybe_reset", "_torchrl_native_autoreset")]
    own += [vars(base).get(name) for name in ("_env", "_post_step_mdp_hooks")]
    return [env, base, *transforms, *own, *(vars(base).get("_info_dict_reader") or ())]


def _is_small(transform: Transform) -> bool:
    """True if `GymRoad` does what the transform does to a plain `GymEnv`."""
    if type(transform) is StepCounter:
        return bool(transform.truncated_key == "truncated" and transform.update_done)
    if type(transform) is RewardSum:
        named = list(transform.in_keys) == ["reward"] and isinstance(transform.out_keys[0], str)
        return named and not transform.reward_spec
    return type(transform) is InitTracker


def _any_set(arrived: Leaves, keys: list[Path]) -> bool:
    return any(bool(arrived[key].any()) for key in keys if key in arrived)


def _without_next(leaves: Leaves) -> Leaves:
    return {path: leaf for path, leaf in leaves.items() if path[0] != "next"}


def _paths(tree: dict[str, Any], path: Path = ()) -> Iterator[Path]:
    for name, below in tree.items():
        if below is None:
            yield (*path, name)
        else:
            yield from _paths(below, (*path, name))
