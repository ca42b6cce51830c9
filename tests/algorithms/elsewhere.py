"""A device that is not the CPU, for machines without one: its tensors say ``meta``, and are numbers of the CPU."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

aten = torch.ops.aten
META = torch.device("meta")


class Elsewhere(torch.Tensor):
    """A tensor on it. What mixes it with tensors of the CPU raises, as on a GPU; single numbers may be mixed."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner):
        one = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=META, requires_grad=inner.requires_grad,
        )  # fmt: skip
        one.inner = inner
        return one

    __torch_function__ = torch._C._disabled_torch_function_impl

    def as_subclass(self, cls):
        """As it is: no tensor is of two kinds."""
        return self

    def tolist(self):
        return self.inner.tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _computed(func, args, kwargs or {})


class OnElsewhere(TorchDispatchMode):
    """In the ``with`` block ``device="meta"`` makes tensors of this kind."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _computed(func, args, kwargs or {})


def _computed(func, args, kwargs):
    # Indices may lie on the CPU.
    operands = (args[0], *args[2:]) if func.overloadpacket in (aten.index, aten.index_put_) else args
    tensors = [one for one in tree_leaves((operands, kwargs)) if isinstance(one, torch.Tensor)]
    away = [one for one in tensors if isinstance(one, Elsewhere)]
    moves = func.overloadpacket in (aten._to_copy, aten.copy_)
    if away and not moves and any(not isinstance(one, Elsewhere) and one.ndim for one in tensors):
        raise RuntimeError(f"{func}: operands on two devices")
    device = kwargs.get("device")
    ends_away = bool(away) if device is None else torch.device(device) == META
    if func.overloadpacket is aten.copy_:
        ends_away = isinstance(args[0], Elsewhere)
    if device is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    args, kwargs = tree_map_only(Elsewhere, lambda one: one.inner, (args, kwargs))
    result = func(*args, **kwargs)
    if func._schema.is_mutable and away and "device" not in kwargs:
        named = {id(one.inner): one for one in away}
        return tree_map_only(torch.Tensor, lambda one: named.get(id(one), one), result)
    return tree_map_only(torch.Tensor, Elsewhere, result) if ends_away else result
