"""Weights in motion: by name, from a learner to the policies that act, whole or not at all."""

from __future__ import annotations

import fcntl
import inspect
import mmap
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase  # type: ignore[import-untyped]  # ships no types
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from muster.errors import SpecMismatch, UsageError
from muster.transport.slab import memfd

_ALIGN = 64

WeightsLayout = dict[str, tuple[tuple[int, ...], str]]


def named_weights(policy: object) -> dict[str, Tensor]:
    """The parameters and buffers of a module, or of the one that a method is of, each tensor once.

    Placeholders on the meta device have no values, and are left out.
    """
    module = module_of(policy)
    if module is None:
        return {}
    tensors: dict[str, Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: tensor for name, tensor in tensors.items() if not tensor.is_meta}


def layout_of(weights: Mapping[str, Tensor]) -> WeightsLayout:
    """Shape and dtype by name: equal for weights that can stand for one another."""
    return {name: (tuple(tensor.shape), str(tensor.dtype)) for name, tensor in weights.items()}


def require_shapes(policy: object) -> None:
    """Raises UsageError where weights have none yet, which a lazy module takes from its first input."""
    for name, tensor in named_weights(policy).items():
        if is_lazy(tensor):
            raise UsageError(
                f"the policy's {name!r} has no shape yet: it belongs to a lazy module, and each collector would draw "
                "weights of its own. Call the policy once on an observation before it is handed over, or pass "
                "policy_factory alone, which may build it lazily"
            )


