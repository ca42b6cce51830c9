"""TorchRL's `EnvBase` as an env that Muster's collectors step: of Gymnasium's API, or of PettingZoo's for agents.

Keys are TorchRL's as far as collectors have them: observations at the root by their own names, agents by group.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import getitem
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDictBase  # type: ignore[import-untyped]  # it ships no py.typed
from torch import Tensor
from torchrl.data import Binary, Bounded, Categorical, MultiCategorical, MultiOneHot, OneHot
from torchrl.envs import EnvBase

from muster.envs.attributes import get_through, set_through
from muster.errors import RecipeError, SpecMismatch
from muster.interop.torchrl.short_steps import parts_of
from muster.introspection import type_name
from muster.rollout.plain_modules import as_key
from muster.spaces import stacking

Path = tuple[str, ...]
Obs = dict[str, Any]

_FLAGS = ("terminated", "truncated", "done")
# What InitTracker adds: collectors have it of themselves.
_OWN_KEYS = ("is_init",)


class _Stepping:
    """Steps an `EnvBase` and keeps its tensordict from one step to the next."""

    api_name = "TorchRL"

    def __init__(self, env: EnvBase) -> None:
        self.env = env
        self.metadata: dict[str, Any] = dict(getattr(env, "metadata", None) or {})
        self._base = parts_of(env)[1]
        self._root: TensorDictBase | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "env":
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.env, name)

    def get_wrapper_attr(self, name: str) -> Any:
        """The attribute of the env, or of the one inside it that has it."""
        return get_through(self, self._base, name)

    def set_wrapper_attr(self, name: str, value: Any, *, force: bool = True) -> bool:
        """Sets the attribute on the env, or on the one inside it that has it."""
        set_through(self._base, name, value)
        return True

    def close(self) -> None:
        self.env.close(raise_if_closed=False)

    def _begin(self, seed: int | None) -> TensorDictBase:
        if seed is not None:
            self.env.set_seed(seed)
        self._root = self.env.reset()
        return self._root

    def _advance(self, actions: dict[Path, Any]) -> TensorDictBase:
        """The tensordict after a step. actions: by key."""
        root = self._root
        assert root is not None
        for path, action in actions.items():
            given = action if isinstance(action, Tensor) else torch.from_numpy(np.array(action))
            root.set(path, given.to(self.env.device))
        with torch.no_grad():
            stepped = self.env.step(root)
        self._root = self.env.step_mdp(stepped)
        return stepped.get("next")


class OneAgent(_Stepping, gymnasium.Env[Any, Any]):
    """An `EnvBase` of one agent. Its only observation or action is a leaf, several are a dict by their keys."""

    def __init__(self, env: EnvBase) -> None:
        super().__init__(env)
        self._obs_paths = _paths(env.full_observation_spec)
        self._action_paths = _paths(env.full_action_spec)
        rewards = _paths(env.full_reward_spec)
        if len(rewards) != 1 or env.full_reward_spec[rewards[0]].shape.numel() != 1:
            shapes = {path[-1]: list(env.full_reward_spec[path].shape) for path in rewards}
            raise RecipeError(
                f"the factory returned a {type_name(env)} with rewards {shapes}, expected one number; only TorchRL's "
                "own collectors take such envs, as muster.interop.torchrl.Collector does"
            )
        self._reward_path = rewards[0]
        self.observation_space = _space_of(env.full_observation_spec, self._obs_paths, "observation")
        self.action_space = _space_of(env.full_action_spec, self._action_paths, None)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return self._observed(self._begin(seed)), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        nested = isinstance(self.action_space, spaces.Dict)
        actions = {path: reduce(getitem, path, action) if nested else action for path in self._action_paths}
        arrived = self._advance(actions)
        terminated, truncated = (bool(flag.any()) for flag in _ends(arrived))
        return self._observed(arrived), float(arrived.get(self._reward_path).sum()), terminated, truncated, {}

    def _observed(self, tree: TensorDictBase) -> Any:
        return _values(tree, self._obs_paths, isinstance(self.observation_space, spaces.Dict))


class ManyAgents(_Stepping):
    """An `EnvBase` of groups of agents, with PettingZoo's parallel API.

    agent_groups: the group of each agent. Observations that belong to no group are left out; rewards and flags that do
    not are those of all agents.
    """

    def __init__(self, env: EnvBase, members: dict[str, list[str]]) -> None:
        super().__init__(env)
        self._members = members
        self.agent_groups = {agent: group for group, agents in members.items() for agent in agents}
        self.possible_agents = list(self.agent_groups)
        self.agents: list[str] = []
        self._specs = {group: (env.full_observation_spec[group], env.full_action_spec[group]) for group in members}
        self._obs_paths = {group: _paths(seen) for group, (seen, _) in self._specs.items()}
        self._action_paths = {group: _paths(acts) for group, (_, acts) in self._specs.items()}
        paths = _paths(env.full_reward_spec)
        self._rewards = {group: next((path for path in paths if path[0] == group), paths[0]) for group in members}
        self._spaces = {group: self._spaces_of(group) for group in members}

    def observation_space(self, agent: str) -> spaces.Space[Any]:
        """The space of the agent's observations."""
        return self._spaces[self.agent_groups[agent]][0]

    def action_space(self, agent: str) -> spaces.Space[Any]:
        """The space of the agent's actions."""
        return self._spaces[self.agent_groups[agent]][1]

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Obs, Obs]:
        """Observations and infos by agent."""
        root = self._begin(seed)
        self.agents = list(self.possible_agents)
        return self._observed(root, self.agents), {agent: {} for agent in self.agents}

    def step(self, actions: dict[str, Any]) -> tuple[Obs, Obs, Obs, Obs, Obs]:
        """Observations, rewards, terminations, truncations and infos by agent."""
        arrived = self._advance(self._joined(actions))
        acted, of_env = self.agents, _ends(arrived)
        ends: tuple[Obs, Obs] = ({}, {})
        paid: Obs = {}
        for group, agents in self._members.items():
            rewards = arrived.get(self._rewards[group]).reshape(-1).expand(len(agents))
            paid.update(zip(agents, rewards.tolist(), strict=True))
            for ended, own, whole in zip(ends, _ends(arrived.get(group), len(agents)), of_env, strict=True):
                ended.update(zip(agents, (own | whole).tolist(), strict=True))
        self.agents = [agent for agent in acted if not (ends[0][agent] or ends[1][agent])]
        paid, terminations, truncations = ({agent: one[agent] for agent in acted} for one in (paid, *ends))
        return self._observed(arrived, acted), paid, terminations, truncations, {agent: {} for agent in acted}

    def _spaces_of(self, group: str) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
        seen, acts = (spec[0] for spec in self._specs[group])
        return _space_of(seen, self._obs_paths[group], "observation"), _space_of(acts, self._action_paths[group], None)

    def _observed(self, tree: TensorDictBase, agents: list[str]) -> Obs:
        observed: Obs = {}
        for group, members in self._members.items():
            rows = _values(tree.get(group), self._obs_paths[group], isinstance(self._spaces[group][0], spaces.Dict))
            observed |= {agent: _row(rows, i) for i, agent in enumerate(members) if agent in agents}
        return observed

    def _joined(self, actions: dict[str, Any]) -> dict[Path, Any]:
        """The groups' actions by key; zeros for agents that do not act."""
        joined: dict[Path, Any] = {}
        for group, members in self._members.items():
            nested = isinstance(self._spaces[group][1], spaces.Dict)
            for path in self._action_paths[group]:
                rows = self._specs[group][1][path].zero()
                for i, agent in enumerate(members):
                    if agent in actions:
                        rows[i] = torch.as_tensor(reduce(getitem, path, actions[agent]) if nested else actions[agent])
                joined[(group, *path)] = rows
        return joined


