"""Weights by name on their way from a learner to the policies that act, all of them or none; and a policy's device."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase  # type: ignore[import-untyped]  # ships no types
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from muster.errors import ConfigError, SpecMismatch, UsageError
from muster.nn.functional import all_names
from muster.pickling.interrupts import Uninterrupted

Device = torch.device | str | int | None
Copies = Sequence[tuple[Tensor, Tensor]]
"""Tensors, each with the values that it is to have."""


def named_weights(policy: object) -> dict[str, Tensor]:
    """The parameters and buffers of a policy that is a module or the method of one, each tensor once.

    Names are those before ``torch.compile``, which puts ``_orig_mod.`` into them. Placeholders on the meta device have
    no values, and are left out.
    """
    module = module_of(policy)
    if module is None:
        return {}
    tensors: dict[str, Tensor] = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {_plain(name): tensor for name, tensor in tensors.items() if not tensor.is_meta}


def require_shapes(policy: object) -> None:
    """Raises UsageError where weights have no shape yet: a lazy module takes it from its first input."""
    for name, tensor in named_weights(policy).items():
        if is_lazy(tensor):
            raise UsageError(
                f"the policy's {name!r} has no shape yet: it belongs to a lazy module, and each collector would draw "
                "weights of its own. Call the policy once on an observation before it is handed over, or pass "
                "policy_factory alone, which may build it lazily"
            )


def weights_for(policy: object, weights: Any, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The new values in `weights` for each of the policy's own tensors, by name.

    weights: a module, a state dict, or a TensorDict as ``TensorDict.from_module`` makes it.  own: the policy's
    `named_weights`. Raises SpecMismatch for names that the policy does not have and for what cannot be copied as it is,
    UsageError for a policy without weights.
    """
    if not own:
        raise UsageError(
            f"the policy is a {type(policy).__name__} without weights; there is nothing to update. If it calls a "
            "module, hand over that module, or a method of it"
        )
    provided = weights_by_name(weights)
    missing = sorted(own.keys() - provided.keys())
    module = module_of(policy)
    assert module is not None
    # Not only the names in `own`: state dicts have all names of shared tensors, and placeholders.
    unknown = sorted(provided.keys() - {_plain(name) for name, _ in all_names(module)})
    if unknown or missing:
        raise SpecMismatch(f"the weights are not this policy's: unknown {unknown[:5]}, missing {missing[:5]}")
    require_fitting(provided, own)
    return {name: provided[name] for name in own}


def weights_to_send(policy: object, weights: Any) -> tuple[dict[str, Tensor], Copies]:
    """Weights by name, and the copies that give them to the policy; its own where `weights` are None.

    weights: as for `weights_for`; where `policy` is None, nobody checks them. Raises SpecMismatch, UsageError.
    """
    own = named_weights(policy) if weights is None or policy is not None else weights_by_name(weights)
    if weights is not None and policy is not None:
        provided = weights_for(policy, weights, own)
        return provided, copies_into(policy, provided)
    if not own and module_of(policy) is None:
        raise UsageError(
            "there are no weights to send: give `weights`, or for a policy that module, or method of one, that has them"
        )
    return own, ()


def require_fitting(weights: Mapping[str, Any], own: Mapping[str, Tensor]) -> None:
    """Raises SpecMismatch where `copy_` would fail halfway, repeat rows, or leave out a part of the values."""
    for name, tensor in own.items():
        value = weights[name]
        if not isinstance(value, Tensor):
            raise SpecMismatch(f"weights[{name!r}] is a {type(value).__name__}; expected a tensor")
        if is_lazy(value) or value.is_meta:
            raise SpecMismatch(f"weights[{name!r}] has no values: it is lazy, or on the meta device")
        if value.layout != tensor.layout:
            raise SpecMismatch(f"weights[{name!r}] has layout {value.layout}, the policy's {tensor.layout}")
        if value.shape != tensor.shape:
            raise SpecMismatch(f"weights[{name!r}] has shape {tuple(value.shape)}, the policy's {tuple(tensor.shape)}")
        if value.is_complex() and not tensor.is_complex():
            raise SpecMismatch(f"weights[{name!r}] has dtype {value.dtype}, the policy's {tensor.dtype}")


