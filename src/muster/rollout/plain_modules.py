"""TensorDictModules called without a TensorDict, where that changes nothing except the time.

A call through a TensorDict costs some 100 us, more than a small network. Modules that do nothing but read keys, call a
module, and write keys are called on a dict instead. Everything else is called as it is: subclasses, hooks, selected
keys, keyword arguments, methods, probabilistic modules.
"""

from __future__ import annotations

from typing import Any

from tensordict import TensorDict, TensorDictBase  # type: ignore[import-untyped]  # ships no types
from tensordict.nn import (  # type: ignore[import-untyped]  # ships no types
    TensorDictModule,
    TensorDictSequential,
    skip_existing,
)
from torch import Tensor, nn

from muster.nn.fast_call import all_modules_are_hooked, does_more
from muster.rollout.fields import Key

_ABSENT = object()


def as_key(key: Any) -> Key:
    """A TensorDict key as a tuple of names."""
    return (key,) if isinstance(key, str) else tuple(key)


class PlainModules:
    """The modules of `policy`, in the order of their calls; `able` is False where any of them needs a TensorDict."""

    def __init__(self, policy: Any) -> None:
        parts = _parts(policy)
        self.able = parts is not None
        self._wrappers = [policy, *(parts or ())]
        self._calls = [
            (part.module, [as_key(key) for key in part.in_keys], [as_key(key) for key in part.out_keys])
            for part in parts or ()
        ]
        # Kept alive, so that no other object can have their ids.
        self._modules = list(policy.modules()) if isinstance(policy, nn.Module) else []
        self._identity = [*map(id, self._wrappers), *((id(module), *keys) for module, *keys in self._calls)]
        if not self.able:
            self._identity += [(id(module), _keys_of(module)) for module in self._modules]

    def is_like(self, other: PlainModules) -> bool:
        """Whether `other` has the very same modules with the same keys."""
        return self._identity == other._identity

    def call(self, values: dict[Key, Tensor]) -> bool:
        """Calls the modules and adds their outputs to `values`; returns False, with nothing called, where it cannot.

        Raises what the modules raise.
        """
        if not self.able or skip_existing() or all_modules_are_hooked() or any(map(does_more, self._wrappers)):
            return False
        available = set(values)
        for _, in_keys, out_keys in self._calls:
            if not available.issuperset(in_keys):
                return False
            available.update(out_keys)
        for module, in_keys, out_keys in self._calls:
            outputs = module(*[values[key] for key in in_keys])
            if isinstance(outputs, (dict, TensorDictBase)):
                outputs = _picked(outputs, out_keys)
            elif not isinstance(outputs, tuple):
                outputs = (outputs,)
            for key, output in zip(out_keys, outputs, strict=True):
                if isinstance(output, Tensor):
                    values[key] = output
                else:
                    values.update(_leaves(key, TensorDict.from_any(output)))
        return True


def _parts(policy: Any) -> list[Any] | None:
    """The plain modules that `policy` runs one after the other, None where it does anything else."""
    if "forward" in getattr(policy, "__dict__", ()):
        return None
    if type(policy) is TensorDictModule:
        plain = (
            policy.inplace is True
            and policy.method is None
            and not policy.method_kwargs
            and getattr(policy, "_kwargs", _ABSENT) is None
            and getattr(policy, "_get_kwargs", _ABSENT) == {}
            and "_" not in policy.out_keys
        )
        return [policy] if plain else None
    if type(policy) is not TensorDictSequential:
        return None
    if policy.partial_tolerant or policy.inplace is not None or getattr(policy, "_select_before_return", True):
        return None
    inner = policy.module.values() if isinstance(policy.module, nn.ModuleDict) else policy.module
    chains = [_parts(module) for module in inner]
    return None if None in chains else [part for chain in chains if chain is not None for part in chain]


def _keys_of(module: nn.Module) -> str:
    """The TensorDict keys that a module reads and writes, as far as it names them."""
    return repr((getattr(module, "in_keys", ()), getattr(module, "out_keys", ())))


def _picked(outputs: Any, out_keys: list[Key]) -> tuple[Any, ...]:
    """The values under a module's keys in the dict that it returned; the dict itself where it lacks some."""
    if isinstance(outputs, dict):
        outputs = {as_key(key): value for key, value in outputs.items()}
    if not all(key in outputs for key in out_keys):
        return (outputs,)
    return tuple(outputs[key] for key in out_keys)


def _leaves(key: Key, value: Any) -> dict[Key, Any]:
    if not isinstance(value, TensorDictBase):
        return {key: value}
    return {(*key, *as_key(inner)): value.get(inner) for inner in value.keys(include_nested=True, leaves_only=True)}