def adapted(env: EnvBase) -> OneAgent | ManyAgents:
    """The env that collectors step for `env`. Raises RecipeError, SpecMismatch."""
    if env.batch_size:
        raise RecipeError(
            f"the factory returned a {type_name(env)} with batch size {list(env.batch_size)}, expected one env without "
            "batch size. Hand over the factory of its envs; or give the batch to TorchRL's collectors, as "
            "muster.interop.torchrl.ParallelEnv(num_envs, make_env)"
        )
    acts = env.full_action_spec
    groups = {path[0] for path in _paths(acts) if len(path) > 1 and acts[path[0]].shape}
    if not groups:
        return OneAgent(env)
    if apart := [path for path in _paths(acts) if path[0] not in groups]:
        raise RecipeError(
            f"the factory returned a {type_name(env)} with actions {apart} that belong to none of its groups "
            f"{sorted(groups)}; only TorchRL's own collectors take such envs, as muster.interop.torchrl.Collector does"
        )
    named = getattr(env, "group_map", None) or {}
    members = {}
    for group in sorted(groups):
        count = env.full_action_spec[group].shape[0]
        names = list(named.get(group, ()))
        members[group] = names if len(names) == count else [f"{group}_{i}" for i in range(count)]
    return ManyAgents(env, members)


