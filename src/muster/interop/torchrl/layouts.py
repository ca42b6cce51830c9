"""The places of a vector env's values in TorchRL's tensordicts: at the root for one agent, nested for groups.

`Codec` converts values of Gymnasium's spaces to tensors of TorchRL's specs, and back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces
from tensordict import TensorDict, TensorDictBase  # type: ignore[import-untyped]  # it ships no py.typed
from torch.nn.functional import one_hot
from torchrl.data import Binary, Categorical, Composite, MultiOneHot, OneHot, Stacked, Unbounded
from torchrl.envs.libs.gym import _gym_to_torchrl_spec_transform

from muster.errors import UsageError
from muster.spaces.tree import Space
from muster.vector.multi_agent import MultiAgentVectorEnv
from muster.vector.vector_env import VectorEnv

_ENDS = ("done", "terminated", "truncated")


class Codec:
    """Converts values of `space`, with the leading axes `lead`, to tensors of `spec`, and back.

    categorical: True for discrete values as integers, False for one-hot vectors. The tensors count from 0, wherever the
    space starts.
    Raises UsageError for spaces with values that are no tensors.
    """

    def __init__(
        self, space: Space, lead: tuple[int, ...], *, categorical: bool, device: torch.device | None = None
    ) -> None:
        if isinstance(space, (spaces.Tuple, spaces.OneOf, spaces.Sequence, spaces.Graph, spaces.Text)):
            raise _no_tensors(space)
        self.spec: Any
        self._device = device
        self._children: dict[str, Codec] | None = None
        if isinstance(space, spaces.Dict):
            self._children = {
                key: Codec(child, lead, categorical=categorical, device=device) for key, child in space.items()
            }
            specs = {key: child.spec for key, child in self._children.items()}
            self.spec = Composite(specs, shape=lead, device=device)
            return
        if isinstance(space, spaces.MultiBinary) and len(space.shape) == 1:
            space = spaces.MultiBinary(space.shape[0])  # TorchRL does not take the tuple (n,)
        self._space = space
        self._start = getattr(space, "start", 0)
        try:
            self._single = _gym_to_torchrl_spec_transform(
                space, device=device, categorical_action_encoding=categorical, remap_state_to_observation=False
            )
        except Exception as error:  # any error in TorchRL: a KeyError for the dtype, a TypeError for the shape
            raise _no_tensors(space) from error
        if isinstance(self._single, Stacked):
            raise _no_tensors(space)
        self.spec = self._single.expand(*lead, *self._single.shape)

    def encode(self, value: Any) -> Any:
        """A tensor, or a dict of tensors for Dict spaces. value: ``[..., *shape]``; the result may share its memory."""
        if self._children is not None:
            return {key: child.encode(value[key]) for key, child in self._children.items()}
        value = np.asarray(value)
        # NumPy's difference of two single numbers is no array.
        tensor = torch.from_numpy(np.asarray(value - self._start) if np.any(self._start) else value)
        if isinstance(self._single, MultiOneHot):  # its own encode knows no leading axes
            parts = zip(tensor.long().unbind(-1), self._single.space, strict=True)
            tensor = torch.cat([one_hot(part, box.n) for part, box in parts], -1)
        elif isinstance(self._single, OneHot):
            tensor = self._single.encode(tensor)
        elif isinstance(self._single, Binary):
            tensor = tensor.to(self._single.dtype)
        elif self._space.shape == () and self._single.shape == (1,):
            tensor = tensor.unsqueeze(-1)
        return tensor.to(self._device)

    def decode(self, value: Any) -> Any:
        """A NumPy array ``[..., *shape]``, for Dict spaces a dict of arrays; a copy. value: as `encode` returns it."""
        if self._children is not None:
            return {key: child.decode(value.get(key)) for key, child in self._children.items()}
        array = self.spec.to_numpy(value, safe=False)
        if self._space.shape == () and self._single.shape == (1,):
            array = array[..., 0]
        return array + self._start if np.any(self._start) else array


def _no_tensors(space: Space) -> UsageError:
    text = " ".join(str(space).split())
    return UsageError(
        f"TorchRL has no tensors for {text}; wrap the env so that it has a Dict or Box space (of a dtype that torch "
        "knows), or a flat MultiDiscrete or MultiBinary"
    )


def ends_spec(lead: tuple[int, ...], device: torch.device | None) -> Composite:
    """The spec of ``done``, ``terminated`` and ``truncated``, bool ``[*lead, 1]``."""
    return Composite({name: flag_spec((*lead, 1), device) for name in _ENDS}, shape=lead, device=device)


def flag_spec(shape: tuple[int, ...], device: torch.device | None) -> Categorical:
    """The spec of bools of shape `shape`."""
    return Categorical(2, shape=shape, dtype=torch.bool, device=device)


def ends(terminated: Any, truncated: Any, device: torch.device | None) -> dict[str, torch.Tensor]:
    """``done``, ``terminated`` and ``truncated``, bool ``[..., 1]``. terminated, truncated: bool ``[...]``."""
    flags = (terminated | truncated, terminated, truncated)
    return {name: torch.from_numpy(flag).unsqueeze(-1).to(device) for name, flag in zip(_ENDS, flags, strict=True)}


def chosen(mask: torch.Tensor, values: Any, others: Any) -> Any:
    """`values` where `mask`, bool ``[N]``, is True, else `others`. Both: tensors ``[N, ...]``, or dicts of them."""
    if isinstance(values, Mapping):
        return {key: chosen(mask, value, others[key]) for key, value in values.items()}
    return torch.where(mask.reshape(-1, *(1 for _ in values.shape[1:])), values, others)


Bools = npt.NDArray[np.bool_]
Tensors = dict[str, Any]


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
        """The observations as tensors by key."""
        tensors: Tensors = self._obs.encode(obs if self._is_named else {"observation": obs})
        return tensors

    def with_finals(self, observations: Tensors, infos: Mapping[str, Any], over: Bools) -> Tensors:
        """`observations` with the final ones in the rows `over`, where episodes have ended (same_step)."""
        arrived: Tensors = _map(torch.clone, observations)
        for row in np.flatnonzero(over).tolist():
            _put(arrived, self.observation_fields(infos["final_obs"][row], {}), row)
        return arrived

    def reward_fields(self, rewards: Any, infos: Mapping[str, Any]) -> Tensors:
        """The rewards as tensors by key; for groups also the flags of the agents that have ended."""
        return {"reward": torch.from_numpy(rewards.astype(np.float32)).unsqueeze(-1).to(self._device)}

    def actions(self, tensordict: TensorDictBase) -> Any:
        """The actions in `tensordict`, as the vector env takes them."""
        return self._action.decode(tensordict.get("action"))

    def joined(self, *parts: Tensors) -> TensorDictBase:
        """One tensordict of batch size ``[N]``."""
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
        leads = self._leads.items()
        self._obs = {g: Codec(seen[g], lead, categorical=False, device=device) for g, lead in leads}
        self._actions = {g: Codec(acts[g], lead, categorical=categorical, device=device) for g, lead in leads}
        about = [("state", envs.state_space), ("shared", seen.get("shared"))]
        known = [(name, space) for name, space in about if space is not None]
        lead = (envs.num_envs,)
        self._about_all = {name: Codec(space, lead, categorical=False, device=device) for name, space in known}
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
        for name, codec in self._about_all.items():
            tensors[name] = codec.encode(infos[name] if name == "state" else obs[name])
        return tensors

    def with_finals(self, observations: Tensors, infos: Mapping[str, Any], over: Bools) -> Tensors:
        finals = self.observation_fields(infos["final_obs"], infos["final_info"])
        arrived: Tensors = chosen(torch.from_numpy(over).to(self._device), finals, observations)
        return arrived

    def reward_fields(self, rewards: Any, infos: Mapping[str, Any]) -> Tensors:
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
