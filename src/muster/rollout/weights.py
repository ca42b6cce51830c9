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
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

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
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            raise UsageError(
                f"the policy's {name!r} has no shape yet: it belongs to a lazy module, and each collector would draw "
                "weights of its own. Call the policy once on an observation before it is handed over, or pass "
                "policy_factory alone, which may build it lazily"
            )


def weights_for(policy: object, weights: Any) -> dict[str, Tensor]:
    """What `weights` have for each of the policy's own tensors, by name.

    weights: a module, a state dict, or a TensorDict as ``TensorDict.from_module`` gives it. Raises SpecMismatch for
    names or shapes that the policy does not have, UsageError for a policy without weights.
    """
    own = named_weights(policy)
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
    for name, tensor in own.items():
        if given[name].shape != tensor.shape:
            raise SpecMismatch(
                f"weights[{name!r}] has shape {tuple(given[name].shape)}, the policy's {tuple(tensor.shape)}"
            )
    return {name: given[name] for name in own}


@torch.no_grad()
def load_weights(policy: object, weights: Mapping[str, Tensor]) -> None:
    """Copies what `weights_for` gave into the policy's own tensors."""
    own = named_weights(policy)
    for name, tensor in weights.items():
        own[name].copy_(tensor)


def is_same_memory(mine: Tensor, other: Tensor) -> bool:
    """Whether both, which are of one shape, begin at the same place."""
    return mine.device == other.device and mine.data_ptr() == other.data_ptr()


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
        """Publishes `weights` as a whole; returns their version. Raises SpecMismatch where shapes differ."""
        for name, shared in self._tensors.items():
            if weights[name].shape != shared.shape:
                raise SpecMismatch(
                    f"weights[{name!r}] has shape {tuple(weights[name].shape)}, the policy's {tuple(shared.shape)}"
                )
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
