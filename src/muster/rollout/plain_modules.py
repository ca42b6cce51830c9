"""TensorDictModules called without a TensorDict, where that changes nothing except the time.

A call through a TensorDict costs some 100 us, more than a small network. Modules that do nothing but read keys, call a
module, and write keys are called on a dict instead, and a distribution on a TensorDict of its parameters alone.
Everything else is called as it is: classes with methods of their own, hooks, selected keys, keyword arguments, methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensordict import TensorDict, TensorDictBase  # type: ignore[import-untyped]  # ships no types
from tensordict.nn import (  # type: ignore[import-untyped]  # ships no types
    CompositeDistribution,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
    skip_existing,
)
from tensordict.nn.probabilistic import interaction_type  # type: ignore[import-untyped]  # ships no types
from torch import Tensor, nn

from muster.introspection import module_name
from muster.nn.fast_call import all_modules_are_hooked, does_more
from muster.rollout.fields import Key

_ABSENT = object()
# The methods that a call of the class runs: one of a subclass may do anything.
_METHODS = {
    TensorDictModule: ("forward", "_call_module", "_write_to_tensordict"),
    ProbabilisticTensorDictSequential: ("forward", "get_dist_params", "det_part", "_last_module"),
    TensorDictSequential: ("forward", "_run_module", "_module_iter"),
}
# Methods with which a distribution draws and scores at once, where TorchRL's module asks for both.
_TOGETHER = ("sample_and_log_prob", "rsample_and_log_prob")
# Classes of distributions as modules: topmost module and name.
_DRAWS = (("tensordict", "ProbabilisticTensorDictModule"), ("torchrl", "SafeProbabilisticModule"))


def as_key(key: Any) -> Key:
    """A TensorDict key as a tuple of names."""
    return (key,) if isinstance(key, str) else tuple(key)


def leaves_of(tree: TensorDictBase, key: Key = ()) -> dict[Key, Any]:
    """The leaves of `tree` by key; `key`: its own. Objects are leaves, too."""
    found: dict[Key, Any] = {}
    for name, value in tree.items():
        if isinstance(value, TensorDictBase):
            found |= leaves_of(value, (*key, name))
        else:
            found[(*key, name)] = value
    return found


class PlainModules:
    """The modules of `policy`, in the order of their calls; `able` is False where any of them needs a TensorDict.

    batch_size: that of the TensorDict of a distribution's parameters.
    """

    def __init__(self, policy: Any, batch_size: Sequence[int] = ()) -> None:
        parts = _parts(policy)
        self.able = parts is not None
        self._batch_size = batch_size
        self._wrappers = [policy, *(parts or ())]
        self._calls = [
            (
                part if isinstance(part, ProbabilisticTensorDictModule) else part.module,
                [as_key(key) for key in part.in_keys],
                [as_key(key) for key in part.out_keys],
            )
            for part in parts or ()
        ]
        self._draws = any(isinstance(module, ProbabilisticTensorDictModule) for module, *_ in self._calls)
        # Kept alive, so that no other object can have their ids.
        self._modules = list(policy.modules()) if isinstance(policy, nn.Module) else []
        self._identity = [*map(id, self._wrappers), *((id(module), *keys) for module, *keys in self._calls)]
        if not self.able:
            named = ("in_keys", "out_keys")
            self._identity += [(id(one), *(repr(getattr(one, keys, ())) for keys in named)) for one in self._modules]

    def is_like(self, other: PlainModules) -> bool:
        """True if `other` has the very same modules with the same keys."""
        return self._identity == other._identity

    def call(self, values: dict[Key, Tensor]) -> bool:
        """Calls the modules and adds their outputs to `values`; returns False, with nothing called, where it cannot.

        Raises what the modules raise.
        """
        if not self.able or skip_existing() or all_modules_are_hooked() or any(map(does_more, self._wrappers)):
            return False
        if self._draws and interaction_type() is None:  # each module has its own
            return False
        available = set(values)
        for _, in_keys, out_keys in self._calls:
            if not available.issuperset(in_keys):
                return False
            available.update(out_keys)
        for module, in_keys, out_keys in self._calls:
            if isinstance(module, ProbabilisticTensorDictModule):
                self._draw(module, in_keys, values)
                continue
            outputs = module(*[values[key] for key in in_keys])
            if isinstance(outputs, (dict, TensorDictBase)):
                outputs = _picked(outputs, out_keys)
            elif not isinstance(outputs, tuple):
                outputs = (outputs,)
            for key, output in zip(out_keys, outputs, strict=True):
                made = output if isinstance(output, Tensor) else TensorDict.from_any(output)
                if isinstance(made, TensorDictBase):
                    values |= leaves_of(made, key)
                else:
                    values[key] = made
        return True

    def _draw(self, module: Any, in_keys: list[Key], values: dict[Key, Tensor]) -> None:
        """Adds what the module draws from its distribution to `values`, and its log-probability."""
        dist = module.get_dist({key: values[as_key(key)] for key in module.in_keys})
        simple = module._generator is None and not isinstance(dist, CompositeDistribution)
        if not simple or any(hasattr(dist, name) for name in _TOGETHER):
            given = TensorDict({key: values[key] for key in in_keys}, batch_size=self._batch_size)
            values |= leaves_of(module(given))
            return
        drawn = module._dist_sample(dist, interaction_type=interaction_type())
        outputs = drawn if isinstance(drawn, tuple) else (drawn,)
        for key, output in zip(module.dist_sample_keys, outputs, strict=True):
            values[as_key(key)] = output
        if module.return_log_prob:
            values[as_key(module.log_prob_key)] = dist.log_prob(*outputs)


def _parts(policy: Any) -> list[Any] | None:
    """The plain modules that `policy` runs one after the other, None where it does anything else."""
    if "forward" in getattr(policy, "__dict__", ()):
        return None
    if _is_plain(policy, TensorDictModule):
        plain = (
            policy.inplace is True
            and policy.method is None
            and not policy.method_kwargs
            and getattr(policy, "_kwargs", _ABSENT) is None
            and getattr(policy, "_get_kwargs", _ABSENT) == {}
            and "_" not in policy.out_keys
        )
        return [policy] if plain else None
    draws = _is_plain(policy, ProbabilisticTensorDictSequential)
    if not (draws or _is_plain(policy, TensorDictSequential)):
        return None
    if policy.partial_tolerant or policy.inplace is not None or getattr(policy, "_select_before_return", True):
        return None
    if draws:
        before, last = policy.det_part, policy._last_module
        if policy.return_composite or not policy._requires_sample or not _is_plain_draw(last):
            return None
        parts = _parts(before)
        return None if parts is None else [*parts, last]
    inner = policy.module.values() if isinstance(policy.module, nn.ModuleDict) else policy.module
    chains = [_parts(module) for module in inner]
    return None if None in chains else [part for chain in chains if chain is not None for part in chain]


def _is_plain(policy: Any, base: type) -> bool:
    """True if calls of the policy run the methods of `base`."""
    kind = type(policy)
    return issubclass(kind, base) and all(
        getattr(kind, name, _ABSENT) is getattr(base, name) for name in _METHODS[base]
    )


def _is_plain_draw(module: Any) -> bool:
    kind = type(module)
    return (
        (module_name(kind).partition(".")[0], kind.__name__) in _DRAWS
        and "forward" not in module.__dict__
        and module.num_samples is None  # else its outputs have dimensions of their own
        and getattr(module, "_generator_key", _ABSENT) is None
        and hasattr(module, "_dist_sample")
        and "_" not in module.dist_sample_keys
    )


def _picked(outputs: Any, out_keys: list[Key]) -> tuple[Any, ...]:
    """The values under a module's keys in the dict that it returned; the dict itself where it lacks some."""
    if isinstance(outputs, dict):
        outputs = {as_key(key): value for key, value in outputs.items()}
    if not all(key in outputs for key in out_keys):
        return (outputs,)
    return tuple(outputs[key] for key in out_keys)