def _space_of(spec: Any, paths: list[Path], alone: str | None) -> spaces.Space[Any]:
    """The space of a Composite's leaves. alone: the name that a leaf must have to be no dict; None for any name."""
    if len(paths) == 1 and (alone is None or paths == [(alone,)]):
        return _leaf_space(spec[paths[0]], paths[0])
    return _dict_space(_nested(paths, lambda path: _leaf_space(spec[path], path)))


def _dict_space(tree: dict[str, Any]) -> spaces.Dict:
    return spaces.Dict({name: _dict_space(one) if isinstance(one, dict) else one for name, one in tree.items()})


def _leaf_space(spec: Any, path: Path) -> spaces.Space[Any]:
    kind: Any = spec.dtype or object
    try:
        dtype = torch.empty(0, dtype=kind).numpy().dtype.type
    except TypeError as error:
        raise SpecMismatch(
            f"{path[-1]!r} is {type_name(spec)} of {spec.dtype}, which has no NumPy dtype; leave it out, as TorchRL's "
            "ExcludeTransform does, or convert it"
        ) from error
    shape = tuple(spec.shape)
    if isinstance(spec, (OneHot, MultiOneHot)):
        parts = spec.space if isinstance(spec, MultiOneHot) else [spec.space]
        return stacking.OneHot([part.n for part in parts], shape[:-1], dtype)
    if isinstance(spec, (Categorical, MultiCategorical)) and dtype is np.int64:
        counts = np.broadcast_to(spec.space.n if isinstance(spec, Categorical) else spec.nvec.numpy(), shape).copy()
        return spaces.MultiDiscrete(counts) if shape else spaces.Discrete(int(counts))
    low: Any = -np.inf
    high: Any = np.inf
    if isinstance(spec, (Binary, Categorical)) or dtype is np.bool_:
        low, high = 0, (spec.space.n - 1 if isinstance(spec, Categorical) else 1)
    elif isinstance(spec, Bounded):
        low, high = (bound.expand(shape).cpu().numpy() for bound in (spec.space.low, spec.space.high))
    elif np.issubdtype(dtype, np.integer):
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
    return spaces.Box(low, high, shape, dtype)


def _paths(spec: Any) -> list[Path]:
    return [path for path in map(as_key, spec.keys(True, True)) if path[-1] not in _OWN_KEYS]


def _values(tree: TensorDictBase, paths: list[Path], nested: bool) -> Any:
    return _nested(paths, lambda path: _array(tree.get(path))) if nested else _array(tree.get(paths[0]))


def _nested(paths: list[Path], value_of: Callable[[Path], Any]) -> dict[str, Any]:
    """Dicts in dicts, with a value for each path."""
    whole: dict[str, Any] = {}
    for path in paths:
        node = whole
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = value_of(path)
    return whole


def _row(rows: Any, i: int) -> Any:
    return {name: _row(one, i) for name, one in rows.items()} if isinstance(rows, dict) else rows[i]


def _array(leaf: Tensor) -> Any:
    return leaf.detach().cpu().numpy()


def _ends(tree: TensorDictBase, count: int = 1) -> tuple[Tensor, Tensor]:
    """The flags terminated and truncated, bool ``[count]``; False where `tree` says nothing of it."""
    terminated, truncated, done = (_flat(tree.get(name, None), count) for name in _FLAGS)
    return terminated | (done & ~truncated), truncated


def _flat(flag: Tensor | None, count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.bool) if flag is None else flag.reshape(count, -1).any(-1).cpu()
