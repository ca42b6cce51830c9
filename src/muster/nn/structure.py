"""Whether modules are alike, so that one can run with the parameters of another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from muster.errors import SpecMismatch, UsageError
from muster.nn.functional import named_tensors

_PLAIN = (bool, int, float, complex, str, bytes, tuple, type(None), torch.dtype)


def require_alike(modules: Sequence[nn.Module]) -> None:
    """Returns if the modules differ in nothing but the values of their tensors.

    Raises SpecMismatch that names the first difference: classes, options, names, shapes, dtypes, devices, frozen or
    not, tied or not. Raises UsageError where two of them share a tensor, which stacking would separate.
    """
    first = dict(_description(modules[0]))
    for index, module in enumerate(modules[1:], start=1):
        other = dict(_description(module))
        for key in first | other:
            mine, its = first.get(key, "absent"), other.get(key, "absent")
            if mine != its:
                raise SpecMismatch(
                    f"modules 0 and {index} differ in {key}: {mine} and {its}. Networks with stacked parameters "
                    "must be alike in all but their values; make one MultiAgentNet for each group of agents that are"
                )
    _require_own_tensors(modules)


def _description(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        yield f"the class of {path or 'the module'}", type(part)
        for name, value in vars(part).items():
            if isinstance(value, _PLAIN):
                yield f"{prefix}{name}", value
            elif not isinstance(value, nn.Module) and hasattr(value, "__qualname__"):  # a function, such as torch.tanh
                yield f"{prefix}{name}", value.__qualname__
    names: dict[int, str] = {}
    for name, tensor in _all_tensors(module):
        yield f"the tensor {name}", (list(tensor.shape), tensor.dtype, tensor.device, tensor.requires_grad)
        yield f"what {name} is tied to", names.setdefault(id(tensor), name)


def _require_own_tensors(modules: Sequence[nn.Module]) -> None:
    owners: dict[int, tuple[int, str]] = {}
    for index, module in enumerate(modules):
        for name, tensor in named_tensors(module).items():
            owner, owner_name = owners.setdefault(id(tensor), (index, name))
            if owner != index:
                raise UsageError(
                    f"modules {owner} and {index} share the tensor {owner_name!r}; stacking would separate them. For "
                    "one network for all agents use MultiAgentNet([module], n_agents, share_params=True); a part that "
                    "they share can be a module of its own in front of this one"
                )


def _all_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
