"""The extras of a policy's weights: training flags, and plain tensors and numbers on its modules."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from muster.introspection import caller_stacklevel
from muster.rollout.weights import module_of

Place = tuple[str, ...]
"""A module's name in the policy, and the attributes that lead from it to a value."""

# Attributes that every module has: parameters, buffers, modules and hooks.
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"}
_NUMBERS = (bool, int, float, complex, str, bytes, type(None), np.generic)


class BesideWeights:
    """Watches the extras of a policy's weights for changes, from now on.

    Values are plain: tensors that are no parameters or buffers, arrays, numbers, strings, and lists, tuples and dicts
    of them; on modules, and on objects that are attributes of modules.
    """

    def __init__(self, policy: object) -> None:
        self._policy = policy
        self._seen = {place: _mark(value) for place, value in _values(policy)}
        self._changed: dict[Place, Any] = {}

    def changes(self) -> bytes:
        """All that has changed so far, for `apply_changes`. Warns of values that were plain and are not any more."""
        for place, value in _values(self._policy):
            mark = _mark(value)
            if place in self._seen and _same(self._seen[place], mark):
                continue
            was_plain = self._seen.get(place, ...) is not ...
            # Seen after it is noted: an interrupt in between loses no change.
            if mark is not ...:
                self._changed[place] = _for_travel(value)
            else:
                self._changed.pop(place, None)
            self._seen[place] = mark
            if mark is ... and was_plain:
                name = ".".join(part for part in place if part)
                warnings.warn(
                    f"the policy's {name} has become a {type(value).__name__}, which collectors do not get: they go on "
                    "with what they had. register_buffer it as a tensor, or keep it a number, a string, or a list or "
                    "dict of them",
                    RuntimeWarning,
                    stacklevel=caller_stacklevel(),
                )
        return pickle.dumps(self._changed)


def apply_changes(policy: object, changes: bytes) -> None:
    """Makes the changes in a policy of the same kind. Places that it does not have are left out."""
    module = module_of(policy)
    modules = {} if module is None else dict(module.named_modules())
    for (name, *path, last), value in pickle.loads(changes).items():
        owner: Any = modules.get(name)
        for attribute in path:
            owner = getattr(owner, attribute, None)
        if owner is None or (path and not hasattr(owner, last)):
            continue
        before = getattr(owner, last, None)
        if isinstance(value, Tensor) and isinstance(before, Tensor):
            value = value.to(before.device)
        setattr(owner, last, value)


def _values(policy: object) -> Iterator[tuple[Place, Any]]:
    """The values on the policy's modules, and on objects that are attributes of them, by place."""
    module = module_of(policy)
    for name, owner in () if module is None else module.named_modules():
        for attribute, value in vars(owner).items():
            if attribute in _OF_MODULES:
                continue
            yield (name, attribute), value
            if not isinstance(value, (type, nn.Module)) and isinstance(inner := getattr(value, "__dict__", None), dict):
                for key, part in inner.items():
                    if _mark(part) is not ...:
                        yield (name, attribute, key), part


def _mark(value: Any) -> Any:
    """A key that is equal as long as a plain value is; ``...`` for what is not plain."""
    if isinstance(value, Tensor):
        # The count of its changes in place, where torch counts them.
        return value.clone() if value.is_inference() else (value, value._version)
    if isinstance(value, np.ndarray):
        return ... if value.dtype.hasobject else value.copy()
    if isinstance(value, _NUMBERS):
        return value
    if type(value) in (list, tuple):
        marks: Any = [_mark(part) for part in value]
        return ... if any(one is ... for one in marks) else marks
    if type(value) is dict:
        marks = {key: _mark(part) for key, part in value.items()}
        return ... if any(one is ... for one in marks.values()) else marks
    return ...


def _same(before: Any, after: Any) -> Any:
    if type(before) is not type(after):
        return False
    if isinstance(before, Tensor):
        return before.dtype == after.dtype and torch.equal(before, after)
    if isinstance(before, np.ndarray):
        return before.dtype == after.dtype and before.tobytes() == after.tobytes() and before.shape == after.shape
    if isinstance(before, tuple):  # of a tensor
        return before[0] is after[0] and before[1] == after[1]
    if isinstance(before, list):
        return len(before) == len(after) and all(map(_same, before, after))
    if isinstance(before, dict):
        return list(before) == list(after) and all(_same(before[key], after[key]) for key in before)
    return before == after or (before != before and after != after)  # nan


def _for_travel(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().cpu()
    if type(value) in (list, tuple):
        return type(value)(map(_for_travel, value))
    if type(value) is dict:
        return {key: _for_travel(part) for key, part in value.items()}
    return value
