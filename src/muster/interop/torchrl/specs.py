"""Conversion of values of Gymnasium's spaces to tensors of TorchRL's specs, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch.nn.functional import one_hot
from torchrl.data import Binary, Categorical, Composite, MultiOneHot, OneHot, Stacked
from torchrl.envs.libs.gym import _gym_to_torchrl_spec_transform

from muster.errors import UsageError
from muster.spaces.tree import Space

_ENDS = ("done", "terminated", "truncated")


class Codec:
    """Converts values of `space`, with the leading axes `lead`, to tensors of `spec`, and back.

    categorical: True for discrete values as integers, False for one-hot vectors. The tensors count from 0, wherever the
    space starts.
    Raises UsageError for spaces whose values are no tensors.
    """

    def __init__(
        self, space: Space, lead: tuple[int, ...], *, categorical: bool, device: torch.device | None = None
    ) -> None:
        if isinstance(space, (spaces.Tuple, spaces.OneOf, spaces.Sequence, spaces.Graph, spaces.Text)):
            raise _no_tensors(space)
        if isinstance(space, spaces.MultiDiscrete) and (space.nvec != space.nvec[:1]).any() and space.nvec.ndim > 1:
            raise _no_tensors(space)  # rows of different counts: TorchRL raises, or stacks them lazily
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