def weights_for(policy: object, weights: Any, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What `weights` have for each of the policy's own tensors, by name.

    weights: a module, a state dict, or a TensorDict as ``TensorDict.from_module`` gives it.  own: the policy's
    `named_weights`. Raises SpecMismatch for names that the policy does not have and for what cannot be copied as it is,
    UsageError for a policy without weights.
    """
    if not own:
        raise UsageError(
            f"the policy is a {type(policy).__name__} without weights; there is nothing to update. If it calls a "
            "module, hand over that module, or a method of it"
        )
    given = weights_by_name(weights)
    missing = sorted(own.keys() - given.keys())
    unknown = sorted(given.keys() - _all_names(policy))
    if unknown or missing:
        raise SpecMismatch(f"the weights are not this policy's: unknown {unknown[:5]}, missing {missing[:5]}")
    _require_fitting(given, own)
    return {name: given[name] for name in own}


def _require_fitting(weights: Mapping[str, Any], own: Mapping[str, Tensor]) -> None:
    """Raises SpecMismatch where `copy_` would fail halfway, repeat rows, or leave out a part of the values."""
    for name, tensor in own.items():
        given = weights[name]
        if not isinstance(given, Tensor):
            raise SpecMismatch(f"weights[{name!r}] is a {type(given).__name__}; expected a tensor")
        if is_lazy(given) or given.is_meta:
            raise SpecMismatch(f"weights[{name!r}] has no values: it is lazy, or on the meta device")
        if given.layout != tensor.layout:
            raise SpecMismatch(f"weights[{name!r}] has layout {given.layout}, the policy's {tensor.layout}")
        if given.shape != tensor.shape:
            raise SpecMismatch(f"weights[{name!r}] has shape {tuple(given.shape)}, the policy's {tuple(tensor.shape)}")
        if given.is_complex() and not tensor.is_complex():
            raise SpecMismatch(f"weights[{name!r}] has dtype {given.dtype}, the policy's {tensor.dtype}")


@torch.no_grad()
def load_weights(policy: object, weights: Mapping[str, Tensor]) -> None:
    """Copies what `weights_for` gave into the policy's own tensors."""
    if not weights:
        return
    own = named_weights(policy)
    starts = {_start(tensor) for tensor in own.values()}
    # Own tensors that change places are copied first.
    others = {name: tensor for name, tensor in weights.items() if not is_same_memory(tensor, own[name])}
    copies = {name: tensor.clone() if _start(tensor) in starts else tensor for name, tensor in others.items()}
    for name, tensor in copies.items():
        own[name].copy_(tensor)


def is_same_memory(mine: Tensor, other: Tensor) -> bool:
    """Whether both, which are of one shape, are the same numbers."""
    return mine is other or (
        _start(mine) == _start(other) and (mine.stride(), mine.dtype) == (other.stride(), other.dtype)
    )


def _start(tensor: Tensor) -> object:
    """Where its numbers begin; itself, where they lie in no one place."""
    is_dense = not is_lazy(tensor) and tensor.layout is torch.strided
    return (tensor.device, tensor.data_ptr()) if is_dense else id(tensor)


class SharedWeights:
    """One learner's weights in shared memory, for replicas in other processes; a version counts the updates.

    Readers and writers keep each other out by a lock of the kernel's, which ends with the process that holds it: nobody
    ever sees half an update, and nobody who dies leaves the others locked out. Within a process, whose threads share
    that lock, a second one does.

    like: the tensors, by name; the same names, shapes and dtypes at both ends.  fd: the memory that the other end made.
    """

    def __init__(self, like: Mapping[str, Tensor], fd: int | None = None) -> None:
        like = dict(sorted(like.items()))  # modules that register the same weights in another order fit, too
        places: dict[str, int] = {}
        size = _ALIGN
        for name, tensor in like.items():
            places[name] = size
            size += (tensor.numel() * tensor.element_size() + _ALIGN - 1) // _ALIGN * _ALIGN
        self.fd = memfd("weights") if fd is None else fd
        self._threads = threading.Lock()
        if os.fstat(self.fd).st_size < size:
            os.ftruncate(self.fd, size)
        block = mmap.mmap(self.fd, size)
        self._version = np.frombuffer(block, np.int64, 1)
        self._tensors: dict[str, Tensor] = {}
        for name, tensor in like.items():
            if tensor.numel():
                flat = torch.frombuffer(block, dtype=tensor.dtype, count=tensor.numel(), offset=places[name])
                self._tensors[name] = flat.view(tensor.shape)

    @property
    def names(self) -> frozenset[str]:
        """Of the tensors that have any element."""
        return frozenset(self._tensors)

    @property
    def version(self) -> int:
        """How often `write` was called."""
        return int(self._version[0])

    @torch.no_grad()
    def write(self, weights: Mapping[str, Tensor]) -> int:
        """Publishes `weights` as a whole; returns their version. Raises SpecMismatch where they differ in kind."""
        _require_fitting(weights, self._tensors)
        with self._locked(fcntl.LOCK_EX):
            for name, shared in self._tensors.items():
                shared.copy_(weights[name])
            self._version[0] += 1
            return self.version

    def read(self) -> dict[str, Tensor]:
        """Copies of the latest version, by name."""
        with self._locked(fcntl.LOCK_SH):
            return {name: shared.clone() for name, shared in self._tensors.items()}

    @torch.no_grad()
    def read_into(self, weights: Mapping[str, Tensor], known: int) -> int:
        """Copies the latest version into `weights`, unless it is the `known` one; returns which it is."""
        if self.version == known:
            return known
        with self._locked(fcntl.LOCK_SH):
            for name, shared in self._tensors.items():
                weights[name].copy_(shared)
            return self.version

    @contextmanager
    def _locked(self, kind: int) -> Iterator[None]:
        with self._threads:
            fcntl.lockf(self.fd, kind)
            try:
                yield
            finally:
                fcntl.lockf(self.fd, fcntl.LOCK_UN)


def module_of(policy: object) -> nn.Module | None:
    """The module that `policy` is, or is a method of."""
    owner = policy.__self__ if inspect.ismethod(policy) else policy
    return owner if isinstance(owner, nn.Module) else None


def weights_by_name(weights: Any) -> dict[str, Tensor]:
    """The tensors of a module, a state dict or a TensorDict by name. Raises UsageError for anything else."""
    if isinstance(weights, nn.Module):
        return {**dict(weights.named_parameters()), **dict(weights.named_buffers())}
    if isinstance(weights, TensorDictBase):
        flat = weights.flatten_keys(".")
        return {key: flat.get(key) for key in flat.keys()}  # noqa: SIM118  # a TensorDict iterates over its batch
    if isinstance(weights, Mapping):
        return dict(weights)
    raise UsageError(f"weights must be a module, a state dict or a TensorDict, got {type(weights).__name__}")


def _all_names(policy: object) -> set[str]:
    """Also the second names of shared tensors, and placeholders: state dicts have them."""
    module = module_of(policy)
    assert module is not None
    parameters = module.named_parameters(remove_duplicate=False)
    buffers = module.named_buffers(remove_duplicate=False)
    return {name for name, _ in [*parameters, *buffers]}
