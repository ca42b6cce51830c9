"""Modules that keep their parameters in a TensorDict, as TorchRL's multi-agent networks do.

``torch.func.functional_call`` replaces what modules register. A TensorDict returns tensors of its own, so that such a
module would silently continue to use those; here the TensorDict itself is replaced for the call.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from tensordict import TensorDict, TensorDictBase  # type: ignore[import-untyped]  # ships no types
from torch import Tensor, nn


class Slot(NamedTuple):
    """An attribute that holds a TensorDict.  names: the module's name of the tensor at each of its keys."""

    owner: nn.Module
    attribute: str
    held: TensorDictBase
    names: dict[Any, str]


def tensordict_slots(module: nn.Module, tensors: Mapping[str, Tensor]) -> list[Slot]:
    """The attributes inside ``module`` with a TensorDict that holds some of ``tensors``."""
    name_of = {id(tensor): name for name, tensor in tensors.items()}
    slots = []
    for owner in module.modules():
        if isinstance(owner, TensorDictBase):
            continue
        for attribute, held in [*vars(owner).items(), *owner._modules.items()]:
            if isinstance(held, TensorDictBase):
                names = {key: name_of[id(leaf)] for key, leaf in held.items(True, True) if id(leaf) in name_of}
                if names:
                    slots.append(Slot(owner, attribute, held, names))
    return slots


@contextmanager
def replaced_tensordicts(slots: Sequence[Slot], tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Replaces each slot's TensorDict by one with ``tensors``, until the context ends."""
    before = [dict(vars(slot.owner)) for slot in slots]
    try:
        for slot in slots:
            replacement = TensorDict({}, batch_size=slot.held.batch_size)
            for key, leaf in slot.held.items(True, True):
                replacement[key] = tensors.get(slot.names.get(key, ""), leaf)
            # An instance's own attribute is found before a registered submodule of that name.
            vars(slot.owner)[slot.attribute] = replacement
        yield
    finally:
        for slot, attributes in zip(slots, before, strict=True):
            if slot.attribute in attributes:
                vars(slot.owner)[slot.attribute] = attributes[slot.attribute]
            else:
                vars(slot.owner).pop(slot.attribute, None)
