"""The places of a vector env's values in TorchRL's tensordicts: at the root for one agent, nested for groups."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces
from tensordict import TensorDict, TensorDictBase  # type: ignore[import-untyped]  # it ships no py.typed
from torchrl.data import Composite, Unbounded

from muster.interop.torchrl.specs import Codec, chosen, ends, ends_spec, flag_spec
from muster.vector.multi_agent import MultiAgentVectorEnv
from muster.vector.vector_env import VectorEnv

Bools = npt.NDArray[np.bool_]
Tensors = dict[str, Any]


class TensorDictShape(Protocol):
    """Turns the results of a vector env into tensors, and tensors into actions."""

    observation: Composite
    action: Composite
    reward: Composite
    done: Composite

    def observation_fields(self, obs: Any, infos: Mapping[str, Any]) -> Tensors:
        """The observations as tensors by key."""

    def with_finals(self, observations: Tensors, infos: Mapping[str, Any], over: Bools) -> Tensors:
        """`observations` with the final ones in the rows `over`, whose episodes have ended (same_step)."""

    def reward_fields(self, rewards: Any, infos: Mapping[str, Any] | None) -> Tensors:
        """The rewards as tensors by key; for groups also the flags of the agents that have ended."""

    def actions(self, tensordict: TensorDictBase) -> Any:
        """The actions in `tensordict`, as the vector env takes them."""

    def joined(self, *parts: Tensors) -> TensorDictBase:
        """One tensordict of batch size ``[N]``."""


class SingleAgent:
    """The layout for one agent: ``observation`` or the keys of a Dict space, ``action`` and ``reward`` at the root."""

    def __init__(self, envs: VectorEnv, *, categorical: bool, device: torch.device | None) -> None:
        lead = (envs.num_envs,)
        space = envs.single_observation_space
        named = space if isinstance(space, spaces.Dict) else spaces.Dict({"observation": space})
        self._is_named = named is space
        self._obs = Codec(named, lead, categorical=categorical, device=device)
        self._action = Codec(envs.single_action_space, lead, categorical=categorical, device=device)
        self._lead, self._device = torch.Size(lead), device
        self.observation = self._obs.spec
        self.action = Composite(action=self._action.spec, shape=lead, device=device)
        self.reward = Composite(reward=Unbounded(shape=(*lead, 1), device=device), shape=lead, device=device)
        self.done = ends_spec(lead, device)

    def observation_fields(self, obs: Any, infos: Mapping[str, Any]) -> Tensors:
        tensors: Tensors = self._obs.encode(obs if self._is_named else {"observation": obs})
        return tensors

    def with_finals(self, observations: Tensors, infos: Mapping[str, Any], over: Bools) -> Tensors:
        arrived: Tensors = _map(torch.clone, observations)
        for row in np.flatnonzero(over).tolist():
            _put(arrived, self.observation_fields(infos["final_obs"][row], {}), row)
        return arrived

    def reward_fields(self, rewards: Any, infos: Mapping[str, Any] | None) -> Tensors:
        return {"reward": torch.from_numpy(rewards.astype(np.float32)).unsqueeze(-1).to(self._device)}

    def actions(self, tensordict: TensorDictBase) -> Any:
        return self._action.decode(tensordict.get("action"))

    def joined(self, *parts: Tensors) -> TensorDictBase:
        return TensorDict({key: value for part in parts for key, value in part.items()}, self._lead, self._device)


class AgentGroups:
    """The layout for groups of agents: tensors ``[N, A, ...]`` under keys ``(group, name)``.

    name: one of ``observation``, ``action``, ``reward``, ``done``, ``terminated``, ``truncated``, ``alive``, ``acting``
    and, where the env may provide masks, ``action_mask``. At the root stand ``state`` and ``shared``, where the env has
    them.
    """

    def __init__(self, envs: MultiAgentVectorEnv, *, categorical: bool, device: torch.device | None) -> None:
        self._count, self._device = envs.num_envs, device
        self._leads = {group: (envs.num_envs, len(agents)) for group, agents in envs.groups.items()}
        seen, acts = envs.single_observation_space.spaces, envs.single_action_space.spaces
        # TorchRL's own multi-agent envs observe one-hot vectors, whichever way actions are encoded.
        self._obs = {
            group: Codec(seen[group], lead, categorical=False, device=device) for group, lead in self._leads.items()
        }
        self._actions = {
            group: Codec(acts[group], lead, categorical=categorical, device=device)
            for group, lead in self._leads.items()
        }
        about = {"state": envs.state_space, "shared": seen.get("shared")}
        self._about_all = {
            name: Codec(space, (envs.num_envs,), categorical=False, device=device)
            for name, space in about.items()
            if space is not None
        }
        self._masks = {group: (*self._leads[group], *shape) for group, shape in envs.mask_shapes.items()}
        self._make_specs()

    def _make_specs(self) -> None:
        device = self._device

        def by_group(make: Callable[[str, tuple[int, int]], dict[str, Any]], **at_root: Any) -> Composite:
            groups = {
                group: Composite(make(group, lead), shape=lead, device=device) for group, lead in self._leads.items()
            }
            return Composite({**groups, **at_root}, shape=(self._count,), device=device)

        def observation_specs(group: str, lead: tuple[int, int]) -> dict[str, Any]:
            specs = {"observation": self._obs[group].spec}
            specs |= {name: flag_spec(lead, device) for name in ("alive", "acting")}
            if group in self._masks:
                specs["action_mask"] = flag_spec(self._masks[group], device)
            return specs

        self.observation = by_group(observation_specs, **{name: codec.spec for name, codec in self._about_all.items()})
        self.action = by_group(lambda group, lead: {"action": self._actions[group].spec})
        self.reward = by_group(lambda group, lead: {"reward": Unbounded(shape=(*lead, 1), device=device)})
        self.done = by_group(
            lambda group, lead: dict(ends_spec(lead, device).items()), **dict(ends_spec((self._count,), device).items())
        )

    def observation_fields(self, obs: Any, infos: Mapping[str, Any]) -> Tensors:
        tensors: Tensors = {}
        masks = infos.get("action_mask", {})
        for group, codec in self._obs.items():
            part = tensors[group] = {"observation": codec.encode(obs[group])}
            part |= {name: self._tensor(infos[name][group]) for name in ("alive", "acting")}
            if group in self._masks:
                part["action_mask"] = self._tensor(masks.get(group, np.True_), self._masks[group])
        if "state" in self._about_all:
            tensors["state"] = self._about_all["state"].encode(infos["state"])
        if "shared" in self._about_all:
            tensors["shared"] = self._about_all["shared"].encode(obs["shared"])
        return tensors

    def with_finals(self, observations: Tensors, infos: Mapping[str, Any], over: Bools) -> Tensors:
        finals = self.observation_fields(infos["final_obs"], infos["final_info"])
        arrived: Tensors = chosen(torch.from_numpy(over).to(self._device), finals, observations)
        return arrived

    def reward_fields(self, rewards: Any, infos: Mapping[str, Any] | None) -> Tensors:
        assert infos is not None
        return {
            group: {
                "reward": self._tensor(rewards[group]).unsqueeze(-1),
                **ends(infos["agent_terminated"][group], infos["agent_truncated"][group], self._device),
            }
            for group in self._leads
        }

    def actions(self, tensordict: TensorDictBase) -> Any:
        return {group: codec.decode(tensordict.get((group, "action"))) for group, codec in self._actions.items()}

    def joined(self, *parts: Tensors) -> TensorDictBase:
        groups: dict[str, Tensors] = {group: {} for group in self._leads}
        root: Tensors = {}
        for part in parts:
            for key, value in part.items():
                if key in groups:
                    groups[key].update(value)
                else:
                    root[key] = value
        for group, tensors in groups.items():
            root[group] = TensorDict(tensors, torch.Size(self._leads[group]), self._device)
        return TensorDict(root, torch.Size((self._count,)), self._device)

    def _tensor(self, array: Any, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        tensor = torch.as_tensor(array if shape is None else np.broadcast_to(array, shape).copy())
        return tensor.to(self._device)


def _map(function: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """The tree of tensors with `function` applied to each. By hand, as `_put`: a TensorDict takes 8 us a row more."""
    return {key: _map(function, item) for key, item in tree.items()} if isinstance(tree, dict) else function(tree)


def _put(tree: Any, row_tree: Any, row: int) -> None:
    """Copies the tensors of `row_tree` into row `row` of those of `tree`."""
    for key, item in row_tree.items():
        if isinstance(item, dict):
            _put(tree[key], item, row)
        else:
            tree[key][row] = item
