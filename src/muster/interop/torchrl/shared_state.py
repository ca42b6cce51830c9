"""State that the envs of an `EnvCreator` share across processes, such as the statistics of a `VecNorm`.

An env takes tensors that are shared as they are, and copies others. So the creator's tensors are moved into one file in
memory, which torch knows to be shared, in the caller and again in each worker; no env is built for it.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase  # type: ignore[import-untyped]  # it ships no py.typed
from torch import Tensor
from torchrl.envs import EnvBase, EnvCreator

from muster._core import CACHE_LINE
from muster.transport.slab import memfd


class SharedCreator:
    """The factory for an `EnvCreator`, whose envs share its state wherever they are. Made by `sharing`."""

    def __init__(self, creator: Any) -> None:
        self._creator = creator
        tensors = list(_tensors(creator.state_dict()))
        self._bytes = CACHE_LINE + sum(map(_room, tensors))
        fd = memfd("shared-state")
        os.ftruncate(fd, self._bytes)
        self._path = f"/proc/{os.getpid()}/fd/{fd}"
        weakref.finalize(self, os.close, fd)
        self._move(holds_values=False)

    def __call__(self, **kwargs: Any) -> EnvBase:
        self._move(holds_values=True)
        return self._creator(**kwargs)

    def _move(self, *, holds_values: bool) -> None:
        """Moves the creator's tensors into the file. holds_values: whether the file holds what counts."""
        block = torch.from_file(self._path, shared=True, size=self._bytes, dtype=torch.uint8)
        place = 0
        for tensor in _tensors(self._creator.state_dict()):
            room = block[place : place + tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
            if not holds_values:
                room.copy_(tensor)
            tensor.set_(room)  # type: ignore[call-overload]  # a tensor, as torch documents
            place += _room(tensor)


# By the id of the creator, which lives as long as what is made of it.
_made: weakref.WeakValueDictionary[int, SharedCreator] = weakref.WeakValueDictionary()


def sharing(creator: Any) -> Any:
    """The factory to send to workers in the place of a user's: that of an `EnvCreator` shares the state, if any."""
    if not isinstance(creator, EnvCreator) or not any(True for _ in _tensors(creator.state_dict())):
        return creator
    made = _made.get(id(creator))
    if made is None:
        made = _made[id(creator)] = SharedCreator(creator)
    return made


def _tensors(state: Any) -> Iterator[Tensor]:
    """The tensors in a state dict, in order; those of TensorDicts are shared by TorchRL itself."""
    for value in state.values() if isinstance(state, Mapping) and not isinstance(state, TensorDictBase) else ():
        if isinstance(value, Tensor):
            yield value
        else:
            yield from _tensors(value)


def _room(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // CACHE_LINE) * CACHE_LINE