def copies_into(policy: object, weights: Mapping[str, Tensor]) -> Copies:
    """The copies that give the policy's own tensors the values in `weights`, such as `weights_for` returns."""
    own = named_weights(policy)
    starts = {_start(tensor) for tensor in own.values()}
    # New values that lie in the policy's own tensors are cloned first: an earlier copy could overwrite them.
    others = {name: tensor for name, tensor in weights.items() if not is_same_memory(tensor, own[name])}
    return [(own[name], tensor.clone() if _start(tensor) in starts else tensor) for name, tensor in others.items()]


def copy_all(copies: Copies) -> None:
    """Makes all copies in one call of torch's, which Ctrl-C and other handlers of signals cannot end halfway.

    Into detached shells: tensors made under `torch.inference_mode` take none themselves. A sparse one does, as it gets
    new memory, which only its shell would know of.
    """
    if copies:
        with Uninterrupted(), torch.no_grad():  # an interrupt at the edge of the latter would leave gradients off
            to = [tensor.detach() if tensor.layout is torch.strided else tensor for tensor, _ in copies]
            torch._foreach_copy_(to, [value for _, value in copies])


def is_same_memory(mine: Tensor, other: Tensor) -> bool:
    """True if two tensors of one shape are the same numbers in memory."""
    return mine is other or (
        _start(mine) == _start(other) and (mine.stride(), mine.dtype) == (other.stride(), other.dtype)
    )


def _start(tensor: Tensor) -> object:
    """The place in memory where the numbers of a tensor begin; the tensor's id where they lie in several places."""
    is_dense = not is_lazy(tensor) and tensor.layout is torch.strided
    return (tensor.device, tensor.data_ptr()) if is_dense else id(tensor)


def _plain(name: str) -> str:
    """A tensor's name as it is in the module that ``torch.compile`` was given."""
    return name.replace("_orig_mod.", "")


def module_of(policy: object) -> nn.Module | None:
    """The module that `policy` is, or is a method of."""
    owner = policy.__self__ if inspect.ismethod(policy) else policy
    return owner if isinstance(owner, nn.Module) else None


def weights_by_name(weights: Any) -> dict[str, Tensor]:
    """The tensors of a module, a state dict or a TensorDict by name. Raises UsageError for anything else."""
    if isinstance(weights, nn.Module):
        weights = {**dict(weights.named_parameters()), **dict(weights.named_buffers())}
    if isinstance(weights, TensorDictBase):
        flat = weights.flatten_keys(".")
        return {_plain(key): flat.get(key) for key in flat.keys()}  # noqa: SIM118  # it iterates over its batch
    if isinstance(weights, Mapping):
        return {_plain(name): tensor for name, tensor in weights.items()}
    raise UsageError(f"weights must be a module, a state dict or a TensorDict, got {type(weights).__name__}")


def place(policy: Any, device: Device, option: str = "policy_device") -> torch.device:
    """Moves `policy` to `device`, in place; returns the device that it computes on. None leaves it where it is.

    Tensors on the meta device are placeholders without values and stay there. Raises ConfigError, which names the
    option, where the policy cannot be moved.
    """
    if device is None:
        return next((tensor.device for tensor in _tensors(policy) if not tensor.is_meta), torch.device("cpu"))
    target = to_device(device)
    if not isinstance(policy, nn.Module):
        return target
    wrong = [tensor for tensor in _tensors(policy) if not tensor.is_meta and tensor.device != target]
    if wrong:
        try:
            policy._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(target))  # type: ignore[no-untyped-call]  # torch's gap
        except Exception as error:
            raise ConfigError(
                f"{option}={str(target)!r}: {type(policy).__qualname__} cannot be moved there: "
                f"{type(error).__name__}: {error}. Leave {option} out, and it stays on {wrong[0].device}"
            ) from error
    return target


def to_device(device: Device) -> torch.device:
    """The device as torch names it in full. Raises ConfigError where there is none."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {str(device)!r} cannot be used: {error}") from error


def _tensors(policy: Any) -> list[Tensor]:
    return [*policy.parameters(), *policy.buffers()] if isinstance(policy, nn.Module) else []
