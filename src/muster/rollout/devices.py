"""The device that a policy computes on: finding it, and moving the policy to another one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from muster.errors import ConfigError

Device = torch.device | str | int | None


def place(policy: Any, device: Device) -> torch.device:
    """Moves `policy` to `device`, in place; returns the device that it computes on. None leaves it where it is.

    Tensors on the meta device are placeholders without values and stay there. Raises ConfigError where the policy
    cannot be moved.
    """
    if device is None:
        return _device_of(policy)
    target = to_device(device)
    if not isinstance(policy, nn.Module):
        return target
    wrong = [tensor for tensor in _tensors(policy) if not tensor.is_meta and tensor.device != target]
    if wrong:
        try:
            policy._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(target))  # type: ignore[no-untyped-call]  # torch's gap
        except Exception as error:
            raise ConfigError(
                f"policy_device={str(target)!r}: {type(policy).__qualname__} cannot be moved there: "
                f"{type(error).__name__}: {error}. Leave policy_device out, and it stays on {wrong[0].device}"
            ) from error
    return target


def to_device(device: Device) -> torch.device:
    """The device as torch names it in full. Raises ConfigError where there is none."""
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"device {str(device)!r} cannot be used: {error}") from error


def _device_of(policy: Any) -> torch.device:
    if isinstance(policy, nn.Module):
        for tensor in _tensors(policy):
            if not tensor.is_meta:
                return tensor.device
    return torch.device("cpu")


def _tensors(policy: nn.Module) -> list[Tensor]:
    return [*policy.parameters(), *policy.buffers()]
